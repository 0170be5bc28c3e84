"""A run that is stopped, in whole or in part, and goes on later while the time of day jumps: nothing is lost but the time."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from freewheel.transport._multiprocessing import server_pid
from tests.support.chaos import MODES, kill, trial, world
from tests.support.places import LONG
from tests.support.trainers import command, family, has_logged, wait_until
from tests.support.warm import Server

pytestmark = pytest.mark.system

LIMIT = 2.0  # seconds of every time-out
STOPPED = 8.0 if LONG else 3.0  # seconds: longer than that
WORKERS = ("--workers", "3", "--num-envs", "3")
KINDS = {
    "sequential": ("--mode", "sequential", "--num-envs", "2"),
    "lockstep": ("--mode", "lockstep", "--num-envs", "3", "--placement", "processes"),
    **{mode: ("--mode", mode, *WORKERS) for mode in MODES},
}
if LONG:
    KINDS["lockstep, inline"] = ("--mode", "lockstep", "--num-envs", "2", "--placement", "inline")


class Ended(NamedTuple):
    """A run that was stopped twice."""

    code: int
    output: str
    summary: dict[str, Any]
    rows: list[dict[str, Any]]


def stop_for_a_while(processes: Sequence[psutil.Process]) -> None:
    for change in (signal.SIGSTOP, signal.SIGCONT):
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(change)
        if change == signal.SIGSTOP:
            time.sleep(STOPPED)


def run_and_stop(server: Server, folder: Path, argv: Sequence[str]) -> Ended:
    """Train; stop all processes for a while, and later the trainer alone."""
    runs, limits = folder / "runs", [f"--{call}-timeout={LIMIT}" for call in ("step", "reset")]
    args = [world("Timewarped"), "--hooks", "tests.support.faulty_worlds:StepTheClock", *argv, *limits]
    args += ["--steps", "6000" if LONG else "2500", "--log-every", "0.05"]
    log = runs / "cut" / "metrics.jsonl"
    with command(server, runs, *args, "--evals", "20", "--eval-episodes", "3", "--eval-share", "0.5") as process:
        wait_until(lambda: has_logged(runs) or process.ended(), limit=90.0)
        assert not process.ended(), process.err
        trainer = psutil.Process(process.pid)
        for stopped in ([trainer, *family(process.pid)], [trainer]):
            logged = log.stat().st_size
            wait_until(lambda logged=logged: log.stat().st_size > logged, limit=90.0)  # type: ignore[misc]
            stop_for_a_while(stopped)
        code = process.wait(90.0)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return Ended(code, process.out + process.err, json.loads((runs / "cut" / "summary.json").read_text()), rows)


@pytest.fixture(scope="module")
def stopped_runs(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[Ended]]:
    """All kinds of runs, two at a time: more would wait for the processor for longer than a time-out."""
    with ThreadPoolExecutor(2) as pool:
        folders = {kind: tmp_path_factory.mktemp("run") for kind in KINDS}
        return {kind: pool.submit(run_and_stop, server, folders[kind], argv) for kind, argv in KINDS.items()}


@pytest.mark.timeout(240)  # for all of them, on a busy machine
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_stopped_twice_ends_as_if_nothing_had_been(kind: str, stopped_runs: dict[str, Future[Ended]]) -> None:
    """As a whole with evaluations under way, and then the trainer alone."""
    ended = stopped_runs[kind].result()
    assert (ended.code, ended.summary["ended"]) == (0, "steps"), ended.output
    assert (ended.summary["worker_restarts"], ended.summary["error"]) == (0, None)
    assert ended.summary["dropped"].keys() <= {"shutdown", "stale"}
    assert ended.summary["best_eval"] is not None
    assert ended.output.count("the machine or this run was stopped for ") == 2, ended.output
    troubles = ("is slow", "did not answer", "did not return", "no evaluation", "no closing")
    assert not any(told in ended.output for told in troubles), ended.output
    assert all(row["steps_per_s"] is None or row["steps_per_s"] >= 0.0 for row in ended.rows)
    assert not re.search(r"eta +-|eta +\d+:\d+:\d+", ended.output), "no hour more or less"
    slept = [row["slept_s"] for row in ended.rows]
    assert slept[0] < 1.0
    assert 2 * STOPPED - 0.3 < slept[-1] <= ended.summary["slept_s"] < 600.0  # not the hours by which clocks jump


@pytest.mark.parametrize("mode", MODES if LONG else ["continuous"])
def test_workers_that_were_all_stopped_are_all_replaced(mode: str) -> None:
    with trial(world("Certified"), mode, workers=3, num_envs=3, step_timeout=0.7, reset_timeout=0.7) as on:
        on.wait_for_workers()
        for process in on.processes():
            process.suspend()
        on.run(lambda: len([worker for worker, number in on.audit.incarnations().items() if number >= 1]) == 3)
        assert {loss.worker for loss in on.supervisor.losses} == {0, 1, 2}


@pytest.mark.parametrize("mode", MODES if LONG else ["continuous"])
def test_a_forkserver_that_was_stopped_delays_no_replacement(mode: str) -> None:
    with trial(world("Certified"), mode, workers=3, num_envs=3) as on:
        on.wait_for_workers()
        psutil.Process(server_pid()).suspend()
        assert kill(on.supervisor.slots[1], [])
        on.run(lambda: on.audit.incarnations().get(1, 0) > 0)
