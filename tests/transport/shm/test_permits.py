"""A pacing between processes: a publication wakes workers, and the learner sees every worker that acts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from freewheel.pacing.episode_queue import EpisodeOrder, EpisodeQueue
from freewheel.pacing.lag_bound import LagBound
from freewheel.pacing.pacing import NO_VERSION
from freewheel.transport.shm.memory import SharedArrays
from freewheel.transport.shm.permits import SharedPermits
from freewheel.transport.shm.sync import Wakeup
from tests.support import children
from tests.transport.conftest import Pipe, Start

LIMIT = 20.0


@pytest.fixture
def permits() -> Iterator[SharedPermits]:
    """Three workers of four lanes; a limit can be given as `done`."""
    pacing = LagBound(workers=3, lanes=4, steps=5, batch_rows=0, ahead=0, max_lag=1)
    with closing(SharedPermits(pacing, 3)) as permits:
        yield permits


def test_processes_are_woken_by_a_publication(permits: SharedPermits, start: Start, pipe: Pipe) -> None:
    ours, theirs = pipe
    for worker in range(3):
        start(children.wait_for_grant, permits, worker, theirs)
    assert [ours.recv() for _ in range(3) if ours.poll(LIMIT)] == ["waiting"] * 3
    permits.publish(7, 60)
    assert [ours.recv() for _ in range(3) if ours.poll(LIMIT)] == [(5, 7)] * 3


def test_the_learner_sees_every_worker_that_acts(permits: SharedPermits, start: Start) -> None:
    """A race of publish and take: a worker that is not announced after a publication never acts on an older version."""
    with closing(SharedArrays({"log": ((2, 10**6), "i8"), "count": ((2,), "i8")})) as memory:
        processes = [start(children.act_again_and_again, permits, worker, memory) for worker in range(2)]
        scans: list[tuple[int, int, int]] = []
        version, seen, deadline = 0, set[int](), time.monotonic() + LIMIT
        # Until workers were often seen acting and idle.
        while (memory["count"] < 1000).any() or len(seen) <= 10 or len(scans) <= 10:
            assert time.monotonic() < deadline
            version += 1
            permits.publish(version, 2**40)
            announced = permits.pacing.announced()
            idle = [worker for worker in range(2) if announced[worker] == NO_VERSION]
            scans += [(worker, int(memory["count"][worker]), version) for worker in idle]
            seen.update(announced)
            assert all(process.is_alive() or process.exitcode == 0 for process in processes)
        for worker, count, posted in scans:
            assert (memory["log"][worker, count : memory["count"][worker]] >= posted).all()


def test_processes_never_get_the_same_ticket(start: Start, pipe: Pipe) -> None:
    queue = EpisodeQueue(order=EpisodeOrder(11, 3), workers=2, steps=4, batch_rows=1)
    ours, theirs = pipe
    with closing(Wakeup(each=True)) as go, closing(SharedPermits(queue, 2)) as permits:
        for worker in range(2):
            start(children.issue_many, permits, worker, go, theirs)
        assert [ours.recv() for _ in range(2) if ours.poll(LIMIT)] == ["ready"] * 2
        go.notify(2)
        issued = [ticket for _ in range(2) if ours.poll(LIMIT) for ticket in ours.recv()]
    assert sorted(issued) == list(range(4000))
