"""The barrier: all are woken, all answers are waited for, and one that dies or hangs is named and ends them all."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess

import psutil
import pytest

from freewheel.errors import EnvError, SetupError
from freewheel.rollout.call_state import LANE, SEEDS, STEP, cells
from freewheel.rollout.factory import Timeouts
from freewheel.transport import forkserver
from freewheel.transport.shm.barrier import Barrier, line
from freewheel.transport.workers.heartbeats import CONSTRUCT
from tests.support import children

WHO = ["lane 4 of World", "lane 5 of World", "lane 6 of World"]


@contextmanager
def started(timeouts: Timeouts = Timeouts()) -> Iterator[Barrier]:  # noqa: B008 - it is frozen
    barrier = Barrier(WHO, timeouts, lambda lane: f"somewhere, {lane}")
    try:
        assert barrier.start(children.answer_at_barrier, [(name,) for name in "abc"]) == ["a", "b", "c"]
        yield barrier
    finally:
        processes = [psutil.Process(process.pid) for process in barrier.processes]
        barrier.close()
        assert not [process for process in processes if process.is_running()]


def test_a_line_wakes_and_brings_values_and_says_when_nobody_is_there() -> None:
    ours, theirs = line()
    assert not ours.wait(0.0)
    theirs.wake()
    theirs.send({"a": 1})
    assert ours.wait(1.0)
    assert (ours.receive(), ours.receive()) == (None, {"a": 1})
    ours.send("back")
    assert theirs.receive() == "back"
    theirs.close()
    assert ours.wait(1.0)
    with pytest.raises(EOFError):
        ours.receive()
    with pytest.raises(BrokenPipeError):
        ours.wake()
    ours.close()


def test_all_answer_in_the_order_of_lanes() -> None:
    with started() as barrier:
        assert [barrier.wake() for _ in range(3)] == [[None, count, count] for count in (1, 2, 3)]
        assert barrier.ask(["x", "y", "z"]) == [(0, "x"), (1, "y"), (2, "z")]
        assert barrier.close() == ["closed 0", "closed 1", "closed 2"]
        assert barrier.close() == [], "once"


def fails(barrier: Barrier, asked: list[str]) -> str:
    with pytest.raises(EnvError) as caught:
        barrier.ask(asked)
    assert caught.value.cause == "worker_death"
    assert not barrier.processes
    return caught.value.report


def test_one_that_dies_is_named_and_so_are_others_that_died() -> None:
    with started() as barrier:
        assert fails(barrier, ["x", "die", "z"]) == "lane 5 of World died (exit code 5) (somewhere, 1)"
    with started() as barrier:
        for process in barrier.processes[1:]:
            process.kill()
            assert connection.wait([process.sentinel], children.LIMIT)
        assert fails(barrier, ["x", "y", "z"]) == "lane 5 of World and 1 more died (exit code -9) (somewhere, 1)"


@pytest.mark.parametrize(
    ("asked", "limits"),
    [("hang", Timeouts(step=0.3)), ("reset for ever", Timeouts(reset=0.3))],
    ids=["in a step", "in a reset"],
)
def test_the_limit_is_that_of_the_call_and_those_that_have_answered_are_not_late(asked: str, limits: Timeouts) -> None:
    with started(limits) as barrier:
        report = fails(barrier, ["x", asked, "z"])
    assert report == "lane 5 of World did not answer within 0.3 s (somewhere, 1)"


def test_one_that_was_stopped_before_it_was_asked_is_late_too() -> None:
    with started(Timeouts(step=0.3)) as barrier:
        stopped = psutil.Process(barrier.processes[2].pid)
        stopped.send_signal(signal.SIGSTOP)
        barrier.heartbeats.memory["phase"][2] = CONSTRUCT  # as if it had not written down yet that it is ready
        report = fails(barrier, ["x", "y", "z"])
    assert report == "lane 6 of World did not answer within 0.3 s (somewhere, 2)"


def test_what_takes_long_is_written_down() -> None:
    with started(Timeouts(step=0.5)) as barrier:
        memory = barrier.heartbeats.memory
        memory["begun"][1], memory["seed"][1], memory["steps"][1], memory["before"][1] = 1, 77, 12, 4
        fails(barrier, ["x", "hang", "z"])
        assert (cells[LANE], cells[SEEDS + 1], cells[STEP]) == (1, 77, 9)


def test_processes_that_cannot_be_started_end_those_that_were(monkeypatch: pytest.MonkeyPatch) -> None:
    start, ids = forkserver.start, list[int]()

    def fail_the_second_time(process: ForkServerProcess) -> None:
        if ids:
            raise BlockingIOError("Resource temporarily unavailable")
        start(process)
        ids.append(process.pid or 0)

    monkeypatch.setattr(forkserver, "start", fail_the_second_time)
    barrier = Barrier(WHO, Timeouts(), str)
    reason = re.escape("cannot start 3 processes (Resource temporarily unavailable): use fewer environments")
    with pytest.raises(SetupError, match=reason):
        barrier.start(children.answer_at_barrier, [("a",)] * 3)
    assert not psutil.pid_exists(ids[0])
