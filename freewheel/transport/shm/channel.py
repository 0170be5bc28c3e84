"""Channel: fragments of experience in shared memory, written in place by workers, taken whole or row by row by the learner.

Every worker has a ring of slots of its own, so each cell has one writer and nobody holds a lock that could die with them:

    worker   fills a row of its open slot, then moves `count`; a full slot it closes by moving `committed`
    learner  copies rows below `count` out of closed slots (and, when it must not wait, out of the open one), then moves `taken`

Each of these moves is one store, and everything else is read through them: a row is there, whole and counted, or it is not.
So a worker may die or be stopped between any two stores, and the books balance.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import NamedTuple

import numpy as np

from freewheel.core import CAUSES, WORKER_TIME, EnvSpec, Episode, Failure, NDArray, Transitions
from freewheel.pacing.pacing import Tally
from freewheel.transport.shm.memory import Fields, SharedArrays, bytes_of
from freewheel.transport.shm.sync import ProcessLock, Wakeup
from freewheel.transport.wire import Fragment

NONE = -1
EPISODE = ("lane", "number", "seed", "ret", "length", "seconds")  # columns of an episode; then its context and measures
COLUMNS = tuple(field.name for field in fields(Transitions))
FAILED, ENDED = 1, 2  # columns of `tally`, after the rows produced


class WorkerRows(NamedTuple):
    """One worker's rows, seen at one moment."""

    produced: int
    queued: int
    open: int


@dataclass(frozen=True)
class Shape:
    """How large a channel is."""

    spec: EnvSpec  # of one worker's env: spec.lanes lanes
    workers: int
    slots: int  # a worker
    steps: int  # rows of a lane a slot holds at most
    context: int = 0  # numbers of an episode's
    state: int = 0  # numbers of an actor's memory, of each lane

    def fields(self) -> Fields:
        spec, worker, slot = self.spec, (self.workers,), (self.workers, self.slots)
        steps = (*slot, self.steps)
        rows = (*steps, spec.lanes)
        return {
            "obs": ((*rows, spec.obs_size), spec.obs_dtype),
            "action": ((*rows, *spec.action.shape), spec.action.dtype),
            "log_prob": (rows, "f4"),
            "reward": (rows, "f4"),
            "terminated": (rows, "?"),
            "truncated": (rows, "?"),
            "next_obs": ((*rows, spec.obs_size), spec.obs_dtype),
            "valid": (rows, "?"),
            "lost": (rows, "u1"),  # where a step had failures: 0, or 1 + why one took this row
            "episodes": ((*slot, self.steps * spec.lanes, len(EPISODE) + self.context + len(spec.measures)), "f8"),
            # before each step, and after the last: rows produced, of these taken by env failures, episodes ended in this slot
            "tally": ((*slot, self.steps + 1, 3), "i8"),
            "state": ((*slot, spec.lanes, self.state), "f4"),  # the actor's memory before the first step
            "version": (slot, "i8"),
            "incarnation": (slot, "i8"),
            "count": (slot, "i8"),  # steps in it
            "committed": (worker, "i8"),  # slots closed; also the number of the open one
            "opened": (worker, "i8"),  # the number of the slot begun last: open if nothing has closed it
            "taken": (worker, "i8"),  # slots emptied
            "reading": (worker, "i8"),  # the slot the learner is copying
            "time": ((self.workers, len(WORKER_TIME)), "i8"),
        }

    @property
    def size(self) -> int:
        return bytes_of(self.fields())


@dataclass(frozen=True)
class Port:
    """What a worker needs of a channel; it travels to its process."""

    shape: Shape
    memory: SharedArrays
    wakeup: Wakeup  # rings at the learner's when something was committed
    room: Wakeup  # rings at the worker's when a slot came free
    overflow: ProcessLock | None  # who may move `taken`, where a full ring makes room by itself


class Channel:
    """The memory, and a port for every worker. With `drop_oldest` a full ring makes room by itself."""

    def __init__(self, shape: Shape, *, drop_oldest: bool = False) -> None:
        self.shape = shape
        self.memory = SharedArrays(shape.fields())
        self.memory["opened"][:] = self.memory["reading"][:] = NONE
        self.wakeup = Wakeup()
        self.overflow = ProcessLock() if drop_oldest else None
        self.ports = [Port(shape, self.memory, self.wakeup, Wakeup(), self.overflow) for _ in range(shape.workers)]

    def close(self) -> None:
        self.memory.close()
        for part in (self.wakeup, self.overflow, *(port.room for port in self.ports)):
            if part is not None:
                part.close()


class _Ring:
    """One worker's slots and counters."""

    def __init__(self, memory: SharedArrays, shape: Shape, worker: int) -> None:
        self.size, self._stride = shape.slots, 3 * (shape.steps + 1)
        self.slots = [[memory[name][worker, slot] for name in COLUMNS] for slot in range(shape.slots)]
        cells = partial(memory.cells, worker=worker)
        self.committed, self.opened, self.taken, self.reading = map(cells, ("committed", "opened", "taken", "reading"))
        self.version, self.incarnation, self.count = map(cells, ("version", "incarnation", "count"))
        self.tally, self.clocks = cells("tally"), cells("time")
        self.lost, self.episodes, self.time = (memory[name][worker] for name in ("lost", "episodes", "time"))
        self.state = memory["state"][worker]

    def closed(self) -> int:
        return self.committed[0] - self.taken[0]

    def at(self, number: int, step: int) -> int:
        """Where in `tally` this step of this slot begins."""
        return number % self.size * self._stride + 3 * step

    def steps(self, number: int) -> int:
        return self.count[number % self.size]

    def rows(self, number: int, step: int) -> int:
        """Rows in the steps of a slot before this one, lost ones included."""
        return self.tally[self.at(number, step)] - self.tally[self.at(number, 0)]

    def reached(self) -> Tally:
        """How far the worker came with the slot that it began last."""
        number = self.opened[0]
        steps = self.steps(number)
        at = self.at(number, steps)
        produced, failed, ended = self.tally[at : at + 3]
        _, failed_before, ended_before = self.tally[at - 3 : at] if steps else (0, failed, ended)
        return Tally(produced, failed, number == NONE or ended > ended_before or failed > failed_before)


class Writer:
    """A worker's end."""

    def __init__(self, port: Port, worker: int, incarnation: int) -> None:
        self._ring, self._incarnation = _Ring(port.memory, port.shape, worker), incarnation
        self._data = [Transitions(*columns) for columns in self._ring.slots]
        self._wakeup, self._overflow = port.wakeup, port.overflow
        self.slot = NONE

    @property
    def tally(self) -> Tally:
        return self._ring.reached()

    def full(self) -> bool:
        """No slot is free: the learner has not kept up."""
        ring = self._ring
        if ring.closed() < ring.size:
            return False
        if self._overflow is None:
            return True
        with self._overflow:  # the oldest makes room, unless the learner has its hands in it; the learner counts it
            if ring.closed() == ring.size and ring.reading[0] != ring.taken[0]:
                ring.taken[0] += 1
        return ring.closed() >= ring.size

    def begin(self, version: int, state: NDArray | None = None) -> Transitions:
        """Open the next slot: where the rows go. state [B, H]: the actor's memory."""
        ring, number = self._ring, self._ring.committed[0]
        self.slot = slot = number % ring.size
        self._at = at = ring.at(number, 0)
        ring.tally[at], ring.tally[at + FAILED], ring.tally[at + ENDED] = *ring.reached()[:2], 0
        ring.count[slot] = 0
        if state is not None and state.size:
            ring.state[slot] = state
        ring.version[slot], ring.incarnation[slot] = version, self._incarnation
        ring.opened[0] = number
        return self._data[slot]

    def row(self, t: int, rows: int, episodes: Sequence[Episode] = (), failures: Sequence[Failure] = ()) -> None:
        """Step t of every lane is written: show its rows, with the episodes it ended and the rows that failures took."""
        ring, slot, at = self._ring, self.slot, self._at + 3 * t
        tally = ring.tally
        ended = tally[at + ENDED]
        for episode in episodes:
            head = (episode.lane, episode.number, episode.seed, episode.ret, episode.length, episode.seconds)
            ring.episodes[slot, ended] = (*head, *episode.context, *episode.measures)
            ended += 1
        failed = self._mark_lost(ring.lost[slot, t], failures) if failures else 0
        tally[at + 3] = tally[at] + rows + failed
        tally[at + 3 + FAILED] = tally[at + FAILED] + failed
        tally[at + 3 + ENDED] = ended
        ring.count[slot] = t + 1

    def commit(self, time: Sequence[int]) -> None:
        """Close the slot and hand it over; `ring` follows when its permit has been given back."""
        clocks = self._ring.clocks
        for kind, ns in enumerate(time):
            if ns:
                clocks[kind] += ns
        self._ring.committed[0] += 1

    def notify(self) -> None:
        """Wake the learner."""
        self._wakeup.notify()

    @staticmethod
    def _mark_lost(lost: NDArray, failures: Sequence[Failure]) -> int:
        """Why each lane has lost its row of this step; how many have."""
        lost[:] = 0
        for failure in failures:
            if not failure.in_reset and failure.cause != "quarantine":
                lost[failure.lane] = 1 + CAUSES.index(failure.cause)
        return int(np.count_nonzero(lost))


class Reader:
    """The learner's end."""

    def __init__(self, channel: Channel) -> None:
        self._channel, shape = channel, channel.shape
        self._rings = [_Ring(channel.memory, shape, worker) for worker in range(shape.workers)]
        self._number = [0] * shape.workers  # the slot taken from last
        self._begun = [0] * shape.workers  # steps taken of it
        self._read = [0] * shape.workers  # rows taken or known to be dropped, lost ones included
        self._gap = [False] * shape.workers
        self._time = [np.zeros(len(WORKER_TIME), np.int64) for _ in range(shape.workers)]
        self._episode = partial(_episode, shape.context)
        self._lock: AbstractContextManager[None] = channel.overflow or nullcontext()
        self.overflowed = 0  # rows that full rings have dropped

    def ready(self) -> list[int]:
        """Workers with closed fragments."""
        memory = self._channel.memory
        return np.flatnonzero(memory["committed"] != memory["taken"]).tolist()

    def queued_versions(self) -> list[int]:
        """The versions of the oldest closed fragment of every worker that has one."""
        rings = (self._rings[worker] for worker in self.ready())
        return [ring.version[ring.taken[0] % ring.size] for ring in rings]

    def take(self, worker: int) -> Fragment:
        """The oldest closed fragment of a worker, or what is left of it; frees the slot."""
        ring = self._rings[worker]
        with self._lock:
            number = ring.reading[0] = ring.taken[0]
            self._skip(worker)
        fragment = self._copy(worker, number)
        with self._lock:
            ring.reading[0] = NONE
            ring.taken[0] = number + 1
        self._channel.ports[worker].room.notify()
        return fragment

    def take_open(self, worker: int) -> Fragment | None:
        """The finished rows of the fragment that a worker is still writing; None if it writes none, or there are older ones."""
        ring = self._rings[worker]
        with self._lock:
            number = ring.taken[0]
            if not (number == ring.committed[0] == ring.opened[0]):
                return None
            ring.reading[0] = number
            self._skip(worker)
        fragment = self._copy(worker, number)
        with self._lock:
            ring.reading[0] = NONE
        return fragment

    def settle(self, worker: int) -> Tally:
        """A worker has died: close its open slot."""
        ring = self._rings[worker]
        if ring.opened[0] == ring.committed[0]:
            ring.committed[0] += 1
        return ring.reached()

    def account(self, worker: int) -> WorkerRows:
        """What a worker has produced and where it is, at one moment, though it may go on producing."""
        ring = self._rings[worker]
        with self._lock:
            self._skip(worker)
            taken, again = ring.taken[0], True
            while again:
                committed = ring.committed[0]
                last = min(ring.opened[0], committed)  # the slot begun last, at some moment since `committed` was read
                steps = ring.steps(last)
                produced = ring.tally[ring.at(last, steps)]
                again = ring.opened[0] - last >= ring.size  # it was written over meanwhile
            queued = sum(ring.rows(number, ring.steps(number)) for number in range(taken, committed))
            opened = ring.rows(last, steps) if last == committed else 0
            seen = self._seen(worker, taken)
        return (
            WorkerRows(produced, queued - seen, opened) if taken < committed else WorkerRows(produced, 0, opened - seen)
        )

    def _seen(self, worker: int, number: int) -> int:
        """Rows already taken of this slot."""
        return self._rings[worker].rows(number, self._begun[worker]) if self._number[worker] == number else 0

    def _skip(self, worker: int) -> None:
        """Count what the ring has dropped since it was last looked at."""
        if self._channel.overflow is None:
            return
        ring, number = self._rings[worker], self._rings[worker].taken[0]
        before = ring.tally[ring.at(number, 0)] if number <= ring.opened[0] else ring.reached().produced
        dropped = before - self._read[worker]  # negative where this slot was read in part
        if dropped > 0:
            self._read[worker] += dropped
            self.overflowed += dropped
            self._gap[worker] = True

    def _copy(self, worker: int, number: int) -> Fragment:
        ring, slot = self._rings[worker], number % self._rings[worker].size
        begin = self._begun[worker] if self._number[worker] == number else 0
        end = ring.count[slot]
        first = ring.at(number, begin)
        last = first + 3 * (end - begin)
        data = Transitions(*[column[begin:end].copy() for column in ring.slots[slot]])
        lost = _lost(ring, slot, begin, end) if ring.tally[last + FAILED] > ring.tally[first + FAILED] else {}
        ended = ring.tally[first + ENDED], ring.tally[last + ENDED]
        episodes = tuple(map(self._episode, ring.episodes[slot, slice(*ended)].tolist())) if ended[0] < ended[1] else ()
        rows = int(np.count_nonzero(data.valid))
        self._read[worker] += rows + sum(lost.values())
        self._number[worker], self._begun[worker] = number, end
        gap, self._gap[worker] = self._gap[worker], False
        now = ring.time.copy()
        time, self._time[worker] = now - self._time[worker], now
        state = ring.state[slot].copy()
        return Fragment(
            worker, ring.incarnation[slot], ring.version[slot], data, state, episodes, rows, lost, gap, time
        )


def _lost(ring: _Ring, slot: int, begin: int, end: int) -> dict[str, int]:
    """Rows that env failures took in these steps, by cause."""
    failed = [ring.tally[ring.at(slot, step) + FAILED] for step in range(begin, end + 1)]
    steps = begin + np.flatnonzero(np.diff(failed))
    codes, counts = np.unique(ring.lost[slot, steps], return_counts=True)
    return {CAUSES[code - 1]: count for code, count in zip(codes.tolist(), counts.tolist(), strict=True) if code}


def _episode(width: int, columns: list[float]) -> Episode:
    lane, number, seed, ret, length, seconds, *rest = columns
    context, measures = tuple(rest[:width]), tuple(rest[width:])
    return Episode(int(lane), int(number), int(seed), context, ret, int(length), seconds, measures)
