"""Learners that train together as threads of one process: sums at a barrier, in the order of ranks, the same bits for each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from freewheel.core import Array
from freewheel.errors import PeerLostError
from freewheel.learn.spec import LearnerSpec, Peers

T = TypeVar("T")
LIMIT = 30.0  # seconds that a learner waits for the others


class _Meeting:
    """Where threads add up their arrays."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=LIMIT)
        self.given: list[Any] = [np.zeros(0)] * count


class ThreadPeers:
    """Implements learn.spec.Peers."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self.rank, self.count, self._meeting = rank, len(meeting.given), meeting
        self.sums = 0

    def sum(self, array: Array) -> None:
        self.sums += 1
        self._meeting.given[self.rank] = array
        self._wait()
        shapes = {(tuple(one.shape), str(one.dtype)) for one in self._meeting.given}
        assert len(shapes) == 1, shapes
        first, *others = self._meeting.given
        total = first + 0
        for one in others:
            total = total + one
        self._wait()
        mine: Any = array
        mine[...] = total
        self._wait()

    def _wait(self) -> None:
        try:
            self._meeting.barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerLostError("another learner is gone") from None


def in_threads(count: int, body: Callable[[ThreadPeers], T]) -> list[T]:
    """What `body` returns for each of so many learners; raises what one of them has raised, rather than that others lost it."""
    meeting = _Meeting(count)
    found: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = body(ThreadPeers(meeting, rank))
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT)
    errors.sort(key=lambda error: isinstance(error, PeerLostError))
    if errors:
        raise errors[0]
    return [found[rank] for rank in range(count)]


def with_peers(spec: LearnerSpec, peers: Peers) -> LearnerSpec:
    return replace(spec, services=replace(spec.services, peers=peers))
