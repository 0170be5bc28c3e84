"""Tracks: the newest spans of one party in a ring of memory, with one writer, any number of readers and no locks.

A span of a millisecond or more is stored separately. Shorter ones are merged: a block of 10 ms holds one span per kind,
one after the other, each with the total duration of its kind. A ring therefore lasts for seconds, even if the steps of
an environment are short. The sums by kind are exact, and a step costs one comparison.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from freewheel.core import WORKER_TIME, NDArray
from freewheel.timeline.model import KINDS

CAPACITY = 4096  # spans in a ring: 96 kB
WIDTH = 3  # numbers in a span: begin and end in ns of CLOCK_MONOTONIC, and a code
SHORT = 1_000_000  # ns: shorter spans are merged ...
BLOCK = 10_000_000  # ... in blocks of about this length
NEVER = 1 << 62  # ns

NAMES = tuple(KINDS)
NUMBERS = {kind: number for number, kind in enumerate(NAMES)}
PARTY = 8  # bits of a code for the kind; the bits above hold 1 + the number of the awaited row, or 0 if unknown
WORKER_KINDS = [NUMBERS[kind] for kind in WORKER_TIME]
OTHER, DOWN, RESET = (WORKER_TIME.index(kind) for kind in ("other", "down", "reset"))
#: Kinds of a worker's time, in their order within a turn.
TURN = [WORKER_TIME.index(kind) for kind in (
    "down", "wait-slot", "wait-credit", "wait-gate", "load", "infer", "step", "write", "reset",
)]  # fmt: skip


class Ring(NamedTuple):
    """The memory of a track: [CAPACITY * WIDTH] numbers, and the count of all spans ever written."""

    cells: memoryview
    written: memoryview

    @classmethod
    def private(cls, capacity: int = CAPACITY) -> Ring:
        """Create a ring for a party in this process."""
        return cls(memoryview(array("q", bytes(8 * WIDTH * capacity))), memoryview(array("q", [0])))

    def read(self, since: int) -> tuple[NDArray, int]:
        """Return the spans [n, WIDTH] from number `since` on that are still there, and the number of the next one."""
        capacity, end = len(self.cells) // WIDTH, self.written[0]
        all_cells = np.frombuffer(self.cells, np.int64).reshape(capacity, WIDTH)
        begin = max(since, end - capacity)
        copied = all_cells[np.arange(begin, end) % capacity]
        # Leave out spans that were overwritten during the copy, and the one that is being written.
        overwritten = self.written[0] - capacity + 1 - begin
        return copied[max(0, overwritten) :] if overwritten > 0 else copied, end

    def last_end(self) -> int:
        """Return the end of the newest span in ns; 0 if there is none."""
        count = self.written[0]
        return self.cells[(count - 1) * WIDTH % len(self.cells) + 1] if count else 0


class Track:
    """Writes spans as they end, for parties that know the kind and the times of each."""

    def __init__(self, ring: Ring) -> None:
        self._cells, self._written = ring
        self._capacity = len(ring.cells) // WIDTH
        self._sums: dict[int, int] = {}  # ns by code in the current block
        self._began = 0  # ns: start of the current block

    def put(self, code: int, begin: int, end: int) -> None:
        """Write a span of any length."""
        cells, written = self._cells, self._written[0]
        at = written % self._capacity * WIDTH
        cells[at], cells[at + 1], cells[at + 2] = begin, end, code
        self._written[0] = written + 1

    def add(self, kind: str, begin: int, end: int, party: int = -1) -> None:
        """Add a span that begins at the end of the last one or later. `party`: the number of the awaited row."""
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
        """Write the merged spans, one kind after the other."""
        at = self._began
        for code, spent in self._sums.items():
            if spent > 0:
                self.put(code, at, at + spent)
                at += spent
        self._sums.clear()


class TurnTrack(Track):
    """Writes the spans of a worker from the nanoseconds by kind that its Runner counts anyway (core.WORKER_TIME).

    `due` is the time of the next call of `cut`: between two steps the worker only compares one number with it.
    """

    def __init__(self, ring: Ring, now: int) -> None:
        super().__init__(ring)
        self._known = [0] * len(WORKER_TIME)  # the part of the Runner's current count that is already written
        self._held = [0] * len(WORKER_TIME)  # the part of its earlier counts that is not yet written
        self._began, self.due = now, now + BLOCK

    def ready(self, began: int, now: int, counted: Sequence[int]) -> None:
        """Write the start: environments existed at `began` and were reset by `now`. `counted`: the Runner's count."""
        self.put(WORKER_KINDS[DOWN], self._began, began)
        self.put(WORKER_KINDS[RESET], began, now)
        self._known = list(counted)
        self._began, self.due = now, now + BLOCK

    def cut(self, now: int, counted: Sequence[int]) -> int:
        """Write everything up to `now`; `counted`: the Runner's count so far. Return `due`."""
        at = self._began
        for kind in TURN:
            spent = self._held[kind] + counted[kind] - self._known[kind]
            if spent > 0 and at < now:
                end = min(at + spent, now)
                self.put(WORKER_KINDS[kind], at, end)
                at = end
        if at < now:  # the rest of the time, which no kind counts
            self.put(WORKER_KINDS[OTHER], at, now)
        self._held = [0] * len(WORKER_TIME)
        self._known = list(counted)
        self._began, self.due = now, now + BLOCK
        return self.due

    def taken(self, now: int, counted: Sequence[int]) -> None:
        """Note that the Runner's count restarts at 0; `counted`: its values before."""
        if now >= self.due:
            self.cut(now, counted)
        else:
            held, known = self._held, self._known
            for kind in TURN:
                if counted[kind]:
                    held[kind] += counted[kind] - known[kind]
        self._known = [0] * len(WORKER_TIME)

    def waited(self, kind: int, begin: int, end: int, counted: Sequence[int]) -> None:
        """Write a long wait as a separate span. Call this before `Runner.spend` counts the wait."""
        if end - begin < SHORT or begin < self._began:
            return
        self.cut(begin, counted)
        self.put(WORKER_KINDS[kind], begin, end)
        self._known[kind] += end - begin
        self._began, self.due = end, end + BLOCK


class NoTrack:
    """Replaces a TurnTrack if nothing is traced: its `due` is never reached."""

    due = NEVER

    def ready(self, began: int, now: int, counted: Sequence[int]) -> None: ...

    def cut(self, now: int, counted: Sequence[int]) -> int:
        return NEVER

    def taken(self, now: int, counted: Sequence[int]) -> None: ...

    def waited(self, kind: int, begin: int, end: int, counted: Sequence[int]) -> None: ...
