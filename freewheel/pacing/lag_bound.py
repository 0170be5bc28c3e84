"""Continuous collection: credits bound the rows under way, and thereby the lag, without discarding rows.

    free = limit - reserved,    limit = (ahead + 1) × S + rows trained + rows dropped

A worker reserves rows and announces its version in one step. The learner posts a version and reads announcements under
the same lock, so it cannot miss a worker that is about to act on an old version. Credits do not bound the age of a row:
a slow worker may keep a version forever. So batches take the oldest version first, a fragment closes if newer weights
are posted, and update v begins only if nothing of version v - max_lag or older is under way (`blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass

from freewheel.pacing.pacing import NO_VERSION, WAITS, CreditPacing, Grant, Tally, Woken

LAST = 4  # least number of fragments per worker in the last batch of a run


@dataclass(kw_only=True)
class LagBound(CreditPacing):
    """A written row stays reserved forever; training or dropping it raises the limit instead."""

    lanes: int  # of each worker: rows of one step
    ahead: int  # batches of rows that may be under way besides the one in training
    close_on_new: bool = True  # a fragment closes as soon as newer weights are posted
    whole_fragments: bool = False  # grants are no shorter than a fragment; the last may overdraw by more than a step

    @property
    def layout(self) -> dict[str, int]:
        """late: rows of each worker with a revoked grant that were dropped before the worker has counted them; last: 1
        if workers act for the last batch, in which nobody may delay the learner for long."""
        return {**super().layout, "late": self.workers, "last": 1}

    def _limit(self, done: int) -> int:
        return self._at_most((self.ahead + 1) * self.batch_rows) + done - sum(self.cells["late"])

    def publish(self, version: int, done: int) -> Woken:
        self.version = version
        self.cells["last"][0] = self._at_most(self.batch_rows + 1) <= self.batch_rows and not self.whole_fragments
        return super().publish(version, done)

    @property
    def _share(self) -> int:
        return self.cells["steps"][0] * self.lanes

    def revoke(self, worker: int, version: int, produced: int) -> tuple[bool, Woken]:
        """Also let others write the rest of the worker's reservation."""
        if self.cells["announced"][worker] == version != NO_VERSION:
            self.cells["reserved"][worker] = produced
        return super().revoke(worker, version, produced)

    def drop_late(self, worker: int, rows: int) -> None:
        """Withhold the credit of these rows until the worker gives back its grant: they are not reserved until then."""
        if self.cells["revoked"][worker]:
            self.cells["late"][worker] += rows

    def settle(self, worker: int, tally: Tally, *, for_good: bool) -> Woken:
        """Free the rows that the worker reserved but did not produce."""
        self._release(worker, tally)
        self.cells["waiting"][worker] = 0
        return self.call()

    def take(self, worker: int, tally: Tally) -> tuple[Grant | None, Woken]:
        """Grant whole steps of all lanes. The last grant may exceed the limit, or a remainder would block everyone."""
        cells, lanes, most = self.cells, self.lanes, self.cells["steps"][0]
        if cells["last"][0]:
            most = max(1, min(most, self.batch_rows // (LAST * lanes * self.workers)))
        unused = self._release(worker, tally)
        wait, woken = self._must_wait(worker)
        free, version = self.free, cells["posted"][0]
        if wait or free <= 0 or version == NO_VERSION:
            cells["waiting"][worker] = WAITS
            return None, woken
        steps = most if self.whole_fragments else min(most, max(1, free // lanes))
        cells["announced"][worker] = version
        cells["reserved"][worker] = tally.produced + steps * lanes
        return Grant(steps, version), [*woken, *self.call()] if unused > steps * lanes else woken

    def give_back(self, worker: int, tally: Tally) -> Woken:
        freed = self._release(worker, tally) > 0
        return self.call() if freed or self.cells["turns"][0] else []

    def _release(self, worker: int, tally: Tally) -> int:
        """End the worker's grant; returns the number of rows freed."""
        cells = self.cells
        unused = cells["reserved"][worker] - tally.produced
        cells["reserved"][worker] = tally.produced
        cells["late"][worker] = 0
        self._stop_acting(worker)
        return unused

    def closes(self, worker: int, version: int, *, ended: bool) -> bool:
        cells = self.cells
        return (self.close_on_new and cells["posted"][0] > version) or cells["revoked"][worker] > 0
