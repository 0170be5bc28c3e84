"""`freewheel doctor --why-stuck`: real trainers that hang in a step or an update, are stopped or killed; and any status."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from freewheel.cli.main import main
from freewheel.core import Collector
from freewheel.files.lock import FileLock
from freewheel.metrics.meter import Meter
from freewheel.metrics.workers import WorkerState
from freewheel.run.live import stuck
from freewheel.run.live.reporter import LiveStatus
from freewheel.run.live.status import EvaluatorStatus, Status, StatusPart, read_status
from freewheel.run.live.stuck import numbers, why_stuck
from tests.support.trainers import SMALL_ARGV, wait_until
from tests.support.warm import Command, Server
from tests.support.watching import Workers

STEP = WorkerState(worker=0, state="step", since_s=0.1, steps=9, pid=None, lane=0, seed=11, step=4, limit_s=30.0)


# ------------------------------------------------------------------------------------------------------------- real trainers


@contextmanager
def trainer(server: Server, folder: Path, env: str, *more: str) -> Iterator[Command]:
    where = ["--runs-dir", "runs", "--run", "it", "--steps", "1000000000", "--log-every", "0.05"]
    with server.command(folder, "train", env, *SMALL_ARGV, *where, *more) as command:
        wait_until((folder / "runs" / "it" / "status.json").exists, 40.0)
        yield command


def lines_when(path: Path, told: Callable[[str], bool], limit: float = 20.0) -> list[str]:
    """What is said as soon as this is true of it."""
    found: list[str] = []

    def look() -> bool:
        found[:] = why_stuck(path)
        return told("\n".join(found))

    wait_until(look, limit, "\n".join(found))
    return found


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stuck, "LONG", 0.5)
    monkeypatch.setattr(stuck, "SAMPLE", 0.05)


WAYS = {place: ["--mode", "lockstep", "--placement", place] for place in ("inline", "processes")}
WAYS["workers"] = ["--mode", "batch", "--workers", "2"]


@pytest.mark.system
@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_does_not_return_is_named_with_its_time_out(server: Server, tmp_path: Path, way: str) -> None:
    options = [*WAYS[way], "--num-envs", "2", "--step-timeout", "500"]
    with trainer(server, tmp_path, "tests.support.held:Held", *options) as command:
        path = tmp_path / "runs" / "it"
        wait_until(lambda: (path / "metrics.jsonl").exists() and bool((path / "metrics.jsonl").read_bytes()), 40.0)
        (tmp_path / "hold").touch()
        lines = lines_when(path, lambda text: "did not return from step" in text)
        told = "\n".join(lines)
        assert lines[0].startswith(f"it runs: process {command.pid} ")
        assert "verdict     the learner waits for rows, and the environment of lane" in told
        assert "of tests.support.held:Held, for " in told
        ends = "it, and another one takes its place" if way == "workers" else "the run, in 8:1"
        assert f"--step-timeout (500 s) ends {ends}" in told
        if way == "workers":
            assert "its process sleeps" in told
        elif way == "inline":
            wait_until(lambda: bool(read_status(path).learner.stack))
            assert any("held.py" in line and "in step" in line for line in why_stuck(path))
        (tmp_path / "hold").unlink()
        lines_when(path, lambda text: "nothing is stuck" in text)


@pytest.mark.system
def test_a_long_update_workers_that_wait_for_it_and_a_trainer_that_is_stopped(server: Server, tmp_path: Path) -> None:
    slow = ["--ppo.epochs", "10000", "--ppo.minibatch", "2"]
    options = ["--mode", "batch", "--workers", "2", "--num-envs", "2", *slow]
    with trainer(server, tmp_path, "tests.support.worlds:Identity", *options) as command:
        path = tmp_path / "runs" / "it"
        told = "\n".join(lines_when(path, lambda text: "busy with one update" in text and "2 of 2 workers" in text))
        assert "learner     update for " in told
        assert "0-1: wait-credit, for " in told
        assert "waits for the learner: enough rows are under way" in told
        os.kill(command.pid, signal.SIGSTOP)
        told = "\n".join(lines_when(path, lambda text: "is stopped" in text))
        assert f"kill -CONT {command.pid} resumes it" in told
        assert "verdict     the trainer is stopped" in told
        os.kill(command.pid, signal.SIGKILL)
        assert command.wait(10.0) == -signal.SIGKILL
        told = "\n".join(why_stuck(path))
        assert f"it does not run: its process ({command.pid}) is gone and has left no summary" in told
        assert f"freewheel resume {path} continues" in told


# ------------------------------------------------------------------------------------------------- what is told of any status


def made(path: Path, doing: str, *states: WorkerState, since: float = 9.0) -> Status:
    meter = Meter(1)
    live = LiveStatus(path, "Env", meter, 1.0)
    live.collector = cast(Collector, Workers(*states))
    with meter.span(doing):
        status = live.now()
    return replace(status, learner=replace(status.learner, since_s=since))


def told_of(path: Path, status: Status) -> str:
    path.mkdir(exist_ok=True)
    (path / "status.json").write_text(status.to_json())
    with FileLock(path / ".lock"):
        return "\n".join(why_stuck(path))


def test_everybody_waits_for_everybody(tmp_path: Path) -> None:
    waits = [replace(STEP, worker=worker, state="wait-credit", since_s=8.0) for worker in range(3)]
    assert "a deadlock, please report it" in told_of(tmp_path / "it", made(tmp_path, "wait-data", *waits))
    down = [replace(one, state="down") for one in waits]
    assert "no worker is alive" in told_of(tmp_path / "it", made(tmp_path, "wait-data", *down))


def test_many_workers_are_told_in_groups(tmp_path: Path) -> None:
    states = [replace(STEP, worker=worker, lane=worker, since_s=5.0 + worker) for worker in range(15)]
    states += [replace(STEP, worker=worker, state="wait-slot", since_s=0.01) for worker in (*range(20, 60), 70)]
    told = told_of(tmp_path / "it", made(tmp_path, "update", *states, since=0.1))
    assert "verdict     nothing is stuck, but 15 calls of environments take long" in told
    assert told.count("in step 4 of the episode with seed 11") == 10
    assert "workers     14 (process None)" in told
    assert "and 5 more in calls" in told
    assert "20-59, 70: wait-slot, for 10 ms at most; waits for a free place in its queue" in told


def test_evaluator_fits_and_checkpoints(tmp_path: Path) -> None:
    status = made(tmp_path, "wait-model")
    status = replace(
        status,
        evaluator=EvaluatorStatus(
            doing="plays", since_s=7.0, ended=3, episodes=20, limit_s=60.0,
            call="reset() with seed 5", call_s=6.0, call_limit_s=60.0,
        ),
        beside=(StatusPart(doing="model", since_s=65.0),),
        saver=StatusPart(doing="writes the checkpoint of step 1,000", since_s=2.5),
    )  # fmt: skip
    told = told_of(tmp_path / "it", status)
    assert "verdict     the learner waits for the fit of a model, which runs in parallel, for 9.0 s" in told
    assert "evaluator   plays for 7.0 s, 3 of 20 episodes have ended; it is given up in 53.0 s" in told
    assert "reset() with seed 5 has not returned for 6.0 s of 60 s that it may take" in told
    assert "beside      model: for 1:05 min" in told
    assert "checkpoints writes the checkpoint of step 1,000, for 2.5 s" in told


def test_a_status_that_is_old_and_none_at_all(tmp_path: Path) -> None:
    status = made(tmp_path, "update")
    told = told_of(tmp_path / "it", replace(status, stamp=replace(status.stamp, clock=time.monotonic() - 60.0)))
    assert "has not written its status for 1:00 min" in told
    (tmp_path / "it" / "status.json").unlink()
    with FileLock(tmp_path / "it" / ".lock"):
        assert "its status is not known: it is still starting" in why_stuck(tmp_path / "it")[0]
        (tmp_path / "it" / "status.json").write_text("{")
        assert "not JSON" in why_stuck(tmp_path / "it")[0]


def test_a_run_that_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "it"
    run.mkdir()
    (run / "config.json").write_text("{}")
    summary: dict[str, Any] = {"ended": "failed", "exit_code": 1, "error": "it broke", "problems": ["the disk is full"]}
    (run / "summary.json").write_text(json.dumps(summary))
    assert main(["doctor", "--why-stuck", "it", "--runs-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "it does not run: it has ended (failed), exit code 1", "  it broke", "  the disk is full",
    ]  # fmt: skip


def test_wrong_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--why-stuck", "none", "--runs-dir", str(tmp_path)]) == 2
    assert "no run 'none'" in capsys.readouterr().err
    assert main(["doctor", "now"]) == 2
    assert "--why-stuck RUN" in capsys.readouterr().err


def test_numbers_in_a_row_are_ranges() -> None:
    assert [numbers(found) for found in ([3], [1, 2, 3], [5, 0, 1, 9, 8])] == ["3", "1-3", "0-1, 5, 8-9"]
