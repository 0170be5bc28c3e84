"""What every pacing is: decisions over a few named integers, which a wire keeps where all who take part can reach them.

A pacing decides, a wire carries out. The integers (`cells`) are lists here and shared memory between processes; the code that
reads and writes them is the same. A wire calls one method at a time (it has a lock), except those marked as hints, and wakes the
workers that a method returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from freewheel.core import SeedStream

NOBODY = NONE = -1  # no version, no episode
KEEP = -2  # as the version of a grant: no other weights than those already loaded

Woken = list[int]  # workers that waited and may look again


class Cell(Protocol):
    """Integers by index: a list, or a memoryview of shared memory."""

    def __getitem__(self, index: int) -> int: ...
    def __setitem__(self, index: int, value: int) -> None: ...
    def __iter__(self) -> Iterator[int]: ...
    def __len__(self) -> int: ...


Cells = Mapping[str, Cell]
Locked = Callable[..., Any]  # (decide, *arguments): calls it while nobody else decides


class Grant(NamedTuple):
    """Permission to act."""

    steps: int
    version: int  # at least; or KEEP
    exact: bool = False  # this version and no newer


class Tally(NamedTuple):
    """How far a worker has come, over all its incarnations."""

    produced: int  # rows
    failed: int  # of these, taken by env failures
    ended: bool  # the last row ended an episode, or cut it short; False where a fragment was begun and is still empty


class Pacing(Protocol):
    """The decisions of one mode."""

    max_lag: int | None  # the bound on the lag that is held by waiting; None: there is none
    cells: Cells

    @property
    def layout(self) -> dict[str, int]: ...  # the cells: name and how many integers
    def attach(
        self, cells: Cells
    ) -> None: ...  # keep the integers there; they are zero, and are given their first values
    def state(self) -> dict[str, list[int]]: ...  # what a later run goes on from; nobody acts then
    def restore(self, state: Mapping[str, Sequence[int]]) -> None: ...  # after `attach`, before anybody acts

    # The learner's side. `done`: rows trained or dropped, of all that were produced.
    def publish(self, version: int, done: int) -> Woken: ...  # a new version may be acted on
    def allow(self, done: int) -> Woken: ...  # more rows are done, under the same version
    def allows_more(self, done: int) -> bool: ...  # a hint: whether `allow` would change anything
    def announced(self) -> list[int]: ...  # the version each worker acts on; NOBODY: none that is waited for. A hint
    def blocks(
        self, version: int | None
    ) -> bool: ...  # whether a row of this version keeps the next batch from being sealed
    def revoke(
        self, worker: int, version: int, produced: int
    ) -> tuple[bool, Woken]: ...  # do not wait for it: was it there?
    def settle(
        self, worker: int, tally: Tally, *, for_good: bool
    ) -> Woken: ...  # it died; for_good: it is not replaced

    # A worker's side.
    def take(self, worker: int, tally: Tally) -> tuple[Grant | None, Woken]: ...  # gives back what it had; None: wait
    def give_back(self, worker: int, tally: Tally) -> Woken: ...  # its fragment is queued, and it may not take soon
    def streams(
        self, worker: int, locked: Locked
    ) -> Sequence[SeedStream]: ...  # episodes that it plays; (): its lanes' own
    def closes(
        self, worker: int, version: int, *, ended: bool
    ) -> bool: ...  # after each step: close the fragment? A hint
    @property
    def gated(
        self,
    ) -> bool: ...  # the learner waits for rows under way: the reason why nobody is granted anything. A hint


def blank(layout: Mapping[str, int]) -> dict[str, list[int]]:
    """Cells in plain lists."""
    return {name: [0] * count for name, count in layout.items()}


def fill(cells: Cells, value: int, *names: str) -> None:
    for name in names:
        for index in range(len(cells[name])):
            cells[name][index] = value


def wake_all(cells: Cells) -> Woken:
    """Everyone who waits, each once."""
    waiting = cells["waiting"]
    woken = [worker for worker, waits in enumerate(waiting) if waits]
    for worker in woken:
        waiting[worker] = 0
    return woken


def acting(cells: Cells) -> list[int]:
    """By worker, the version it acts on and is waited for with.

    A hint, read without a lock: announcements first, so that one that was revoked cannot hide the next one.
    """
    announced = list(cells["announced"])
    return [NOBODY if revoked else version for version, revoked in zip(announced, cells["revoked"], strict=True)]
