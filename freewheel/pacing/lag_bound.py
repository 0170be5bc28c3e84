"""Continuous collection: credits bound the rows under way, and thereby the lag, without discarding rows.

    free = limit - reserved,    limit = (ahead + 1) × S + rows trained + rows dropped

A worker reserves rows and announces its version in one operation. The learner posts a version and reads the announcements
under the same lock, so it cannot miss a worker that is about to act on an old version. Credits alone do not bound the age of a
row, because a slow worker may keep an old version forever. Therefore batches take the oldest version first, a fragment closes
when newer weights are posted, and update v begins only when nothing of version v - max_lag or older is under way (`blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass

from freewheel.pacing.pacing import NO_VERSION, CreditPacing, Grant, Tally, Woken, wake_all


@dataclass(kw_only=True)
class LagBound(CreditPacing):
    """A written row stays reserved forever; training or dropping it raises the limit instead."""

    lanes: int  # of each worker: rows of one step
    ahead: int  # batches of rows that may be under way beside the one in training
    close_on_new: bool = True  # a fragment closes as soon as newer weights are posted
    whole_fragments: bool = (
        False  # grants are never shorter than a fragment; the last one may overdraw by more than a step
    )

    def _limit(self, done: int) -> int:
        return (self.ahead + 1) * self.batch_rows + done

    def revoke(self, worker: int, version: int, produced: int) -> tuple[bool, Woken]:
        """Others may write the rest of its reservation."""
        held, _ = super().revoke(worker, version, produced)
        if held:
            self.cells["reserved"][worker] = produced
        return held, wake_all(self.cells) if held else []

    def settle(self, worker: int, tally: Tally, *, for_good: bool) -> Woken:
        """Free the rows that it had reserved and not produced."""
        self._release(worker, tally)
        self.cells["waiting"][worker] = 0
        return wake_all(self.cells)

    def take(self, worker: int, tally: Tally) -> tuple[Grant | None, Woken]:
        """Grants are whole steps of all lanes; the last grant may exceed the limit, or a remainder would block all workers."""
        cells, lanes = self.cells, self.lanes
        unused = self._release(worker, tally)
        free = cells["limit"][0] - sum(cells["reserved"])
        version = cells["posted"][0]
        if free <= 0 or version == NO_VERSION:
            cells["waiting"][worker] = 1
            return None, []
        steps = self.steps if self.whole_fragments else min(self.steps, max(1, free // lanes))
        cells["announced"][worker] = version
        cells["reserved"][worker] = tally.produced + steps * lanes
        cells["waiting"][worker] = 0
        return Grant(steps, version), wake_all(cells) if unused > steps * lanes else []

    def give_back(self, worker: int, tally: Tally) -> Woken:
        return wake_all(self.cells) if self._release(worker, tally) > 0 else []

    def _release(self, worker: int, tally: Tally) -> int:
        """End the worker's grant; returns the number of rows freed."""
        cells = self.cells
        unused = cells["reserved"][worker] - tally.produced
        cells["reserved"][worker] = tally.produced
        cells["announced"][worker] = NO_VERSION
        cells["revoked"][worker] = 0
        return unused

    def closes(self, worker: int, version: int, *, ended: bool) -> bool:
        cells = self.cells
        return (self.close_on_new and cells["posted"][0] > version) or cells["revoked"][worker] > 0
