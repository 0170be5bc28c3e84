"""The status of a run: true at any time, written by a thread that nothing of the training can hold up, and cheap."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from freewheel.core import Collector
from freewheel.errors import FileError
from freewheel.files import disk
from freewheel.metrics.meter import Meter
from freewheel.metrics.workers import WorkerState
from freewheel.rollout.factory import Timeouts
from freewheel.run.live import reporter
from freewheel.run.live.reporter import LiveStatus
from freewheel.run.live.status import Status, read_status
from freewheel.transport.shm.supervisor import Supervisor
from freewheel.transport.workers.heartbeats import Heartbeats
from freewheel.transport.workers.states import worker_states
from tests.support.runs import train
from tests.support.trainers import SMALL_ARGV, wait_until, workers_of
from tests.support.warm import Server
from tests.support.watching import Workers

HANGS = 20.0  # seconds of a disk
STEP = WorkerState(worker=0, state="step", since_s=0.5, steps=100, pid=7, lane=3, seed=11, step=4, limit_s=30.0)


@pytest.fixture
def live(tmp_path: Path) -> LiveStatus:
    return LiveStatus(tmp_path, "Env", Meter(2), 1.0)


def observe(live: LiveStatus, *states: WorkerState) -> Status:
    live.collector = cast(Collector, Workers(*states))
    return live.now()


def test_a_status_is_read_as_it_was_written(tmp_path: Path, live: LiveStatus) -> None:
    status = observe(live, STEP, replace(STEP, worker=1, state="wait-credit", lane=None, seed=None))
    (tmp_path / "status.json").write_text(status.to_json())
    assert read_status(tmp_path) == status
    assert (status.format, status.state, status.stamp.pid, status.queue.util) == (1, "running", os.getpid(), 0.25)
    assert [worker.waits_for for worker in status.workers] == [None, reporter.WHY["wait-credit"]]


def test_the_file_has_the_names_of_every_version_in_their_order(live: LiveStatus) -> None:
    """Its record has parts; others read a flat object."""
    names = "format time clock boot pid run env wall_s state log_every env_steps episodes updates best_eval"
    parts = "learner queue evaluator workers beside saver"
    assert list(json.loads(observe(live, STEP).to_json())) == f"{names} {parts}".split()


def test_what_a_later_version_adds_is_passed_over_and_damage_is_refused(tmp_path: Path, live: LiveStatus) -> None:
    file, status = tmp_path / "status.json", observe(live, STEP)
    told = json.loads(status.to_json())
    told["new"] = told["learner"]["new"] = told["workers"][0]["new"] = 1
    file.write_text(json.dumps(told))
    assert read_status(tmp_path) == status
    told["workers"][0]["steps"] = "many"
    file.write_text(json.dumps(told))
    with pytest.raises(FileError, match="steps of workers"):
        read_status(tmp_path)


def test_steps_per_second_are_those_of_the_last_seconds(live: LiveStatus, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("freewheel.run.live.reporter.time.monotonic", lambda: now[0])
    rates = []
    for steps in (0, 0, 10, 30, 30, 30, 30, 30, 30):
        rates.append(observe(live, replace(STEP, steps=steps)).workers[0].steps_per_s)
        now[0] += 1.0
    assert rates == pytest.approx([0, 0, 5, 10, 7.5, 6, 6, 4, 0])


def test_a_worker_that_died_between_two_looks_is_shown_down_once(live: LiveStatus) -> None:
    back = replace(STEP, deaths=1, restarts=1, died_s=0.2, why="was killed (SIGKILL)")
    assert observe(live, STEP).workers[0].state == "step"
    down = observe(live, back).workers[0]
    assert (down.state, down.since_s, down.restarts) == ("down", 0.2, 1)
    assert down.waits_for == "its replacement: it was killed (SIGKILL)"
    again = observe(live, back).workers[0]
    assert (again.state, again.died_s, again.waits_for) == ("step", 0.2, None)
    lost = observe(live, replace(back, state="lost", deaths=2)).workers[0]
    assert lost.state == "lost"
    assert lost.waits_for == "nothing: it was given up, because it was killed (SIGKILL)"


def test_what_the_learner_waits_for(live: LiveStatus) -> None:
    meter = live._meter
    with meter.span("wait-data"):
        one = observe(live, STEP).learner
        step = "lane 3 of Env, which is in step 4 of the episode with seed 11"
        assert one.doing == "wait-data"
        assert one.waits_for == step
        many = observe(live, STEP, STEP, replace(STEP, state="down")).learner
        assert many.waits_for == "rows of the environments (2 in step, 1 in down)"
    with meter.span("wait-model"):
        assert observe(live).learner.waits_for == "the fit of a model, which runs in parallel"
    assert observe(live).learner.waits_for is None


def test_how_long_the_learner_does_the_same_does_not_begin_anew_with_a_row() -> None:
    now = [0.0]
    meter = Meter(1, now=lambda: now[0])
    with meter.span("update"):
        now[0] = 3.0
        meter.shares()  # cuts the time, as a row does
        now[0] = 5.0
        assert (meter.doing, meter.doing_s) == ("update", 5.0)
    assert (meter.doing, meter.doing_s) == ("other", 0.0)


def test_the_stack_of_a_learner_that_does_the_same_for_long(live: LiveStatus, monkeypatch: pytest.MonkeyPatch) -> None:
    assert observe(live).learner.stack == ()
    monkeypatch.setattr(reporter, "LONG", -1.0)
    stack = observe(live).learner.stack
    assert any(f"{__file__}:" in place and "in test_the_stack" in place for place in stack)
    assert "in now" in stack[-2]


def test_a_disk_that_fails_or_hangs_does_not_matter(live: LiveStatus, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []

    def fail(path: Path, data: bytes) -> None:
        calls.append(path)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "show", fail)
    with live:
        wait_until(lambda: bool(calls))
    assert len(calls) == 2  # at the beginning and at the end

    def hang(path: Path, data: bytes) -> None:
        wait_until(lambda: over, HANGS)

    over = False
    monkeypatch.setattr(disk, "show", hang)
    monkeypatch.setattr(reporter, "PATIENCE", 0.05)
    with live:
        ended = time.monotonic()
    assert time.monotonic() - ended < HANGS / 2
    over = True


def test_a_finished_run_has_a_status_that_says_so(tmp_path: Path) -> None:
    path = train(tmp_path, mode="lockstep", steps=64, evals=0).path
    status = read_status(path)
    assert (status.state, status.run, status.done.env_steps, status.workers) == ("ended", path.name, 64, ())


def test_a_hundred_workers_cost_less_than_a_thousandth_of_a_core(live: LiveStatus) -> None:
    """A status a second: a millisecond each. Measured on a busy machine: 0.8 ms, the disk included."""
    with closing(Heartbeats(100, 4, "Env")) as heartbeats:
        supervisor = Supervisor(100, heartbeats, Timeouts(), None, None)  # type: ignore[arg-type] # it is not started

        class Real(Workers):
            def workers(self) -> list[WorkerState]:
                return worker_states(supervisor, 4)

        live.collector = cast(Collector, Real())
        assert least_cost(live) < 0.002
        os.close(supervisor._wake_read)
        os.close(supervisor._wake_write)


def least_cost(live: LiveStatus) -> float:
    """Seconds of processor time that a status takes where nothing else is in its way."""
    live._write()
    spent = []
    for _ in range(30):
        began = time.thread_time()
        live._write()
        spent.append(time.thread_time() - began)
    return min(spent)


# ------------------------------------------------------------------------------------------------------------- real trainers


def argv(*more: str) -> list[str]:
    where = ["--runs-dir", "runs", "--run", "it", "--steps", "1000000000"]
    return ["train", *SMALL_ARGV, *where, *more]


def shows(path: Path, what: Callable[[Status], Any], limit: float = 20.0) -> Status:
    """The first status of which this is true."""
    found: list[Status] = []

    def look() -> bool:
        try:
            found[:] = [read_status(path)]
        except FileError:
            return False
        return bool(what(found[0]))

    wait_until(look, limit)
    return found[0]


@pytest.mark.system
def test_a_killed_worker_is_down_and_then_at_work_again(server: Server, tmp_path: Path) -> None:
    more = argv("--mode", "continuous", "--workers", "2", "--num-envs", "2")
    with server.command(tmp_path, more[0], "tests.support.worlds:Identity", *more[1:]) as command:
        path = tmp_path / "runs" / "it"
        status = shows(path, lambda status: len(status.workers) == 2 and all(one.steps for one in status.workers))
        assert {one.pid for one in status.workers} == {one.pid for one in workers_of(command.pid)}
        assert status.stamp.pid == command.pid
        killed = status.workers[1].pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        down = shows(path, lambda status: status.workers[1].state == "down").workers
        assert down[0].state != "down"
        assert (down[1].waits_for or "").startswith("its replacement: it was killed (SIGKILL")
        back = shows(path, lambda status: status.workers[1].state != "down").workers[1]
        assert (back.restarts, back.pid != killed) == (1, True)
        os.kill(command.pid, signal.SIGINT)
        assert command.wait(20.0) == 130
        assert read_status(path).state == "ended"
