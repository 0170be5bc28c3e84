"""Sinks by name: which ones a run writes to, and that a run takes others besides."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import freewheel
from freewheel.core import Sink
from freewheel.errors import UsageError
from freewheel.registry import Registry
from freewheel.sinks import sink as sinks
from freewheel.sinks.sink import SINKS, RunInfo, SinkEntry, chosen


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


def train(tmp_path: Path, **options: Any) -> Any:
    small: dict[str, Any] = {"num_envs": 2, "num_steps_per_env": 16, "steps": 64, "log_every": 1e-9, "evals": 0}
    return freewheel.train("freewheel.testing.worlds:Identity", quiet=True, runs_dir=tmp_path, **small | options)


def test_ours_are_on_by_default() -> None:
    assert {name for name in SINKS if SINKS[name].default} == {"console", "jsonl"}
    assert {entry.name for entry in chosen([])} == {"console", "jsonl"} == {entry.name for entry in chosen(["jsonl"])}


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
    train(tmp_path, run="without")
    assert OPENED == []
    result = train(tmp_path, run="with", sinks=["record"])
    ((run, record),) = OPENED
    assert (run.path, run.algorithm, run.mode, run.quiet) == (tmp_path / "with", "ppo", "lockstep", True)
    assert (len(record.rows), record.summary) == (2, result.summary)


def test_a_run_takes_sink_objects(tmp_path: Path) -> None:
    record = Record()
    result = train(tmp_path, mode="batch", workers=1, sinks=[record, "jsonl"])
    assert record.rows[-1]["env_steps"] == result.summary["env_steps"]
    assert record.summary == result.summary
    assert any("workers x" in note for note in record.notes)
    assert (result.path / "metrics.jsonl").read_text().count("\n") == len(record.rows)
