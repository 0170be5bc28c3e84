"""Tracks: the spans of one party in a ring of memory. One writer, any number of readers, no locks; the newest spans stay.

A span of a millisecond or more is a span of its own. Shorter ones are gathered: a block of 10 ms holds one span for each kind,
one after the other, as long as all of that kind together. So a ring lasts for seconds however short the steps of an environment
are, the sums by kind are exact, and a step costs a comparison.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from freewheel.core import WORKER_TIME, NDArray
from freewheel.timeline.model import KINDS

CAPACITY = 4096  # spans of a ring: 96 kB
WIDTH = 3  # numbers of a span: begin and end in ns of CLOCK_MONOTONIC, and a code
SHORT = 1_000_000  # ns: spans that are shorter are gathered ...
BLOCK = 10_000_000  # ... in blocks of about this length
NEVER = 1 << 62  # ns

NAMES = tuple(KINDS)
NUMBERS = {kind: number for number, kind in enumerate(NAMES)}
PARTY = 8  # bits of a code for the kind; above them 1 + the number of the row that is waited for, 0: not known
WORKER_KINDS = [NUMBERS[kind] for kind in WORKER_TIME]
OTHER, DOWN, RESET = (WORKER_TIME.index(kind) for kind in ("other", "down", "reset"))
#: Kinds of a worker's time in the order in which a turn has them.
TURN = [WORKER_TIME.index(kind) for kind in (
    "down", "wait-slot", "wait-credit", "wait-gate", "load", "infer", "step", "write", "reset",
)]  # fmt: skip


class Ring(NamedTuple):
    """Memory of a track: [CAPACITY * WIDTH] numbers, and how many spans were ever written."""

    cells: memoryview
    written: memoryview

    @classmethod
    def private(cls, capacity: int = CAPACITY) -> Ring:
        """For a party in this process."""
        return cls(memoryview(array("q", bytes(8 * WIDTH * capacity))), memoryview(array("q", [0])))

    def read(self, since: int) -> tuple[NDArray, int]:
        """The spans [n, WIDTH] from number `since` on that are still there, and the number of the next one."""
        capacity, end = len(self.cells) // WIDTH, self.written[0]
        all_cells = np.frombuffer(self.cells, np.int64).reshape(capacity, WIDTH)
        begin = max(since, end - capacity)
        copied = all_cells[np.arange(begin, end) % capacity]
        # Spans that were overwritten while they were copied, and the one that is being written.
        overwritten = self.written[0] - capacity + 1 - begin
        return copied[max(0, overwritten) :] if overwritten > 0 else copied, end

    def last_end(self) -> int:
        """ns, when the newest span ended; 0: there is none."""
        count = self.written[0]
        return self.cells[(count - 1) * WIDTH % len(self.cells) + 1] if count else 0


class Track:
    """Writes spans as they end, for parties that know the kind and the times of each."""

    def __init__(self, ring: Ring) -> None:
        self._cells, self._written = ring
        self._capacity = len(ring.cells) // WIDTH
        self._sums: dict[int, int] = {}  # of the block: ns by code
        self._began = 0  # the block

    def put(self, code: int, begin: int, end: int) -> None:
        """A span, whatever its length."""
        cells, written = self._cells, self._written[0]
        at = written % self._capacity * WIDTH
        cells[at], cells[at + 1], cells[at + 2] = begin, end, code
        self._written[0] = written + 1

    def add(self, kind: str, begin: int, end: int, party: int = -1) -> None:
        """A span that begins where the last one ended, or later. `party`: the number of the row that is waited for."""
        code = NUMBERS[kind] | (party + 1) << PARTY
        if end - begin >= SHORT:
            self.flush()
            self.put(code, begin, end)
            return
        if not self._sums:
            self._began = begin
        self._sums[code] = self._sums.get(code, 0) + end - begin
        if end - self._began >= BLOCK:
            self.flush()

    def flush(self) -> None:
        """What was gathered, one kind after the other."""
        at = self._began
        for code, spent in self._sums.items():
            if spent > 0:
                self.put(code, at, at + spent)
                at += spent
        self._sums.clear()


class TurnTrack(Track):
    """Writes what a worker does, from the nanoseconds by kind that its Runner counts anyway (core.WORKER_TIME).

    `due` is when `cut` should be called next: between two steps the worker compares one number with it.
    """

    def __init__(self, ring: Ring, now: int) -> None:
        super().__init__(ring)
        self._known = [0] * len(WORKER_TIME)  # of the Runner's present count, what is written already
        self._held = [0] * len(WORKER_TIME)  # of its counts before, what is not
        self._began, self.due = now, now + BLOCK

    def ready(self, began: int, now: int, counted: Sequence[int]) -> None:
        """Its environments were made at `began` and their first episodes have begun now; `counted`: of all this by the Runner."""
        self.put(WORKER_KINDS[DOWN], self._began, began)
        self.put(WORKER_KINDS[RESET], began, now)
        self._known = list(counted)
        self._began, self.due = now, now + BLOCK

    def cut(self, now: int, counted: Sequence[int]) -> int:
        """Write everything up to now; `counted` so far by the Runner. Returns `due`."""
        at = self._began
        for kind in TURN:
            spent = self._held[kind] + counted[kind] - self._known[kind]
            if spent > 0 and at < now:
                end = min(at + spent, now)
                self.put(WORKER_KINDS[kind], at, end)
                at = end
        if at < now:  # what is not counted as anything else
            self.put(WORKER_KINDS[OTHER], at, now)
        self._held = [0] * len(WORKER_TIME)
        self._known = list(counted)
        self._began, self.due = now, now + BLOCK
        return self.due

    def taken(self, now: int, counted: Sequence[int]) -> None:
        """The Runner's count was taken away and begins again at 0."""
        if now >= self.due:
            self.cut(now, counted)
        else:
            held, known = self._held, self._known
            for kind in TURN:
                if counted[kind]:
                    held[kind] += counted[kind] - known[kind]
        self._known = [0] * len(WORKER_TIME)

    def waited(self, kind: int, begin: int, end: int, counted: Sequence[int]) -> None:
        """A wait that the Runner will be told of; a long one is a span of its own. Call it before `Runner.spend`."""
        if end - begin < SHORT or begin < self._began:
            return
        self.cut(begin, counted)
        self.put(WORKER_KINDS[kind], begin, end)
        self._known[kind] += end - begin
        self._began, self.due = end, end + BLOCK


class NoTrack:
    """In the place of a TurnTrack where nothing is traced: its `due` never comes."""

    due = NEVER

    def ready(self, began: int, now: int, counted: Sequence[int]) -> None: ...

    def cut(self, now: int, counted: Sequence[int]) -> int:
        return NEVER

    def taken(self, now: int, counted: Sequence[int]) -> None: ...

    def waited(self, kind: int, begin: int, end: int, counted: Sequence[int]) -> None: ...
