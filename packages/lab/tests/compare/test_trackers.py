"""Tests of the results in trackers, which have the same figures as compare.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freewheel.errors import UsageError
from freewheel.sinks import tensorboard
from freewheel_lab.compare import table
from freewheel_lab.compare.summary import summarised
from freewheel_lab.compare.trackers import TrackerOptions, figures, split, write
from freewheel_lab.compare.trainings.cases import GivenOptions
from packages.lab.tests.support.comparison import measured
from tests.support.trackers import tensorboard_events, wandb_history, wandb_records


def test_trackers_are_the_comparisons_own_and_not_the_trainings() -> None:
    argv = ["CartPole-v1", "--tensorboard", "--wandb", "--wandb-project", "mine", "--ppo.lr", "0.1", "--sinks", "wandb"]
    given, asked = split(GivenOptions.read(argv, trust=False))
    assert asked == TrackerOptions(("wandb", "tensorboard"), "mine")
    assert set(given.flags) == {"ppo.lr"}
    assert split(GivenOptions.read(["CartPole-v1"], trust=False))[1].names == ()
    with pytest.raises(UsageError, match="--sinks jsonl: a comparison can be written to tensorboard and wandb only"):
        split(GivenOptions.read(["CartPole-v1", "--sinks", "jsonl"], trust=False))


def test_tensorboard_has_a_run_for_each_mode_and_the_table(tmp_path: Path) -> None:
    results = summarised(measured())
    told = write(results, tmp_path, TrackerOptions(("tensorboard",)))
    assert (told.lines, told.problems) == ([f"TensorBoard: tensorboard --logdir {tmp_path}/tensorboard"], [])
    for one in results.summary:
        events = tensorboard_events(tmp_path / "tensorboard" / one.mode)
        for name, value in figures(one).items():
            (event,) = events.Scalars(f"Compare/{name}")
            assert event.value == pytest.approx(value)
        curve = [(event.step, event.value) for event in events.Scalars("Compare/return over env steps")]
        first = next(row for row in results.rows if row.mode == one.mode)
        assert curve == [(step, pytest.approx(value)) for _, step, value in first.curve]
    text = tensorboard_events(tmp_path / "tensorboard" / "table").Tensors("comparison")[0].tensor_proto.string_val[0]
    assert text.decode() == table.markdown(results)


def test_wandb_has_every_figure_of_every_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    results = summarised(measured())
    told = write(results, tmp_path, TrackerOptions(("wandb",), "tests"))
    said = f"wandb: offline; to upload: wandb sync {tmp_path}/wandb/offline-run-*"
    assert told.lines == [said]
    assert told.problems == []
    first, second = wandb_history(tmp_path)
    expected = {f"Compare/{name}/{one.mode}": value for one in results.summary for name, value in figures(one).items()}
    assert first == pytest.approx(expected)
    (key,) = {name.partition(".")[0] for name in second}
    assert key == "comparison"
    (stored,) = tmp_path.rglob("comparison*.table.json")
    data = json.loads(stored.read_text())
    speeds = [row[data["columns"].index("steps_per_s")] for row in data["data"]]
    assert speeds == [one.steps_per_s.median for one in results.summary]
    run = next(record.run for record in wandb_records(tmp_path) if record.HasField("run"))
    assert (run.project, run.job_type, run.notes) == ("tests", "compare", table.markdown(results))


def test_a_tracker_that_fails_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / tensorboard.FOLDER).write_text("in the way")
    told = write(summarised(measured()), tmp_path, TrackerOptions(("tensorboard",)))
    assert told.lines == []
    (problem,) = told.problems
    assert problem.startswith("tensorboard did not accept the results of the comparison: ")
