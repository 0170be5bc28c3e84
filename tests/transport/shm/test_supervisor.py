"""The supervisor: workers that die, hang or are stopped are detected, reported and replaced within a budget; none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from multiprocessing.context import ForkServerProcess
from typing import Any, Protocol

import psutil
import pytest

from freewheel.rollout.factory import Timeouts
from freewheel.transport import forkserver
from freewheel.transport.shm import supervisor as module
from freewheel.transport.shm.supervisor import Supervisor
from freewheel.transport.shm.sync import ProcessLock
from freewheel.transport.workers.heartbeats import TURN, Heartbeats
from tests.support import children
from tests.support.children import Shift
from tests.support.places import ROOT
from tests.support.trainers import alive, wait_until

GENEROUS = Timeouts(construct=60.0, reset=60.0, step=60.0)
KILLS = 5
LIMIT = 20.0


class Supervised:
    """A supervisor, the workers that it settled, and what they share."""

    def __init__(self, shift: Shift, limits: Timeouts) -> None:
        self.shift, self.heartbeats, self.board = shift, shift.heartbeats, shift.board
        self.settled: list[tuple[int, bool]] = []
        self.given_up: list[int] = []  # workers at the time of each
        self.lifeline = forkserver.Lifeline()
        self.supervisor = Supervisor(
            len(shift.plans), shift.heartbeats, limits, self._spawn, self._settle, [shift.lock]
        )
        self.started, self.stopped = 0, False

    def stop(self) -> None:
        if not self.stopped:
            self.stopped = True
            self.supervisor.stop()

    def _spawn(self, worker: int, incarnation: int) -> ForkServerProcess:
        self.started += 1
        return self.lifeline.process(children.serve, self.shift, worker, incarnation, name=f"worker-{worker}")

    def _settle(self, worker: int, for_good: bool) -> None:
        assert self.supervisor.slots[worker].process is None, "only dead workers are settled"
        with self.shift.lock:
            self.settled.append((worker, for_good))
        self.given_up.append(self.supervisor.given_up)

    def incarnations(self) -> list[int]:
        return [int(number) for number in self.board["incarnation"]]

    def steps(self) -> list[int]:
        return [int(count) for count in self.heartbeats.memory["steps"]]

    def has_stepped(self, worker: int, steps: int) -> bool:
        return self.steps()[worker] >= steps

    def is_at(self, worker: int, incarnation: int) -> bool:
        return self.incarnations()[worker] == incarnation

    def pids(self) -> list[int]:
        return [slot.process.pid or 0 for slot in self.supervisor.slots if slot.process is not None]

    def reasons(self) -> list[str]:
        return [loss.reason for loss in self.supervisor.losses]


class Supervise(Protocol):
    def __call__(self, *plans: tuple[str, ...], limits: Timeouts = GENEROUS) -> Supervised: ...


@pytest.fixture
def supervise() -> Iterator[Supervise]:
    """A supervisor with a worker for each plan; everything is stopped and closed after the test."""
    with ExitStack() as stack:

        def make(*plans: tuple[str, ...], limits: Timeouts = GENEROUS) -> Supervised:
            heartbeats = stack.enter_context(closing(Heartbeats(len(plans), 1)))
            lock = stack.enter_context(closing(ProcessLock()))
            board = stack.enter_context(closing(children.board(len(plans))))
            run = Supervised(Shift(heartbeats, board, lock, plans), limits)
            stack.callback(run.lifeline.close)
            stack.callback(run.stop)
            return run

        yield make


HEALTHY = ("inf",)


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The exit codes of workers that were ended."""
    ended, end = list[int | None](), forkserver.end

    def recording(*given: Any) -> list[int | None]:
        found = end(*given)
        ended.extend(found)
        return found

    monkeypatch.setattr(forkserver, "end", recording)
    return ended


def test_healthy_workers_act_and_end_by_themselves(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch, codes: list[int | None]
) -> None:
    monkeypatch.setattr(module, "GRACE", LIMIT)
    run = supervise(HEALTHY, HEALTHY, HEALTHY)
    run.supervisor.start()
    wait_until(lambda: min(run.steps()) >= 20)
    assert run.incarnations() == [0, 0, 0]
    pids = run.pids()
    run.stop()
    assert (codes, [pid for pid in pids if psutil.pid_exists(pid)]) == ([0, 0, 0], [])
    assert (run.supervisor.losses, run.supervisor.restarts, run.settled) == ([], 0, [])


def test_stopping_ends_workers_that_ignore_sigterm_or_hang(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch, codes: list[int | None]
) -> None:
    monkeypatch.setattr(module, "GRACE", 0.3)
    run = supervise(("0 spin, ignore SIGTERM",), ("0 hang in step",), ("0 stop",), HEALTHY)
    run.supervisor.start()
    wait_until(lambda: run.incarnations() == [0, 0, 0, 0])
    pids = run.pids()
    run.stop()
    assert not any(map(psutil.pid_exists, pids))
    assert [code for code in codes if code][:3] == [-signal.SIGKILL, -signal.SIGTERM, -signal.SIGKILL]


def test_a_supervisor_may_be_stopped_before_its_workers_act(supervise: Supervise) -> None:
    supervise(HEALTHY, HEALTHY)
    supervise(HEALTHY, HEALTHY).supervisor.start()


@pytest.mark.parametrize("place", ["spawn", "start"])
def test_a_failed_start_leaves_no_worker(supervise: Supervise, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    run = supervise(HEALTHY, HEALTHY)
    begin = getattr(run.supervisor, "spawn") if place == "spawn" else forkserver.start  # noqa: B009
    calls: list[Any] = []

    def fail_the_second_time(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 2:
            raise OSError("no more processes")
        return begin(*given)

    monkeypatch.setattr(run.supervisor if place == "spawn" else forkserver, place, fail_the_second_time)
    with pytest.raises(OSError, match="no more processes"):
        run.supervisor.start()
    assert len(run.pids()) == 1


def test_stopping_during_settle_finishes_it_first(supervise: Supervise) -> None:
    run, in_settle = supervise(("0 die",)), threading.Event()
    settled: list[int] = []

    def slowly(worker: int, for_good: bool) -> None:
        in_settle.set()
        time.sleep(0.2)  # as long as settling takes
        settled.append(worker)

    run.supervisor.settle = slowly
    run.supervisor.start()
    assert in_settle.wait(LIMIT)
    run.stop()
    assert settled == [0]
    assert all(thread.name != "freewheel-supervisor" for thread in threading.enumerate())
    assert run.supervisor.restarts == 0, "no worker is replaced after the stop"


def test_a_killed_worker_is_detected_and_replaced_at_once(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its end, not by a look at the heartbeats, which comes much later here."""
    monkeypatch.setattr(module, "LOOK", 10 * LIMIT)
    run = supervise(HEALTHY, HEALTHY)
    run.supervisor.start()
    for kill in range(KILLS):
        wait_until(partial(run.has_stepped, 1, run.steps()[1] + 10))
        os.kill(run.pids()[1], signal.SIGKILL)
        wait_until(partial(run.is_at, 1, kill + 1))
    assert (run.supervisor.restarts, run.supervisor.given_up, run.incarnations()[0]) == (KILLS, 0, 0)
    assert run.settled == [(1, False)] * KILLS
    loss = run.supervisor.losses[-1]
    assert (loss.worker, loss.incarnation, loss.reason, loss.report) == (1, KILLS - 1, "was killed (SIGKILL)", "")
    assert str(loss) == "worker 1 was killed (SIGKILL) and is replaced"


def test_the_report_of_a_worker_is_in_its_loss(supervise: Supervise) -> None:
    run = supervise(("0 report and exit", "0 exit", "0 die of signal 40"))
    run.supervisor.start()
    wait_until(lambda: run.supervisor.given_up == 1)
    assert str(run.supervisor.losses[0]) == "worker 0 ended (exit code 3) and is replaced\nthe env failed\nand why"
    assert str(run.supervisor.losses[1]) == "worker 0 ended (exit code 0) and is replaced"
    assert str(run.supervisor.losses[2]) == "worker 0 was killed (signal 40) and is given up"


def test_a_worker_is_given_up_after_three_failures_in_a_row(supervise: Supervise) -> None:
    run = supervise(("9 die",), HEALTHY)
    run.supervisor.start()
    wait_until(lambda: run.supervisor.given_up == 1)
    assert run.settled == [(0, False), (0, False), (0, True)]
    assert [loss.given_up for loss in run.supervisor.losses] == [False, False, True]
    assert run.given_up == [0, 0, 0], "the reason is known when it is"
    steps = run.steps()[1]
    wait_until(lambda: run.steps()[1] > steps + 100)
    assert (run.supervisor.restarts, run.started, run.incarnations()) == (2, 4, [2, 0])


def test_ten_good_steps_reset_the_count_of_failures(supervise: Supervise) -> None:
    run = supervise(("10 die", "10 die", "10 die", "0 die", "12 die", "0 die", "0 hang in construct"))
    run.supervisor.start()
    wait_until(lambda: run.supervisor.slots[0].incarnation == 6)
    assert [loss.given_up for loss in run.supervisor.losses] == [False] * 6
    assert run.settled == [(0, False)] * 6


@pytest.mark.parametrize(
    ("end", "limits", "reason"),
    [
        pytest.param("hang in construct", {"construct": 3.0}, "3 s of construct", marks=pytest.mark.system),
        ("hang in reset", {"reset": 0.5}, "0.5 s of reset"),
        ("hang in step", {"step": 0.9}, "0.9 s of step"),
        pytest.param("stop", {"step": 0.9}, "0.9 s of step", marks=pytest.mark.system),
        ("stop in wait", {"step": 0.9}, f"{2 * TURN:g} s of wait"),
    ],
)
def test_a_worker_without_a_heartbeat_for_too_long_is_replaced(
    supervise: Supervise, end: str, limits: dict[str, float], reason: str
) -> None:
    run = supervise((f"15 {end}", "inf"), HEALTHY, limits=replace(GENEROUS, **limits))
    run.supervisor.start()
    wait_until(lambda: run.incarnations()[0] == 1)
    reason = f"did not answer within {reason}"
    assert run.reasons() == [reason]
    assert run.incarnations()[1] == 0, "the other one continued"
    assert str(run.supervisor.losses[0]) == f"worker 0 {reason} and is replaced"


def test_an_error_of_the_supervisor_is_kept_and_all_workers_still_end(supervise: Supervise) -> None:
    run = supervise(("0 die",), HEALTHY)
    run.supervisor.settle = lambda worker, for_good: 1 / 0  # type: ignore[assignment]
    run.supervisor.start()
    wait_until(lambda: run.supervisor.error is not None)
    assert isinstance(run.supervisor.error, ZeroDivisionError)


TRAINER = """
from freewheel.rollout.factory import Timeouts
from freewheel.transport import forkserver
from freewheel.transport.shm.supervisor import Supervisor
from freewheel.transport.shm.sync import ProcessLock
from freewheel.transport.workers.heartbeats import Heartbeats
from tests.support.children import Shift, board, hang, serve
forkserver.prepare(["tests.support.children"])
lifeline, places = forkserver.Lifeline(), board(4)
plans = (("inf",), ("0 spin, ignore SIGTERM",), ("0 hang in step",), ("0 stop",))
shift = Shift(Heartbeats(4, 1), places, ProcessLock(), plans)
spawn = lambda worker, incarnation: lifeline.process(serve, shift, worker, incarnation, name="worker")
supervisor = Supervisor(4, shift.heartbeats, Timeouts(), spawn, lambda worker, for_good: None, [shift.lock])
supervisor.start()
while (places["incarnation"] < 0).any():
    pass
print(*[slot.process.pid for slot in supervisor.slots], flush=True)
hang()
"""


def test_all_processes_die_with_a_killed_trainer() -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", TRAINER], env=environ, text=True, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        family = psutil.Process(trainer.pid).children(recursive=True)
        assert len(pids) == 4
        assert {process.pid for process in family} > set(pids), "the forkserver is there too"
        trainer.kill()
        wait_until(lambda: not any(map(alive, family)))
