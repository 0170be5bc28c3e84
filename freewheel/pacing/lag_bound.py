"""Continuous collection: rows under way are bounded by credits, and with them the lag, by pacing and not by discarding.

    free = limit - reserved,    limit = (ahead + 1) × S + rows trained + rows dropped

A worker reserves rows and announces its version in one operation. The learner posts a version and looks at the announcements
under the same lock, so it cannot overlook a worker that is about to act on an old version. Credits alone do not bound the age of
a row, because a slow worker may keep an old version for ever. So batches are sealed oldest version first, fragments close when
newer weights are there, and update v is sealed only when nothing of version v - max_lag or older is under way (`blocks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from freewheel.core import SeedStream
from freewheel.pacing.pacing import NOBODY, Cells, Grant, Locked, Tally, Woken, acting, blank, fill, wake_all


@dataclass(kw_only=True)
class LagBound:
    """Implements Pacing. A row that was written stays reserved for ever, so whatever is trained or dropped raises the limit."""

    workers: int
    lanes: int  # of each worker: a step is so many rows
    steps: int  # of a fragment at most
    batch_rows: int  # S
    ahead: int  # updates' worth of rows that may be under way beside the one in training
    max_lag: int | None
    close_on_new: bool = True  # fragments are closed as soon as newer weights are there
    version: int = NOBODY
    cells: Cells = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.attach(blank(self.layout))

    @property
    def layout(self) -> dict[str, int]:
        each = dict.fromkeys(("reserved", "announced", "revoked", "waiting"), self.workers)
        return {"limit": 1, "posted": 1, "gated": 1, **each}

    def attach(self, cells: Cells) -> None:
        self.cells = cells
        fill(cells, NOBODY, "posted", "announced")

    def state(self) -> dict[str, list[int]]:
        return {}

    def restore(self, state: Mapping[str, Sequence[int]]) -> None:
        """Nothing: rows under way when the state was saved are counted as done."""

    # ------------------------------------------------------------------------------------------------------- the learner's

    def publish(self, version: int, done: int) -> Woken:
        self.version = version
        self.cells["posted"][0] = version
        return self.allow(done)

    def allow(self, done: int) -> Woken:
        self.cells["limit"][0] = self._limit(done)
        return wake_all(self.cells)

    def allows_more(self, done: int) -> bool:
        return self._limit(done) > self.cells["limit"][0]

    def _limit(self, done: int) -> int:
        return (self.ahead + 1) * self.batch_rows + done

    def announced(self) -> list[int]:
        return acting(self.cells)

    def blocks(self, version: int | None) -> bool:
        return version is not None and self.max_lag is not None and version <= self.version - self.max_lag

    def revoke(self, worker: int, version: int, produced: int) -> tuple[bool, Woken]:
        """Others may write what it had reserved. False: it was not at this version any more."""
        if version == NOBODY or self.cells["announced"][worker] != version:
            return False, []
        self.cells["reserved"][worker] = produced
        self.cells["revoked"][worker] = 1
        return True, wake_all(self.cells)

    def settle(self, worker: int, tally: Tally, *, for_good: bool) -> Woken:
        """What it had reserved beyond its produced rows is free again."""
        self._release(worker, tally)
        self.cells["waiting"][worker] = 0
        return wake_all(self.cells)

    # --------------------------------------------------------------------------------------------------------- a worker's

    def take(self, worker: int, tally: Tally) -> tuple[Grant | None, Woken]:
        """Rows come by steps of all lanes; the last grant may overdraw, or an odd remainder would stop everyone."""
        cells, lanes = self.cells, self.lanes
        unused = self._release(worker, tally)
        free = cells["limit"][0] - sum(cells["reserved"])
        version = cells["posted"][0]
        if free <= 0 or version == NOBODY:
            cells["waiting"][worker] = 1
            return None, []
        steps = min(self.steps, max(1, free // lanes))
        cells["announced"][worker] = version
        cells["reserved"][worker] = tally.produced + steps * lanes
        cells["waiting"][worker] = 0
        return Grant(steps, version), wake_all(cells) if unused > steps * lanes else []

    def give_back(self, worker: int, tally: Tally) -> Woken:
        return wake_all(self.cells) if self._release(worker, tally) > 0 else []

    def _release(self, worker: int, tally: Tally) -> int:
        """It acts no more; the rows that come free."""
        cells = self.cells
        unused = cells["reserved"][worker] - tally.produced
        cells["reserved"][worker] = tally.produced
        cells["announced"][worker] = NOBODY
        cells["revoked"][worker] = 0
        return unused

    def streams(self, worker: int, locked: Locked) -> Sequence[SeedStream]:
        return ()

    def closes(self, worker: int, version: int, *, ended: bool) -> bool:
        cells = self.cells
        return (self.close_on_new and cells["posted"][0] > version) or cells["revoked"][worker] > 0

    @property
    def gated(self) -> bool:
        return self.cells["gated"][0] > 0
