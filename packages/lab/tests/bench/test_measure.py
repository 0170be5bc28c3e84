"""Tests of measured trainings: the window, the error of a training that fails, and one real training."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from freewheel.errors import MeasureError
from freewheel.transport import command
from freewheel_lab.bench import training_main
from freewheel_lab.bench.measure import Measurement, TrainingProcess, TrainingRequest, _as_collected, _measured, measure
from tests.support.runs import IDENTITY, assert_balanced

SMALL = ("--num-envs", "4", "--num-steps-per-env", "16", "--steps", "640")
SUMMARY = {
    "wall_s": 9.0, "trained": 640, "updates": 10, "episodes": 40, "return_mean": 5.0, "lag_max": 2, "produced": 700,
    "queued": 0, "open": 0, "dropped": {"shutdown": 60}, "shares": {}, "path": "runs/x",
}  # fmt: skip


def line(wall: float, cpu: float | None, memory: float) -> dict[str, Any]:
    return {
        "wall_s": wall, "env_steps": int(64 * wall), "return_mean": wall, "lag_mean": 1.0, "cpu_util": cpu, "gpu_util": None,
        "memory/trainer_mb": memory, "memory/workers_mb": 1.0,
    }  # fmt: skip


def test_rates_are_over_the_window_alone() -> None:
    first, last = [2.0, 64, 1, 4, 80], [8.0, 640, 10, 40, 1520]
    lines = [line(1.0, 0.9, 5.0), line(3.0, 0.2, 9.0), line(5.0, 0.4, 7.0), line(9.0, 0.9, 6.0)]
    found = _measured(first, last, SUMMARY, lines, 1.5)
    assert (found.window_rows, found.window_s, found.steps_per_s, found.updates_per_s) == (576, 6.0, 96.0, 1.5)
    assert found.episodes_per_s == pytest.approx(96.0 / 40)  # 36 episodes of 40 steps ended in the window
    assert found.cpu_util == pytest.approx(0.3)  # mean of the two rows inside
    assert (found.memory_mb, found.curve[-1], found.startup_s) == (10.0, (9.0, 576, 9.0), 1.5)


def test_a_burst_of_episodes_is_no_faster_than_rows_are_collected() -> None:
    """Rows are collected at 100 per second all the time, but all are trained on in the last half second."""
    burst = _measured([9.4, 64, 1, 4, 80], [9.9, 640, 10, 40, 1520], SUMMARY, [], None)
    assert burst.steps_per_s == pytest.approx(1152.0)
    logged = [line(wall, None, 1.0) | {"produced": int(100 * wall)} for wall in (1.0, 2.0, 4.0, 6.0, 8.0, 10.0)]
    found = _as_collected(burst, logged, 9.9)
    assert found.steps_per_s == pytest.approx(100.0)
    assert (found.window_rows, found.window_s) == (400, 4.0)  # from second 4 on, when all workers have begun
    assert found.updates_per_s == pytest.approx(18.0 * 100 / 1152)
    steady = _measured([2.0, 64, 1, 4, 80], [8.0, 640, 10, 40, 1520], SUMMARY, [], None)
    assert _as_collected(steady, logged, 9.9) is steady  # the learner is slower than the collection
    assert _as_collected(burst, logged[:1], 9.9) is burst


def test_without_an_episode_in_the_window_its_length_is_that_of_earlier_ones() -> None:
    found = _measured([2.0, 64, 1, 4, 80], [8.0, 640, 10, 4, 80], SUMMARY, [line(3.0, None, 1.0)], None)
    assert found.episodes_per_s == pytest.approx(96.0 / 20)
    assert found.cpu_util is None
    assert _measured([2.0, 64, 1, 0, 0], [8.0, 640, 10, 0, 0], SUMMARY, [], None).episodes_per_s is None


def start_here(module: str, words: Sequence[str], output: Path) -> Any:
    """Stands in for a process. The training has ended when this returns."""
    output.touch()
    code = training_main.main([str(os.getpid()), *words])
    return SimpleNamespace(poll=lambda: code)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("process", ["this one", pytest.param("its own", marks=pytest.mark.system)])
def test_a_real_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: str) -> None:
    if process == "this one":
        monkeypatch.setattr(command, "start", start_here)
        monkeypatch.setattr(command, "end_with", lambda parent: None)
    seen: list[float] = []
    argv = (IDENTITY, "--mode", "continuous", "--workers", "2", *SMALL)
    order = TrainingRequest(argv=argv, name="one", folder=tmp_path, warm_up_rows=128)
    found = measure(order, lambda training: seen.append(training.seconds))
    assert isinstance(found, Measurement)
    assert seen == sorted(seen)
    assert (found.rows, found.updates, found.window_rows) == (640, 10, 512)
    assert_balanced(found.to_json())
    assert found.steps_per_s == pytest.approx(512 / found.window_s)
    assert found.startup_s is not None
    assert found.startup_s > 0
    run = Path(found.path)
    written = {"config.json", "metrics.jsonl", "summary.json", "marks.json", "output.txt"}
    assert written <= {path.name for path in run.iterdir()}
    assert [mark[1] for mark in json.loads((run / "marks.json").read_text())["marks"]] == [64 * k for k in range(1, 11)]
    if process == "this one":
        with pytest.raises(MeasureError, match="the training made 10 updates, which are too few to measure"):
            measure(replace(order, name="two", warm_up_rows=640))


def test_a_training_that_is_refused_says_why(tmp_path: Path) -> None:
    order = TrainingRequest(argv=(IDENTITY, "--mode", "sequential", "--workers", "2"), name="no", folder=tmp_path)
    with pytest.raises(MeasureError, match="--workers is an option of mode"):
        measure(order)
    assert not order.path.exists()
    assert "is an option of mode" in (tmp_path / "no.output.txt").read_text()


ENDLESS = (IDENTITY, "--mode", "sequential", "--steps", "1000000000")


@pytest.mark.system
def test_what_the_watcher_raises_ends_the_training(tmp_path: Path) -> None:
    order = TrainingRequest(argv=ENDLESS, name="cut", folder=tmp_path)
    started: list[psutil.Process] = []

    def interrupt(training: TrainingProcess) -> None:
        if training.newest:
            started.append(psutil.Process(training._process.pid))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(order, watch=interrupt)
    assert not started[0].is_running()
    assert json.loads((order.path / "summary.json").read_text())["exit_code"] == 128 + signal.SIGTERM


def test_a_training_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match=r"did not end within 0 s"):
        measure(TrainingRequest(argv=ENDLESS, name="late", folder=tmp_path, limit_s=0.2))
