"""A pacing that processes share: its cells in shared memory, one lock for all cells, and a wakeup for every worker."""

from __future__ import annotations

import copy
from typing import Any

from freewheel.pacing.pacing import Pacing
from freewheel.transport.shm.memory import SharedArrays
from freewheel.transport.shm.sync import ProcessLock, Wakeups
from freewheel.transport.wire import Permits


class SharedPermits(Permits):
    """Permits that can be sent to worker processes, where they use the same cells.

    Workers are woken after the lock is released, because otherwise they would wait for it. If this process dies in
    between, they try again after a while.
    """

    def __init__(self, pacing: Pacing, workers: int) -> None:
        memory = SharedArrays({name: ((count,), "i8") for name, count in pacing.layout.items()})
        pacing.attach(memory.numbers)
        self._share(pacing, memory, ProcessLock(), Wakeups(workers))

    def _share(self, pacing: Pacing, memory: SharedArrays, lock: ProcessLock, wakeups: Wakeups) -> None:
        self.memory, self.lock, self.wakeups = memory, lock, wakeups
        super().__init__(pacing, lock, wakeups.notify)

    def __reduce__(self) -> tuple[Any, ...]:
        pacing = copy.copy(self.pacing)
        pacing.cells = {}
        return _attach, (pacing, self.memory, self.lock, self.wakeups)

    def close(self) -> None:
        """Free the cells; the pacing keeps a copy of them."""
        self.pacing.cells = {name: list(cell) for name, cell in self.pacing.cells.items()}
        self.memory.close()
        self.lock.close()
        self.wakeups.close()


def _attach(pacing: Pacing, memory: SharedArrays, lock: ProcessLock, wakeups: Wakeups) -> SharedPermits:
    pacing.cells = memory.numbers
    permits = SharedPermits.__new__(SharedPermits)
    permits._share(pacing, memory, lock, wakeups)
    return permits
