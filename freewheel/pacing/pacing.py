"""What every pacing has: decisions over a few named integers, which a wire stores where all its participants can reach them.

A pacing decides, a wire carries out. The integers (`cells`) are lists here and shared memory between processes; the code that
reads and writes them is the same. A wire calls one method at a time, under its lock, and then wakes the workers that the method
returns. Methods marked as hints may be called without the lock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

from freewheel.core import SeedStream

NO_VERSION = NO_TICKET = -1
KEEP = -2  # as the version of a grant: keep the weights already loaded
WAITS, CALLED = 1, 2  # of the cell `waiting`; called: it has been woken and has the next turn

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


@dataclass(kw_only=True)
class Pacing(ABC):
    """The decisions of one mode."""

    workers: int
    steps: int  # of a fragment at most
    ticket_columns: ClassVar[int] = 0  # numbers that tell which episodes were issued to a worker, where they are
    max_lag: int | None = None  # the bound on the lag that is kept by waiting; None: no bound
    own_episodes: ClassVar[bool] = True  # each lane plays its own, which a later run can bring back to where they were
    cells: Cells = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.attach({name: [0] * count for name, count in self.layout.items()})

    @property
    @abstractmethod
    def layout(self) -> dict[str, int]: ...  # number of integers of each cell; `posted` and `waiting` are always there

    def attach(self, cells: Cells) -> None:
        """Use these cells, which are zero, and set their first values."""
        self.cells = cells
        fill(cells, NO_VERSION, "posted")

    def state(self) -> dict[str, list[int]]:  # what a resumed run continues from; rows under way count as done
        return {}

    def restore(self, state: Mapping[str, Sequence[int]]) -> None:
        """After `attach`, before any worker acts."""

    # The learner's side. `done`: rows trained or dropped, of all that were produced.

    @abstractmethod
    def publish(self, version: int, done: int) -> Woken: ...  # a new version may be acted on

    def allow(self, done: int) -> Woken:  # more rows are done, under the same version
        return []

    def allows_more(self, done: int) -> bool:  # a hint: whether `allow` would change anything
        return False

    def announced(self) -> list[int]:
        """A hint: the version each worker acts on; NO_VERSION: none, or the learner does not wait for it."""
        return []

    def blocks(self, version: int | None) -> bool:  # whether a row of this version delays the next batch
        return False

    def in_turn(self) -> list[int]:
        """A hint: workers that have a turn, where only some act at a time."""
        return []

    @property
    def slots(self) -> int:  # a hint: fragments of a worker that may wait; 0: as many as there is room for
        return 0

    def revoke(self, worker: int, version: int, produced: int) -> tuple[bool, Woken]:
        """Stop waiting for a worker; True if it still acted on this version."""
        return False, []

    def drop_late(self, worker: int, rows: int) -> None:
        """Rows of a worker that the learner had stopped waiting for are dropped, and will be in `done`."""

    @abstractmethod
    def settle(self, worker: int, tally: Tally, *, for_good: bool) -> Woken: ...

    # A worker's side.

    @abstractmethod
    def take(self, worker: int, tally: Tally) -> tuple[Grant | None, Woken]: ...  # gives back the last grant

    def give_back(self, worker: int, tally: Tally) -> Woken:  # the fragment is queued, the next `take` may be late
        return []

    def streams(self, worker: int, locked: Locked) -> Sequence[SeedStream]:
        """The episodes that the worker plays; (): each lane plays its own."""
        return ()

    def closes(self, worker: int, version: int, *, ended: bool) -> bool:
        """A hint: after a step, close the fragment?"""
        return False

    @property
    def gated(self) -> bool:
        """A hint: those that wait do so for other workers. The learner waits for the rows of these, or they act."""
        return False


@dataclass(kw_only=True)
class CreditPacing(Pacing):
    """Workers reserve what they write and announce the version they act on; the sum of reservations has a limit.

    Where workers would only take the processor from each other, a few of them act at a time, in turn: a turn is a grant. One
    whose worker is late is lent to another (`lend`).
    """

    batch_rows: int  # S
    whole: int | None = None  # rows of all updates; None: not known
    version: int = NO_VERSION
    turns: int = 0  # workers that may act at a time, at first; 0: all of them
    first_steps: int = 0  # of a fragment, at first; 0: `steps`

    @property
    def layout(self) -> dict[str, int]:
        """turns, steps: as above, now; slots: fragments of a worker that may wait; next: the worker whose turn it is."""
        each = dict.fromkeys(("reserved", "announced", "revoked", "waiting", "lent"), self.workers)
        return {"limit": 1, "posted": 1, "gated": 1, "turns": 1, "steps": 1, "slots": 1, "next": 1, **each}

    def attach(self, cells: Cells) -> None:
        super().attach(cells)
        fill(cells, NO_VERSION, "announced")
        cells["turns"][0], cells["steps"][0] = self.turns, self.first_steps or self.steps

    @abstractmethod
    def _limit(self, done: int) -> int: ...

    def _at_most(self, rows: int) -> int:
        """This number of rows, or those that are left until the end of the run if these are fewer."""
        left = rows if self.whole is None else self.whole - max(self.version, 0) * self.batch_rows
        return rows if left < 0 else min(rows, left)

    @property
    @abstractmethod
    def _share(self) -> int: ...  # what a grant reserves

    def _ready(self, worker: int) -> bool:
        """Whether a worker that waits could act if there were credit."""
        return self.cells["posted"][0] != NO_VERSION

    def go_on(self) -> None:
        """No rows have come. If every worker waits for credit, the learner needs more rows than expected: lift the limit on the
        whole run."""
        if self.whole is not None and self.free <= 0 and set(self.announced()) == {NO_VERSION}:
            self.whole = None

    @property
    def slots(self) -> int:
        return self.cells["slots"][0]

    @property
    def free(self) -> int:
        """What is not reserved."""
        return self.cells["limit"][0] - sum(self.cells["reserved"])

    def publish(self, version: int, done: int) -> Woken:
        self.version = version
        self.cells["posted"][0] = version
        return self.allow(done)

    def allow(self, done: int) -> Woken:
        self.cells["limit"][0] = self._limit(done)
        return self.call()

    def allows_more(self, done: int) -> bool:
        return self.version != NO_VERSION and self._limit(done) > self.cells["limit"][0]

    def call(self) -> Woken:
        """Wake workers that wait, one after the other, as many as may act and what is free is enough for: others would wake in
        vain, and a hundred of them take the processor away from those that work."""
        cells, waiting, woken = self.cells, self.cells["waiting"], list[int]()
        if WAITS not in list(waiting):
            return woken
        count, turns, first = -(-self.free // self._share), cells["turns"][0], cells["next"][0]
        count = min(count, turns - self._acting()) if turns else count
        for place in range(first, first + self.workers if count > 0 else first):
            worker = place % self.workers
            if waiting[worker] == WAITS and self._ready(worker):
                waiting[worker] = CALLED if turns else 0
                woken.append(worker)
                if len(woken) == count:
                    break
        if woken:
            cells["next"][0] = (woken[-1] + 1) % self.workers
        return woken

    def _has_turn(self, worker: int) -> bool:
        cells = self.cells
        acts = cells["announced"][worker] != NO_VERSION and not cells["revoked"][worker] and not cells["lent"][worker]
        return acts or cells["waiting"][worker] == CALLED

    def _acting(self) -> int:
        return sum(map(self._has_turn, range(self.workers)))

    def in_turn(self) -> list[int]:
        return [worker for worker in range(self.workers) if self._has_turn(worker)] if self.cells["turns"][0] else []

    def _must_wait(self, worker: int) -> tuple[bool, Woken]:
        """Whether it is not this worker's turn: those that wait come first. Call it before credit is taken."""
        cells = self.cells
        called, cells["waiting"][worker] = cells["waiting"][worker] == CALLED, 0
        if called or not cells["turns"][0]:
            return False, []
        woken = self.call()
        return self._acting() >= cells["turns"][0], woken

    def lend(self, worker: int) -> Woken:
        """This worker has had its turn for too long: another one may act beside it."""
        cells = self.cells
        if cells["waiting"][worker] == CALLED:
            cells["waiting"][worker] = WAITS
        elif cells["announced"][worker] != NO_VERSION:
            cells["lent"][worker] = 1
        return self.call()

    def set_turns(self, turns: int) -> Woken:
        """From now on so many workers act at a time; 0: all of them."""
        self.cells["turns"][0] = 0 if turns >= self.workers else turns
        return self.call()

    def _stop_acting(self, worker: int) -> None:
        self.cells["announced"][worker] = NO_VERSION
        self.cells["revoked"][worker] = self.cells["lent"][worker] = 0

    def announced(self) -> list[int]:
        """Read without the lock: announcements first, so that a revoked one cannot hide the next one."""
        announced, revoked = list(self.cells["announced"]), self.cells["revoked"]
        return [NO_VERSION if gone else version for version, gone in zip(announced, revoked, strict=True)]

    def blocks(self, version: int | None) -> bool:
        return version is not None and self.max_lag is not None and version <= self.version - self.max_lag

    def revoke(self, worker: int, version: int, produced: int) -> tuple[bool, Woken]:
        """Its turn, too, is for others."""
        if version == NO_VERSION or self.cells["announced"][worker] != version:
            return False, []
        self.cells["revoked"][worker] = 1
        return True, self.call()

    @property
    def gated(self) -> bool:
        return self.cells["gated"][0] > 0 or (self.cells["turns"][0] > 0 and self.free > 0)


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
