"""The supervisor: workers that die, hang or are stopped are seen, named and replaced, within a budget; none is left behind."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from multiprocessing.context import ForkServerProcess
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import psutil
import pytest

from freewheel.rollout.factory import Timeouts
from freewheel.transport import forkserver
from freewheel.transport.shm.heartbeats import TURN, Heartbeats
from freewheel.transport.shm.sync import ProcessLock
from freewheel.transport.supervisor import GRACE, STUCK, Supervisor
from tests.support import children
from tests.support.children import Shift
from tests.support.places import ROOT

if TYPE_CHECKING:
    from tests.transport.conftest import Eventually

GENEROUS = Timeouts(construct=60.0, reset=60.0, step=60.0)
KILLS = 20
LIMIT = 20.0


class Party:
    """A supervisor at work, what it settles, and what it shares."""

    def __init__(self, shift: Shift, limits: Timeouts) -> None:
        self.shift, self.heartbeats, self.board = shift, shift.heartbeats, shift.board
        self.settled: list[tuple[int, bool]] = []
        self.lifeline = forkserver.Lifeline()
        self.supervisor = Supervisor(
            len(shift.plans), shift.heartbeats, limits, self._spawn, self._settle, [shift.lock]
        )
        self.started, self.stopped = 0, False

    def stop(self) -> float:
        """Once; the seconds it took."""
        began = time.monotonic()
        if not self.stopped:
            self.stopped = True
            self.supervisor.stop()
        return time.monotonic() - began

    def _spawn(self, worker: int, incarnation: int) -> ForkServerProcess:
        self.started += 1
        return self.lifeline.process(children.serve, self.shift, worker, incarnation, name=f"worker-{worker}")

    def _settle(self, worker: int, for_good: bool) -> None:
        assert self.supervisor.slots[worker].process is None, "the dead are settled, not the living"
        with self.shift.lock:
            self.settled.append((worker, for_good))

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


class Hire(Protocol):
    def __call__(self, *plans: tuple[str, ...], limits: Timeouts = GENEROUS) -> Party: ...


@pytest.fixture
def hire() -> Iterator[Hire]:
    """A supervisor of a worker a plan; it is stopped, and everything it needed closed, when the test is over."""
    with ExitStack() as stack:

        def hired(*plans: tuple[str, ...], limits: Timeouts = GENEROUS) -> Party:
            heartbeats, lock = (
                stack.enter_context(closing(Heartbeats(len(plans), 1))),
                stack.enter_context(closing(ProcessLock())),
            )
            board = stack.enter_context(closing(children.board(len(plans))))
            party = Party(Shift(heartbeats, board, lock, plans), limits)
            stack.callback(party.lifeline.close)
            stack.callback(party.stop)
            return party

        yield hired


HEALTHY = ("inf",)


# --------------------------------------------------------------------------------------------------------------- start and stop


def test_a_healthy_crew_works_and_stops_at_once(hire: Hire, eventually: Eventually) -> None:
    party = hire(HEALTHY, HEALTHY, HEALTHY)
    party.supervisor.start()
    eventually(lambda: min(party.steps()) >= 20)
    assert party.incarnations() == [0, 0, 0]
    pids = party.pids()
    assert party.stop() < GRACE
    assert not any(map(psutil.pid_exists, pids))
    assert (party.supervisor.losses, party.supervisor.restarts, party.settled) == ([], 0, [])


def test_stopping_ends_the_deaf_and_the_hung(hire: Hire, eventually: Eventually) -> None:
    party = hire(("0 spin, deaf",), ("0 hang in step",), ("0 stop",), HEALTHY)
    party.supervisor.start()
    eventually(lambda: party.incarnations() == [0, 0, 0, 0])
    pids = party.pids()
    assert 2 * GRACE < party.stop() < 2 * GRACE + 2.0
    assert not any(map(psutil.pid_exists, pids))


def test_a_crew_may_be_stopped_before_it_has_begun(hire: Hire) -> None:
    hire(HEALTHY, HEALTHY)
    hire(HEALTHY, HEALTHY).supervisor.start()


@pytest.mark.parametrize("place", ["spawn", "start"])
def test_a_crew_that_could_not_start_leaves_nobody(hire: Hire, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    party = hire(HEALTHY, HEALTHY)
    begin = getattr(party.supervisor, "spawn") if place == "spawn" else forkserver.start  # noqa: B009
    calls: list[Any] = []

    def fail_the_second_time(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 2:
            raise OSError("no more processes")
        return begin(*given)

    monkeypatch.setattr(party.supervisor if place == "spawn" else forkserver, place, fail_the_second_time)
    with pytest.raises(OSError, match="no more processes"):
        party.supervisor.start()
    assert len(party.pids()) == 1


def test_a_crew_that_is_burying_someone_finishes_that_and_stops(hire: Hire, eventually: Eventually) -> None:
    party, in_settle = hire(("0 die",)), threading.Event()
    settled: list[int] = []

    def slowly(worker: int, for_good: bool) -> None:
        in_settle.set()
        time.sleep(0.2)  # as long as settling takes
        settled.append(worker)

    party.supervisor.settle = slowly
    party.supervisor.start()
    assert in_settle.wait(LIMIT)
    party.stop()
    assert settled == [0]
    assert not party.supervisor._thread.is_alive()
    assert party.supervisor.restarts == 0, "nobody is replaced any more"


# ---------------------------------------------------------------------------------------------------------------------- deaths


def test_a_killed_worker_is_seen_and_replaced_at_once(hire: Hire, eventually: Eventually) -> None:
    party = hire(HEALTHY, HEALTHY)
    party.supervisor.start()
    seen, back = [], []
    for kill in range(KILLS):
        eventually(partial(party.has_stepped, 1, party.steps()[1] + 10))
        killed = time.monotonic()
        os.kill(party.pids()[1], signal.SIGKILL)
        eventually(partial(party.is_at, 1, kill + 1))
        seen.append(party.supervisor.losses[kill].seen - killed)
        back.append(float(party.board["acted"][1]) * 1e-9 - killed)
    report = f"seen after {np.round(sorted(seen), 4)} s, back after {np.round(sorted(back), 4)} s"
    assert statistics.median(seen) < 0.1, report
    assert max(seen) < 1.0, report
    assert statistics.median(back) < 0.5, report
    assert (party.supervisor.restarts, party.supervisor.given_up, party.incarnations()[0]) == (KILLS, 0, 0)
    assert party.settled == [(1, False)] * KILLS
    loss = party.supervisor.losses[-1]
    assert (loss.worker, loss.incarnation, loss.reason, loss.report) == (1, KILLS - 1, "was killed (SIGKILL)", "")
    assert str(loss) == "worker 1 was killed (SIGKILL) and is replaced"


def test_memory_is_suspected_where_a_worker_had_much_of_it(hire: Hire, eventually: Eventually) -> None:
    party = hire(("0 die", "inf"))
    party.heartbeats.memory["peak"][0] = 3000 * 1024
    party.supervisor.start()
    eventually(lambda: party.incarnations() == [1])
    assert party.reasons() == ["was killed (SIGKILL; out of memory? its peak was 3000 MB)"]


def test_a_worker_is_heard_before_it_is_replaced(hire: Hire, eventually: Eventually) -> None:
    party = hire(("0 speak and exit", "0 exit", "0 die of signal 40"))
    party.supervisor.start()
    eventually(lambda: party.supervisor.given_up == 1)
    assert str(party.supervisor.losses[0]) == "worker 0 ended (exit code 3) and is replaced\nthe env said no\nand why"
    assert str(party.supervisor.losses[1]) == "worker 0 ended (exit code 0) and is replaced"
    assert str(party.supervisor.losses[2]) == "worker 0 was killed (signal 40) and is given up"


def test_whoever_sees_that_a_worker_was_given_up_sees_why(hire: Hire, eventually: Eventually) -> None:
    party = hire(("0 die",))
    given_up: list[int] = []
    party.supervisor.settle = lambda worker, for_good: given_up.append(party.supervisor.given_up)
    party.supervisor.start()
    eventually(lambda: party.supervisor.given_up == 1)
    assert [loss.given_up for loss in party.supervisor.losses] == [False, False, True]
    assert given_up == [0, 0, 0]


def test_three_failures_running_are_enough(hire: Hire, eventually: Eventually) -> None:
    party = hire(("9 die",), HEALTHY)
    party.supervisor.start()
    eventually(lambda: party.supervisor.given_up == 1)
    assert party.settled == [(0, False), (0, False), (0, True)]
    assert [loss.given_up for loss in party.supervisor.losses] == [False, False, True]
    steps = party.steps()[1]
    eventually(lambda: party.steps()[1] > steps + 100)
    assert (party.supervisor.restarts, party.started, party.incarnations()) == (2, 4, [2, 0])


def test_ten_good_steps_make_up_for_a_failure(hire: Hire, eventually: Eventually) -> None:
    party = hire(("10 die", "10 die", "10 die", "0 die", "12 die", "0 die", "0 hang in construct"))
    party.supervisor.start()
    eventually(lambda: party.supervisor.slots[0].incarnation == 6)
    assert [loss.given_up for loss in party.supervisor.losses] == [False] * 6
    assert party.settled == [(0, False)] * 6


def test_a_worker_that_lost_all_its_lanes_is_not_saved_by_its_good_steps(hire: Hire, eventually: Eventually) -> None:
    party = hire(("12 exit, hopeless",))
    party.supervisor.start()
    eventually(lambda: party.supervisor.given_up == 1)
    assert party.reasons() == ["ended (exit code 4)"] * 3


# -------------------------------------------------------------------------------------------------------------- silence


@pytest.mark.parametrize(
    ("end", "limits", "reason"),
    [
        (
            "hang in construct",
            Timeouts(construct=0.3, reset=60.0, step=60.0),
            "did not answer within 0.3 s of construct",
        ),
        ("hang in reset", Timeouts(construct=60.0, reset=0.3, step=60.0), "did not answer within 0.3 s of reset"),
        ("hang in step", Timeouts(construct=60.0, reset=60.0, step=0.3), "did not answer within 0.3 s of step"),
        ("stop", Timeouts(construct=60.0, reset=60.0, step=0.3), "did not answer within 0.3 s of step"),
        (
            "stop in wait",
            Timeouts(construct=60.0, reset=60.0, step=0.3),
            f"did not answer within {2 * TURN:g} s of wait",
        ),
    ],
)
def test_a_worker_that_is_silent_for_too_long_is_replaced(
    hire: Hire, eventually: Eventually, end: str, limits: Timeouts, reason: str
) -> None:
    party = hire((f"15 {end}", "inf"), HEALTHY, limits=limits)
    party.supervisor.start()
    assert eventually(lambda: party.incarnations()[0] == 1) < 0.3 + 2 * TURN + 1.5
    assert party.reasons() == [reason]
    assert party.incarnations()[1] == 0, "the other one worked on"
    assert str(party.supervisor.losses[0]) == f"worker 0 {reason} and is replaced"


def test_a_worker_that_is_stopped_with_the_lock_does_not_stop_the_others(hire: Hire, eventually: Eventually) -> None:
    party = hire(("15 stop with the lock", "inf"), HEALTHY, ("inf",))
    party.supervisor.start()
    eventually(lambda: party.shift.lock.holder() in party.pids() and party.steps()[0] == 15)
    began = time.monotonic()
    eventually(lambda: party.incarnations()[0] == 1)
    assert time.monotonic() - began < STUCK + 3.0
    assert party.reasons() == ["was stopped while holding a lock"]
    before = party.steps()
    eventually(lambda: all(now > then + 5 for now, then in zip(party.steps(), before, strict=True)))


def test_nor_does_it_stop_the_crew_from_burying_another(hire: Hire, eventually: Eventually) -> None:
    """The one that died cannot be settled while a stopped one holds the lock, and nobody but the supervisor can free that."""
    party = hire(("15 stop with the lock", "inf"), HEALTHY)
    party.supervisor.start()
    eventually(lambda: party.shift.lock.holder() == party.pids()[0] and party.steps()[0] == 15)
    os.kill(party.pids()[1], signal.SIGKILL)
    eventually(lambda: party.incarnations() == [1, 1])
    assert sorted(party.reasons()) == ["was killed (SIGKILL)", "was stopped while holding a lock"]
    assert sorted(party.settled) == [(0, False), (1, False)]


def test_a_fault_of_the_crew_itself_is_kept_and_everyone_still_goes_home(hire: Hire, eventually: Eventually) -> None:
    party = hire(("0 die",), HEALTHY)
    party.supervisor.settle = lambda worker, for_good: 1 / 0  # type: ignore[assignment]
    party.supervisor.start()
    eventually(lambda: party.supervisor.error is not None)
    assert isinstance(party.supervisor.error, ZeroDivisionError)


# ------------------------------------------------------------------------------------------------------- the trainer's own death

TRAINER = """
from freewheel.rollout.factory import Timeouts
from freewheel.transport import forkserver
from freewheel.transport.supervisor import Supervisor
from freewheel.transport.shm.sync import ProcessLock
from freewheel.transport.shm.heartbeats import Heartbeats
from tests.support.children import Shift, board, hang, serve
forkserver.prepare(["tests.support.children"])
lifeline, places = forkserver.Lifeline(), board(4)
plans = (("inf",), ("0 spin, deaf",), ("0 hang in step",), ("0 stop",))
shift = Shift(Heartbeats(4, 1), places, ProcessLock(), plans)
spawn = lambda worker, incarnation: lifeline.process(serve, shift, worker, incarnation, name="worker")
supervisor = Supervisor(4, shift.heartbeats, Timeouts(), spawn, lambda worker, for_good: None, [shift.lock])
supervisor.start()
while (places["incarnation"] < 0).any():
    pass
print(*[slot.process.pid for slot in supervisor.slots], flush=True)
hang()
"""


def lives(process: psutil.Process) -> bool:
    """A zombie does not: it waits for whoever adopted it."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def test_the_trainer_takes_everyone_along_when_it_is_killed(eventually: Eventually) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", TRAINER], env=environ, text=True, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        family = psutil.Process(trainer.pid).children(recursive=True)
        assert len(pids) == 4
        assert {process.pid for process in family} > set(pids), "the server and its like are there too"
        trainer.kill()
        trainer.wait(5.0)
        assert eventually(lambda: not any(map(lives, family))) < 2.0
