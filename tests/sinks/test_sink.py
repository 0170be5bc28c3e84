"""Sinks by name: which ones a run writes to, and that a run takes others besides."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from freewheel.errors import UsageError
from freewheel.registry import Registry
from freewheel.sinks import sink as sinks
from freewheel.sinks.sink import SINKS, RunInfo, Sink, SinkEntry, chosen
from tests.sinks.test_sink_set import Tracker
from tests.support.runs import rows_of, train


def test_ours_are_on_by_default() -> None:
    ours = {"console", "jsonl", "messages"}
    assert {name for name in SINKS if SINKS[name].default} == ours
    assert {entry.name for entry in chosen([])} == ours == {entry.name for entry in chosen(["jsonl"])}


def test_an_unknown_name_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown sink 'jsonll'; did you mean 'jsonl'"):
        train(tmp_path, sinks=["jsonll"])
    assert list(tmp_path.iterdir()) == []


OPENED: list[tuple[RunInfo, Tracker]] = []


def open_record(run: RunInfo) -> Sink:
    OPENED.append((run, Tracker()))
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
    assert (record.rows, record.summary) == (rows_of(result), result.summary)


def test_a_run_takes_sink_objects(tmp_path: Path) -> None:
    record = Tracker()
    result = train(tmp_path, mode="batch", workers=1, steps=128, evals=0, sinks=[record, "jsonl"])
    assert record.rows[-1]["env_steps"] == result.summary["env_steps"]
    assert any("1 worker x" in note for note in record.notes)
    assert (record.rows, record.summary) == (rows_of(result), result.summary)
