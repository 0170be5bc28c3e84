"""Sinks by name: which ones a run writes to, that a run takes others besides, and metrics.jsonl."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from freewheel.core import Sink
from freewheel.errors import UsageError
from freewheel.registry import Registry
from freewheel.sinks import sink as sinks
from freewheel.sinks.jsonl import JsonlSink
from freewheel.sinks.sink import SINKS, RunInfo, SinkEntry, chosen
from tests.support.runs import train


class Record:
    """Keeps all that it is given."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.notes: list[str] = []
        self.summary: Mapping[str, Any] = {}

    def write(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def close(self, summary: Mapping[str, Any]) -> None:
        self.summary = summary


def test_ours_are_on_by_default() -> None:
    ours = {"console", "jsonl", "messages"}
    assert {name for name in SINKS if SINKS[name].default} == ours
    assert {entry.name for entry in chosen([])} == ours == {entry.name for entry in chosen(["jsonl"])}


def test_an_unknown_name_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown sink 'jsonll'; did you mean 'jsonl'"):
        train(tmp_path, sinks=["jsonll"])
    assert list(tmp_path.iterdir()) == []


OPENED: list[tuple[RunInfo, Record]] = []


def open_record(run: RunInfo) -> Sink:
    OPENED.append((run, Record()))
    return OPENED[-1][1]


ENTRY = SinkEntry("record", open_record)


def test_a_sink_of_another_package_is_turned_on_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = metadata.EntryPoint("record", f"{__name__}:ENTRY", "freewheel.sinks")
    monkeypatch.setattr(metadata.EntryPoint, "load", lambda self: ENTRY)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point] if group == "freewheel.sinks" else [])
    monkeypatch.setattr(sinks, "SINKS", Registry[SinkEntry]("sink", "SINK", "freewheel.sinks"))
    OPENED.clear()
    train(tmp_path, run="without", steps=128)
    assert OPENED == []
    result = train(tmp_path, run="with", steps=128, sinks=["record"])
    ((run, record),) = OPENED
    assert (run.path, run.algorithm, run.mode, run.quiet) == (tmp_path / "with", "ppo", "lockstep", True)
    assert (len(record.rows), record.summary) == (2, result.summary)


def test_a_run_takes_sink_objects(tmp_path: Path) -> None:
    record = Record()
    result = train(tmp_path, mode="batch", workers=1, steps=128, evals=0, sinks=[record, "jsonl"])
    assert record.rows[-1]["env_steps"] == result.summary["env_steps"]
    assert record.summary == result.summary
    assert any("1 worker x" in note for note in record.notes)
    assert (result.path / "metrics.jsonl").read_text().count("\n") == len(record.rows)


ROW = {"wall_s": 1.5, "return_mean": None, "dropped": {"stale": 2}}


def test_metrics_jsonl_has_one_line_a_row_readable_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink: Sink = JsonlSink(path)
    assert path.read_text() == ""
    sink.write(ROW)
    assert path.read_text() == '{"wall_s": 1.5, "return_mean": null, "dropped": {"stale": 2}}\n'
    sink.note("a worker died")
    sink.write(ROW | {"wall_s": 3.0, "note": "two\nlines"})
    sink.close({"exit_code": 0})
    later = JsonlSink(path)  # it appends
    with pytest.raises(ValueError, match="not JSON compliant"):
        later.write(ROW | {"return_mean": float("nan")})
    later.write(ROW)
    later.close({})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [ROW, ROW | {"wall_s": 3.0, "note": "two\nlines"}, ROW]
