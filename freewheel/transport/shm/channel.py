"""Channel: fragments in shared memory, written in place by workers, copied out by the learner.

Every worker has its own ring of slots, so each value has one writer and no lock is needed:

    worker   writes a row of its open slot, then increments `count`; it closes a slot by incrementing `committed`
    learner  copies rows below `count` of closed slots (or of the open one, if it must not wait), then increments `taken`

Each increment is a single store, and everything else is read only through these counters: a row is complete and counted, or it
does not exist. So a worker may die or be stopped between any two stores and the row counts still balance.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np

from freewheel.core import CAUSES, TRANSITION_FIELDS, WORKER_TIME, EnvSpec, Episode, Failure, NDArray, Transitions
from freewheel.pacing.pacing import Tally
from freewheel.seeding import POSITION_WORDS
from freewheel.transport.shm.memory import Fields, SharedArrays, bytes_of
from freewheel.transport.shm.sync import ProcessLock, Wakeup
from freewheel.transport.wire import After, Fragment, Skipped, WorkerRows

NO_SLOT = -1
NOTHING, LANES, LANES_AND_RNG = range(3)
EPISODE = ("lane", "number", "seed", "ret", "length", "seconds")  # columns of an episode; context and measures follow
SKIPS = 256  # for Shape.skips
FAILED, ENDED = 1, 2  # columns of `tally`; column 0 is the number of rows produced


@dataclass(frozen=True)
class Shape:
    """The size of a channel."""

    spec: EnvSpec  # of one worker's env: spec.lanes lanes
    workers: int
    slots: int  # of each worker
    steps: int  # of a slot at most
    context: int = 0  # numbers in an episode's context
    state: int = 0  # numbers in an actor's memory for each lane
    tickets: int = 0  # numbers that identify the episodes issued to the worker
    skips: int = 0  # number of slots dropped last by a full ring whose content is recorded

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
            "lost": (rows, "u1"),  # written if a step had failures: 0, or 1 + index of the cause that lost this row
            "episodes": ((*slot, self.steps * spec.lanes, len(EPISODE) + self.context + len(spec.measures)), "f8"),
            # before each step and after the last: rows produced, rows lost to failures, episodes ended in this slot
            "tally": ((*slot, self.steps + 1, 3), "i8"),
            "state": ((*slot, spec.lanes, self.state), "f4"),  # the actor's memory before the first step
            "tickets": ((*slot, self.tickets), "i8"),
            "known": (slot, "i8"),  # which of the next three are valid: NOTHING, LANES, or LANES_AND_RNG
            "numbers": ((*slot, spec.lanes), "i8"),  # core.Episode.number of each lane after the last step
            "memory": ((*slot, spec.lanes, self.state), "f4"),  # the actor's memory after the last step
            "rng": ((*slot, POSITION_WORDS), "i8"),  # the position of its random generator then
            # incarnation, version and steps of a dropped slot, by its number
            "skipped": ((*worker, self.skips, 3), "i8"),
            "version": (slot, "i8"),
            "incarnation": (slot, "i8"),
            "count": (slot, "i8"),  # finished steps
            "committed": (worker, "i8"),  # closed slots; also the number of the open one
            "opened": (worker, "i8"),  # the number of the slot begun last; that slot is open if it equals `committed`
            "taken": (worker, "i8"),  # slots freed
            "reading": (worker, "i8"),  # the slot that the learner is copying
            "time": ((self.workers, len(WORKER_TIME)), "i8"),
        }

    @property
    def size(self) -> int:
        return bytes_of(self.fields())


@dataclass(frozen=True)
class Port:
    """The part of a channel that is sent to a worker process."""

    shape: Shape
    memory: SharedArrays
    wakeup: Wakeup  # wakes the learner when a slot was closed
    slot_freed: Wakeup  # wakes the worker when a slot was freed
    overflow: ProcessLock | None  # protects `taken` where a full ring drops its oldest slot


class Channel:
    """The memory, and a port for every worker. With `drop_oldest` a full ring drops its oldest slot."""

    def __init__(self, shape: Shape, *, drop_oldest: bool = False) -> None:
        self.shape = shape
        self.memory = SharedArrays(shape.fields())
        self.memory["opened"][:] = self.memory["reading"][:] = NO_SLOT
        self.wakeup = Wakeup()
        self.overflow = ProcessLock() if drop_oldest else None
        self.ports = [Port(shape, self.memory, self.wakeup, Wakeup(), self.overflow) for _ in range(shape.workers)]

    def close(self) -> None:
        self.memory.close()
        for part in (self.wakeup, self.overflow, *(port.slot_freed for port in self.ports)):
            if part is not None:
                part.close()


class _Ring:
    """One worker's slots and counters."""

    def __init__(self, memory: SharedArrays, shape: Shape, worker: int) -> None:
        self.size, self._stride, self.skips = shape.slots, 3 * (shape.steps + 1), shape.skips
        self.slots = [[memory[name][worker, slot] for name in TRANSITION_FIELDS] for slot in range(shape.slots)]
        cells = partial(memory.cells, worker=worker)
        self.committed, self.opened, self.taken, self.reading = map(cells, ("committed", "opened", "taken", "reading"))
        self.version, self.incarnation, self.count = map(cells, ("version", "incarnation", "count"))
        self.tally, self.clocks = cells("tally"), cells("time")
        self.lost, self.episodes, self.time = (memory[name][worker] for name in ("lost", "episodes", "time"))
        self.known, self.numbers = cells("known"), cells("numbers")
        self.memory, self.rng = memory["memory"][worker], memory["rng"][worker]
        self.state, self.tickets, self.skipped = (memory[name][worker] for name in ("state", "tickets", "skipped"))

    def closed(self) -> int:
        return self.committed[0] - self.taken[0]

    def at(self, number: int, step: int) -> int:
        """Return the index of this step of this slot in `tally`."""
        return number % self.size * self._stride + 3 * step

    def steps(self, number: int) -> int:
        return self.count[number % self.size]

    def rows(self, number: int, step: int) -> int:
        """Return the rows of a slot before this step, including lost rows."""
        return self.tally[self.at(number, step)] - self.tally[self.at(number, 0)]

    def before(self, number: int) -> int:
        """Return the rows produced before this slot, which is not freed yet. Its writer may begin it at any time."""
        if self.opened[0] < number:
            produced = self.tally[self.at(number - 1, self.steps(number - 1))]
            if self.opened[0] < number:  # so the slot before it was not overwritten
                return int(produced)
        return int(self.tally[self.at(number, 0)])

    def reached(self) -> Tally:
        """Return the worker's progress, from the slot that it began last."""
        number = self.opened[0]
        steps = self.steps(number)
        at = self.at(number, steps)
        produced, failed, ended = self.tally[at : at + 3]
        _, failed_before, ended_before = self.tally[at - 3 : at] if steps else (0, failed, ended)
        return Tally(produced, failed, number == NO_SLOT or ended > ended_before or failed > failed_before)


class Writer:
    """The worker's side."""

    def __init__(self, port: Port, worker: int, incarnation: int) -> None:
        self._ring, self._incarnation = _Ring(port.memory, port.shape, worker), incarnation
        self._data = [Transitions(*columns) for columns in self._ring.slots]
        self._wakeup, self._overflow = port.wakeup, port.overflow
        self.slot = NO_SLOT

    @property
    def tally(self) -> Tally:
        return self._ring.reached()

    def full(self, slots: int = 0) -> bool:
        """Return whether no slot is free. `slots`: how many may be used if a full ring makes workers wait; 0: all."""
        ring = self._ring
        if self._overflow is None:
            return ring.closed() >= min(slots or ring.size, ring.size)
        if ring.closed() < ring.size:
            return False
        with self._overflow:  # drop the oldest slot, unless the learner is reading it; the learner counts the rows
            number = ring.taken[0]
            if ring.closed() == ring.size and ring.reading[0] != number:
                if ring.skips:
                    slot = number % ring.size
                    about = ring.incarnation[slot], ring.version[slot], ring.count[slot]
                    ring.skipped[number % ring.skips] = about
                ring.taken[0] += 1
        return ring.closed() >= ring.size

    def begin(self, version: int, state: NDArray | None = None, tickets: Sequence[int] = ()) -> Transitions:
        """Open the next slot and return its arrays. state [B, H]: the actor's memory."""
        ring, number = self._ring, self._ring.committed[0]
        self.slot = slot = number % ring.size
        self._at = at = ring.at(number, 0)
        ring.tally[at], ring.tally[at + FAILED], ring.tally[at + ENDED] = *ring.reached()[:2], 0
        ring.count[slot] = 0
        ring.known[slot] = NOTHING
        if state is not None and state.size:
            ring.state[slot] = state
        if tickets:
            ring.tickets[slot] = tickets
        ring.version[slot], ring.incarnation[slot] = version, self._incarnation
        ring.opened[0] = number
        return self._data[slot]

    def row(self, t: int, rows: int, episodes: Sequence[Episode] = (), failures: Sequence[Failure] = ()) -> None:
        """Publish step t, which is written for every lane: its rows, finished episodes and failures."""
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
        """Close the slot. Call `notify` after the grant has been given back."""
        self.spend(time)
        self._ring.committed[0] += 1

    def spend(self, time: Sequence[int]) -> None:
        """Add to the worker's time, which the learner reads with the next fragment."""
        clocks = self._ring.clocks
        for kind, ns in enumerate(time):
            if ns:
                clocks[kind] += ns

    def describe(self, begun: memoryview, memory: NDArray | None, rng: NDArray | None) -> None:
        """Write wire.After, before `commit`. `begun`: episodes of each lane, including the one that begins next."""
        ring, slot, at = self._ring, self.slot, self.slot * len(begun)
        for lane, count in enumerate(begun):
            ring.numbers[at + lane] = count - 1
        if memory is not None:
            ring.memory[slot] = memory
        if rng is not None:
            ring.rng[slot] = rng.view(np.int64)
        ring.known[slot] = LANES if rng is None else LANES_AND_RNG

    def notify(self) -> None:
        """Wake the learner."""
        self._wakeup.notify()

    @staticmethod
    def _mark_lost(lost: NDArray, failures: Sequence[Failure]) -> int:
        """Write the cause for each lane that lost its row of this step. Return the number of these lanes."""
        lost[:] = 0
        for failure in failures:
            if not failure.in_reset and failure.cause != "quarantine":
                lost[failure.lane] = 1 + CAUSES.index(failure.cause)
        return int(np.count_nonzero(lost))


class Reader:
    """The learner's side."""

    def __init__(self, channel: Channel) -> None:
        self._channel, shape = channel, channel.shape
        self._rings = [_Ring(channel.memory, shape, worker) for worker in range(shape.workers)]
        self._number = [0] * shape.workers  # the slot read last
        self._begun = [0] * shape.workers  # steps read of that slot
        self._read = [0] * shape.workers  # rows read or known to be dropped, including lost rows
        self._gap = [False] * shape.workers
        self._passed = [0] * shape.workers  # the first slot that is neither read to its end nor known to be dropped
        self._skipped: list[list[Skipped]] = [[] for _ in range(shape.workers)]  # slots since the last fragment
        self._time = [np.zeros(len(WORKER_TIME), np.int64) for _ in range(shape.workers)]
        self._episode = partial(_episode, shape.context)
        self._lock: AbstractContextManager[None] = channel.overflow or nullcontext()
        self.overflowed = 0  # rows dropped by full rings

    def close(self) -> None:
        """Release the memory, which is large."""
        self._rings.clear()

    def ready(self) -> list[int]:
        """Return the workers with closed fragments."""
        memory = self._channel.memory
        return np.flatnonzero(memory["committed"] != memory["taken"]).tolist()

    def queued_versions(self) -> list[int]:
        """Return the version of the oldest closed fragment of every worker that has one."""
        rings = (self._rings[worker] for worker in self.ready())
        return [ring.version[ring.taken[0] % ring.size] for ring in rings]

    def take(self, worker: int) -> Fragment:
        """Return the unread rows of a worker's oldest closed fragment, and free its slot."""
        ring = self._rings[worker]
        with self._lock:
            number = ring.reading[0] = ring.taken[0]
            self._skip(worker)
        fragment = self._copy(worker, number)
        with self._lock:
            ring.reading[0] = NO_SLOT
            ring.taken[0] = self._passed[worker] = number + 1
        self._channel.ports[worker].slot_freed.notify()
        return fragment

    def take_open(self, worker: int) -> Fragment | None:
        """Return the unread rows of a worker's open fragment; None if it has none, or has closed ones."""
        ring = self._rings[worker]
        with self._lock:
            number = ring.taken[0]
            if not (number == ring.committed[0] == ring.opened[0]):
                return None
            ring.reading[0] = number
            self._skip(worker)
        fragment = self._copy(worker, number)
        with self._lock:
            ring.reading[0] = NO_SLOT
        return fragment

    def settle(self, worker: int) -> Tally:
        """Close the open slot of a dead worker. Return the worker's progress."""
        ring = self._rings[worker]
        if ring.opened[0] == ring.committed[0]:
            ring.committed[0] += 1
        return ring.reached()

    def account(self, worker: int) -> WorkerRows:
        """Return a worker's row counts at one moment, although it may produce more meanwhile."""
        ring = self._rings[worker]
        with self._lock:
            self._skip(worker)
            taken, again = ring.taken[0], True
            while again:
                committed = ring.committed[0]
                last = min(ring.opened[0], committed)  # the slot begun last, at some moment after `committed` was read
                steps = ring.steps(last)
                produced = ring.tally[ring.at(last, steps)]
                again = ring.opened[0] - last >= ring.size  # it was overwritten meanwhile
            queued = sum(ring.rows(number, ring.steps(number)) for number in range(taken, committed))
            opened = ring.rows(last, steps) if last == committed else 0
            seen = self._seen(worker, taken)
        return (
            WorkerRows(produced, queued - seen, opened) if taken < committed else WorkerRows(produced, 0, opened - seen)
        )

    def _seen(self, worker: int, number: int) -> int:
        """Return how many rows of this slot were read."""
        return self._rings[worker].rows(number, self._begun[worker]) if self._number[worker] == number else 0

    def _skip(self, worker: int) -> None:
        """Count the rows that the ring has dropped since the last call."""
        if self._channel.overflow is None:
            return
        ring = self._rings[worker]
        dropped = ring.before(ring.taken[0]) - self._read[worker]  # negative if this slot was partly read
        if dropped > 0:
            self._read[worker] += dropped
            self.overflowed += dropped
            self._gap[worker] = True
        self._look_up_skipped(worker, ring)

    def _look_up_skipped(self, worker: int, ring: _Ring) -> None:
        """Record what the dropped slots held."""
        begin, end = self._passed[worker], ring.taken[0]
        self._passed[worker] = max(begin, end)
        for number in range(begin, end if ring.skips else begin):
            incarnation, version, steps = ring.skipped[number % ring.skips].tolist()
            steps -= self._begun[worker] if self._number[worker] == number else 0
            if end - number > ring.skips:
                self._skipped[worker].append(Skipped(incarnation, version, None))
            elif steps:
                self._skipped[worker].append(Skipped(incarnation, version, steps))

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
        state, tickets = ring.state[slot].copy(), ring.tickets[slot].tolist()
        after, skipped, self._skipped[worker] = self._after(ring, slot), self._skipped[worker], []
        author = worker, ring.incarnation[slot], ring.version[slot]
        return Fragment(*author, data, state, episodes, rows, lost, gap, time, tickets, after, skipped)

    @staticmethod
    def _after(ring: _Ring, slot: int) -> After | None:
        if (known := ring.known[slot]) == NOTHING:
            return None
        rng = ring.rng[slot].copy().view(np.uint64) if known == LANES_AND_RNG else None
        memory = ring.memory[slot].copy()
        return After(ring.numbers[slot * len(memory) : (slot + 1) * len(memory)].tolist(), memory, rng)


def _lost(ring: _Ring, slot: int, begin: int, end: int) -> dict[str, int]:
    """Return the rows lost to environment failures in these steps, by cause."""
    failed = [ring.tally[ring.at(slot, step) + FAILED] for step in range(begin, end + 1)]
    steps = begin + np.flatnonzero(np.diff(failed))
    codes, counts = np.unique(ring.lost[slot, steps], return_counts=True)
    return {CAUSES[code - 1]: count for code, count in zip(codes.tolist(), counts.tolist(), strict=True) if code}


def _episode(width: int, columns: list[float]) -> Episode:
    lane, number, seed, ret, length, seconds, *rest = columns
    context, measures = tuple(rest[:width]), tuple(rest[width:])
    return Episode(int(lane), int(number), int(seed), context, ret, int(length), seconds, measures)
