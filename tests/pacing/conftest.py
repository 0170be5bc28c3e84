"""A pacing on both kinds of cells: plain lists, and shared memory with its lock and wakeups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext

import pytest

from freewheel.pacing.pacing import Pacing, Woken
from freewheel.transport.shm.permits import SharedPermits
from freewheel.transport.wire import Permits

Place = Callable[[Pacing], Permits]


class ListPermits(Permits):
    """For one thread; records the woken workers."""

    def __init__(self, pacing: Pacing) -> None:
        self.woken: Woken = []
        super().__init__(pacing, nullcontext(), self.woken.extend)


def woken(permits: Permits, workers: int) -> list[int]:
    """The workers woken since the last call."""
    if isinstance(permits, ListPermits):
        found = sorted(permits.woken)
        permits.woken.clear()
        return found
    assert isinstance(permits, SharedPermits)
    return [worker for worker in range(workers) if permits.wakeups[worker].wait(0.0)]


@pytest.fixture(params=["lists", "shared memory"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    opened: list[SharedPermits] = []

    def put(pacing: Pacing) -> Permits:
        if request.param == "lists":
            return ListPermits(pacing)
        opened.append(SharedPermits(pacing, pacing.layout["waiting"]))
        return opened[-1]

    yield put
    for permits in opened:
        with closing(permits):
            pass
