"""What every pacing has: decisions over a few named integers, which a wire stores where all its participants can reach them.

A pacing decides, a wire carries out. The integers (`cells`) are lists here and shared memory between processes; the code that
reads and writes them is the same. A wire calls one method at a time, under its lock, and then wakes the workers that the method
returns. Methods marked as hints may be called without the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from freewheel.core import SeedStream

NO_VERSION = NO_TICKET = -1
KEEP = -2  # as the version of a grant: keep the weights already loaded

Woken = list[int]  # workers that waited and should try again


class Cell(Protocol):
    """Integers by index: a list, or a memoryview of shared memory."""

    def __getitem__(self, index: int) -> int: ...
    def __setitem__(self, index: int, value: int) -> None: ...
    def __iter__(self) -> Iterator[int]: ...
    def __len__(self) -> int: ...


Cells = Mapping[str, Cell]
Locked = Callable[..., Any]  # (decide, *arguments): calls it under the lock


class Grant(NamedTuple):
    """Permission to act."""

    steps: int
    version: int  # at least; or KEEP
    exact: bool = False  # this version and no newer


class Tally(NamedTuple):
    """The progress of a worker over all its incarnations."""

    produced: int  # rows
    failed: int  # of these, lost to environment failures
    ended: bool  # the last row ended an episode, or cut it short; False where a fragment was begun and is still empty


class Pacing(Protocol):
    """The decisions of one mode."""

    max_lag: int | None  # the bound on the lag that is kept by waiting; None: no bound
    cells: Cells

    @property
    def layout(self) -> dict[str, int]: ...  # name and number of integers of each cell
    def attach(self, cells: Cells) -> None: ...  # use these cells, which are zero, and set their first values
    def state(self) -> dict[str, list[int]]: ...  # what a resumed run continues from; no worker acts at that time
    def restore(self, state: Mapping[str, Sequence[int]]) -> None: ...  # after `attach`, before any worker acts

    # The learner's side. `done`: rows trained or dropped, of all that were produced.
    def publish(self, version: int, done: int) -> Woken: ...  # a new version may be acted on
    def allow(self, done: int) -> Woken: ...  # more rows are done, under the same version
    def allows_more(self, done: int) -> bool: ...  # a hint: whether `allow` would change anything
    # A hint: the version each worker acts on; NO_VERSION: none, or the learner does not wait for it.
    def announced(self) -> list[int]: ...
    def blocks(self, version: int | None) -> bool: ...  # whether a row of this version delays the next batch
    # Stop waiting for a worker; True if it still acted on this version.
    def revoke(self, worker: int, version: int, produced: int) -> tuple[bool, Woken]: ...
    # The worker died; for_good: it is not replaced.
    def settle(self, worker: int, tally: Tally, *, for_good: bool) -> Woken: ...

    # A worker's side.
    # Gives back the last grant; None: wait
    def take(self, worker: int, tally: Tally) -> tuple[Grant | None, Woken]: ...
    def give_back(self, worker: int, tally: Tally) -> Woken: ...  # the fragment is queued, the next `take` may be late
    # The episodes that the worker plays; (): each lane plays its own.
    def streams(self, worker: int, locked: Locked) -> Sequence[SeedStream]: ...
    # A hint: after a step, close the fragment?
    def closes(self, worker: int, version: int, *, ended: bool) -> bool: ...
    @property
    def gated(self) -> bool: ...  # a hint: the learner waits for rows under way, therefore there are no grants


def blank(layout: Mapping[str, int]) -> dict[str, list[int]]:
    """Cells in plain lists."""
    return {name: [0] * count for name, count in layout.items()}


def fill(cells: Cells, value: int, *names: str) -> None:
    for name in names:
        for index in range(len(cells[name])):
            cells[name][index] = value


def wake_all(cells: Cells) -> Woken:
    """All waiting workers; marks them as not waiting."""
    waiting = cells["waiting"]
    woken = [worker for worker, waits in enumerate(waiting) if waits]
    for worker in woken:
        waiting[worker] = 0
    return woken


def acting(cells: Cells) -> list[int]:
    """The version each worker acts on, NO_VERSION if the learner does not wait for it.

    A hint, read without the lock: announcements first, so that a revoked one cannot hide the next one.
    """
    announced = list(cells["announced"])
    return [NO_VERSION if revoked else version for version, revoked in zip(announced, cells["revoked"], strict=True)]
