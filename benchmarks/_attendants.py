"""Threads that stand beside a measurement: when workers arrive, when they load new weights, and who is killed when."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Self

import numpy as np

from freewheel.core import NDArray
from freewheel.transport.shm.wire import SharedMemoryWire


class Attendant(threading.Thread):
    """Looks every `period` seconds until it has seen enough or the `with` block ends."""

    period = 0.002

    def __init__(self, wire: SharedMemoryWire) -> None:
        super().__init__(daemon=True)
        self._wire = wire
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        if self.ident is not None:
            self.join()

    def run(self) -> None:
        while self.look() and not self._over.wait(self.period):
            pass

    def look(self) -> bool:
        """Whether to look again."""
        raise NotImplementedError


class Arrivals(Attendant):
    """Seconds from its making until every worker has acted."""

    period = 0.005

    def __init__(self, wire: SharedMemoryWire) -> None:
        super().__init__(wire)
        self._began = perf_counter()
        self.seconds: float | None = None

    def look(self) -> bool:
        if (self._wire.heartbeats.memory["steps"] == 0).any():
            return True
        self.seconds = perf_counter() - self._began
        return False


class Loads(Attendant):
    """Seconds from a publication until the median and the last worker act on what was published."""

    period = 0.0005

    def __init__(self, wire: SharedMemoryWire) -> None:
        super().__init__(wire)
        self.median: list[float] = []
        self.last: list[float] = []
        self.overtaken = 0  # publications that some worker never loaded, because there was a newer one
        self._published: tuple[int, float] = (0, perf_counter())
        self._watched = 0
        self._after: NDArray = np.zeros(wire.authors)  # [W] seconds; nan: not yet

    def published(self, version: int) -> None:
        """About to be."""
        self._published = version, perf_counter()

    def look(self) -> bool:
        version, at = self._published
        if version != self._watched:
            self.overtaken += bool(np.isnan(self._after).any())
            self._watched, self._after = version, np.full(self._wire.authors, np.nan)
        if not np.isnan(self._after).any():
            return True
        memory, slots = self._wire.channel.memory, self._wire.channel.shape.slots
        acting = memory["version"][np.arange(self._wire.authors), memory["opened"] % slots]
        self._after[np.isnan(self._after) & (acting >= version)] = perf_counter() - at
        if not np.isnan(self._after).any():
            self.median.append(float(np.median(self._after)))
            self.last.append(float(self._after.max()))
        return True


class Killer(Attendant):
    """SIGKILL by a schedule of (seconds, worker), and how long until the next incarnation has stepped."""

    def __init__(
        self, wire: SharedMemoryWire, schedule: Sequence[tuple[float, int]], updates: Callable[[], int]
    ) -> None:
        super().__init__(wire)
        self._todo, self._updates = deque(schedule), updates
        self._began = 0.0
        self._killed: set[tuple[int, int]] = set()  # worker and incarnation
        self._away: dict[int, tuple[float, int]] = {}  # when it was killed, and which incarnation
        self.kills = 0
        self.updates_at_last = 0
        self.back: list[float] = []

    def run(self) -> None:
        self._began = perf_counter()
        super().run()

    def look(self) -> bool:
        while self._todo and self._todo[0][0] <= perf_counter() - self._began:
            self._kill(self._todo.popleft()[1])
        for worker, (at, incarnation) in list(self._away.items()):
            slot = self._wire.supervisor.slots[worker]
            replaced = slot.process is not None and slot.incarnation > incarnation
            if replaced and self._wire.heartbeats.memory["steps"][worker] > slot.steps:
                self.back.append(perf_counter() - at)
                del self._away[worker]
        return bool(self._todo or self._away)

    def _kill(self, worker: int) -> None:
        """Each incarnation once; nobody is killed who is not there."""
        slot = self._wire.supervisor.slots[worker]
        process, incarnation = slot.process, slot.incarnation
        if process is None or (worker, incarnation) in self._killed:
            return
        with suppress(ValueError, ProcessLookupError):  # it has just been buried
            if process.pid is None:
                return
            os.kill(process.pid, signal.SIGKILL)
            self._killed.add((worker, incarnation))
            self._away[worker] = perf_counter(), incarnation
            self.kills += 1
            self.updates_at_last = self._updates()


def memory_kb(wire: SharedMemoryWire) -> list[int]:
    """Every worker's own share of the memory it uses (PSS)."""
    sizes = []
    for slot in wire.supervisor.slots:
        with suppress(OSError, ValueError):  # it has just died
            if slot.process is None:
                continue
            lines = Path(f"/proc/{slot.process.pid}/smaps_rollup").read_text().splitlines()
            sizes += [int(line.split()[1]) for line in lines if line.startswith("Pss:")]
    return sizes
