"""The base of all pacings: decisions on a few named integers, stored by a wire where all its participants reach them.

A pacing makes decisions, and a wire carries them out. The integers (`cells`) are lists here and shared memory between
processes; the same code reads and writes both. A wire calls one method at a time, under its lock, and then wakes the
workers that the method returns. Methods marked as hints may be called without the lock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

from freewheel.core import SeedStream

NO_VERSION = NO_TICKET = -1
KEEP = -2  # as the version of a grant: keep the weights already loaded
WAITS, CALLED = 1, 2  # values of the cell `waiting`; CALLED: the worker has been woken and has the next turn

Woken = list[int]  # workers that waited and should try again


class Cell(Protocol):
    """Integers by index: a list, or a memoryview of shared memory."""

    def __getitem__(self, index: int) -> int: ...
    def __setitem__(self, index: int, value: int) -> None: ...
    def __iter__(self) -> Iterator[int]: ...
    def __len__(self) -> int: ...


Cells = Mapping[str, Cell]
Locked = Callable[..., Any]  # (decide, *arguments): calls `decide` under the lock


class Grant(NamedTuple):
    """Permission to act."""

    steps: int
    version: int  # this one or a newer one; or KEEP
    exact: bool = False  # this version and no newer one


class Tally(NamedTuple):
    """The progress of a worker over all its incarnations."""

    produced: int  # rows
    failed: int  # of these, lost to environment failures
    ended: bool  # the last row ended an episode or cut it short; False while a new fragment is still empty


@dataclass(kw_only=True)
class Pacing(ABC):
    """The decisions of one mode."""

    workers: int
    steps: int  # the most that a fragment can have
    ticket_columns: ClassVar[int] = 0  # numbers that name the episodes issued to a worker; 0: none are issued
    max_lag: int | None = None  # bound on the lag, kept by waiting; None: no bound
    own_episodes: ClassVar[bool] = True  # each lane plays its own episodes, and a resumed run can restore them
    cells: Cells = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.attach({name: [0] * count for name, count in self.layout.items()})

    @property
    @abstractmethod
    def layout(self) -> dict[str, int]: ...  # number of integers of each cell; `posted` and `waiting` are always there

    def attach(self, cells: Cells) -> None:
        """Use these cells, which are zero, and set their initial values."""
        self.cells = cells
        fill(cells, NO_VERSION, "posted")

    def state(self) -> dict[str, list[int]]:  # what a resumed run continues from; rows under way count as done
        return {}

    def restore(self, state: Mapping[str, Sequence[int]]) -> None:
        """Restore a saved state. Call it after `attach` and before any worker acts."""

    # The learner's side. `done`: rows trained or dropped, of all that were produced.

    @abstractmethod
    def publish(self, version: int, done: int) -> Woken: ...  # a new version may be acted on

    def allow(self, done: int) -> Woken:  # more rows are done, under the same version
        return []

    def allows_more(self, done: int) -> bool:  # a hint: whether `allow` would change anything
        return False

    def announced(self) -> list[int]:
        """A hint: the version each worker acts on; NO_VERSION: none, or the learner does not wait for the worker."""
        return []

    def blocks(self, version: int | None) -> bool:  # whether a row of this version delays the next batch
        return False

    def in_turn(self) -> list[int]:
        """A hint: the workers that have a turn, if only some may act at a time."""
        return []

    @property
    def slots(self) -> int:  # a hint: fragments of a worker that may wait; 0: as many as there is room for
        return 0

    def revoke(self, worker: int, version: int, produced: int) -> tuple[bool, Woken]:
        """Stop waiting for a worker; returns True if the worker still acted on this version."""
        return False, []

    def drop_late(self, worker: int, rows: int) -> None:
        """Note dropped rows, which will count in `done`, of a worker that the learner had stopped waiting for."""

    @abstractmethod
    def settle(self, worker: int, tally: Tally, *, for_good: bool) -> Woken: ...

    # A worker's side.

    @abstractmethod
    def take(self, worker: int, tally: Tally) -> tuple[Grant | None, Woken]: ...  # gives back the last grant

    def give_back(self, worker: int, tally: Tally) -> Woken:  # the fragment is queued; the next `take` may come late
        return []

    def streams(self, worker: int, locked: Locked) -> Sequence[SeedStream]:
        """The episodes that the worker plays; (): each lane plays its own."""
        return ()

    def closes(self, worker: int, version: int, *, ended: bool) -> bool:
        """A hint: whether to close the fragment after a step."""
        return False

    @property
    def gated(self) -> bool:
        """A hint: waiting workers wait for other workers, which act or whose rows the learner waits for."""
        return False


@dataclass(kw_only=True)
class CreditPacing(Pacing):
    """Workers reserve what they write and announce the version they act on; the sum of reservations has a limit.

    If workers would only compete for the processor, a few of them act at a time, in turn. A turn lasts for one grant.
    The turn of a late worker is lent to another one (`lend`).
    """

    batch_rows: int  # S
    whole: int | None = None  # rows of all updates; None: not known
    version: int = NO_VERSION
    turns: int = 0  # initial number of workers that may act at a time; 0: all of them
    first_steps: int = 0  # initial steps of a fragment; 0: `steps`

    @property
    def layout(self) -> dict[str, int]:
        """turns, steps: current values; slots: fragments of a worker that may wait; next: the worker to call next."""
        each = dict.fromkeys(("reserved", "announced", "revoked", "waiting", "lent"), self.workers)
        return {"limit": 1, "posted": 1, "gated": 1, "turns": 1, "steps": 1, "slots": 1, "next": 1, **each}

    def attach(self, cells: Cells) -> None:
        super().attach(cells)
        fill(cells, NO_VERSION, "announced")
        cells["turns"][0], cells["steps"][0] = self.turns, self.first_steps or self.steps

    @abstractmethod
    def _limit(self, done: int) -> int: ...

    def _at_most(self, rows: int) -> int:
        """Return the smaller of `rows` and the rows left in the run, or `rows` if the run is past its planned end."""
        left = rows if self.whole is None else self.whole - max(self.version, 0) * self.batch_rows
        return rows if left < 0 else min(rows, left)

    @property
    @abstractmethod
    def _share(self) -> int: ...  # what a grant reserves

    def _ready(self, worker: int) -> bool:
        """Return whether a waiting worker could act if there were credit."""
        return self.cells["posted"][0] != NO_VERSION

    def go_on(self) -> None:
        """Handle a time without new rows. If every worker waits for credit, the learner needs more rows than expected:
        lift the limit on the whole run."""
        if self.whole is not None and self.free <= 0 and set(self.announced()) == {NO_VERSION}:
            self.whole = None

    @property
    def slots(self) -> int:
        return self.cells["slots"][0]

    @property
    def free(self) -> int:
        """The unreserved part of the limit."""
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
        """Wake waiting workers in turn, but only as many as may act and have enough free credit: a hundred useless
        wake-ups would take the processor from the working ones."""
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
        """Return whether the worker must wait for a turn; waiting workers go first. Call it before taking credit."""
        cells = self.cells
        called, cells["waiting"][worker] = cells["waiting"][worker] == CALLED, 0
        if called or not cells["turns"][0]:
            return False, []
        woken = self.call()
        return self._acting() >= cells["turns"][0], woken

    def lend(self, worker: int) -> Woken:
        """Let another worker act as well, because this worker has had its turn for too long."""
        cells = self.cells
        if cells["waiting"][worker] == CALLED:
            cells["waiting"][worker] = WAITS
        elif cells["announced"][worker] != NO_VERSION:
            cells["lent"][worker] = 1
        return self.call()

    def set_turns(self, turns: int) -> Woken:
        """Set how many workers may act at a time; 0: all of them."""
        self.cells["turns"][0] = 0 if turns >= self.workers else turns
        return self.call()

    def _stop_acting(self, worker: int) -> None:
        self.cells["announced"][worker] = NO_VERSION
        self.cells["revoked"][worker] = self.cells["lent"][worker] = 0

    def announced(self) -> list[int]:
        """Read without the lock: announcements first, so that an old revocation cannot hide a new announcement."""
        announced, revoked = list(self.cells["announced"]), self.cells["revoked"]
        return [NO_VERSION if gone else version for version, gone in zip(announced, revoked, strict=True)]

    def blocks(self, version: int | None) -> bool:
        return version is not None and self.max_lag is not None and version <= self.version - self.max_lag

    def revoke(self, worker: int, version: int, produced: int) -> tuple[bool, Woken]:
        """Also pass the worker's turn to others."""
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
    """Return all waiting workers, and mark them as not waiting."""
    waiting = cells["waiting"]
    woken = [worker for worker, waits in enumerate(waiting) if waits]
    for worker in woken:
        waiting[worker] = 0
    return woken
