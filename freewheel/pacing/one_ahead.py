"""Batch collection: batch k + 1 is collected while batch k is learned from; batch k uses exactly version k - 1.

A worker that has finished its share of batch k - 1 continues when version k - 1 is published, independently of others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from freewheel.pacing.pacing import NO_VERSION, Grant, Pacing, Tally, Woken, wake_all


@dataclass(kw_only=True)
class OneAhead(Pacing):
    """The learner never waits for old versions, because batches are delivered whole and in order."""

    lanes: int  # of each worker
    batch_steps: int  # of each lane
    last: int | None = None  # batches of the run; None: not known
    delivered: int = 0  # batches delivered to the learner, including those of the run that this one continues

    @property
    def quota(self) -> int:
        """Rows of each worker in a batch."""
        return self.batch_steps * self.lanes

    @property
    def layout(self) -> dict[str, int]:
        """target: rows that each worker may write in total; gone: 1 for a worker that is not replaced; before: batches
        of the run that this one continues."""
        return {"posted": 1, "before": 1, "target": self.workers, "waiting": self.workers, "gone": self.workers}

    def state(self) -> dict[str, list[int]]:
        """Return the number of delivered batches; if versions are no longer exact, the newest version stands for it."""
        return {"batches": [max(0, self.cells["posted"][0]) if self.broken else self.delivered]}

    def restore(self, state: Mapping[str, Sequence[int]]) -> None:
        self.cells["before"][0] = self.delivered = state["batches"][0]

    @property
    def broken(self) -> bool:
        """Return whether a worker was not replaced: then others produce its rows, and versions are no longer exact."""
        return any(self.cells["gone"])

    def publish(self, version: int, done: int) -> Woken:
        self.cells["posted"][0] = version
        return self._share_out()

    def settle(self, worker: int, tally: Tally, *, for_good: bool) -> Woken:
        self.cells["waiting"][worker] = 0
        if not for_good:
            return []
        self.cells["gone"][worker] = 1
        self.cells["target"][worker] = tally.produced - tally.failed
        return self._share_out()

    def _share_out(self) -> Woken:
        """Distribute all batches up to one after the newest version over the remaining workers."""
        target = self.cells["target"]
        here = [worker for worker, gone in enumerate(self.cells["gone"]) if not gone]
        needed = self.cells["posted"][0] + 1
        batches = min(needed + 1, max(needed, self.last or needed + 1)) - self.cells["before"][0]
        steps = -(-(batches * self.quota * self.workers - sum(target)) // self.lanes)
        share, extra = divmod(steps, max(1, len(here)))
        for place, worker in enumerate(here):
            target[worker] += self.lanes * (share + (place < extra))
        return wake_all(self.cells)

    def take(self, worker: int, tally: Tally) -> tuple[Grant | None, Woken]:
        cells, rows = self.cells, tally.produced - tally.failed
        if rows >= cells["target"][worker] or cells["posted"][0] == NO_VERSION:
            cells["waiting"][worker] = 1
            return None, []
        cells["waiting"][worker] = 0
        if self.broken:
            return Grant(self._fit(cells["target"][worker] - rows), cells["posted"][0]), []
        batch = rows // self.quota
        steps = self._fit((batch + 1) * self.quota - rows)
        return Grant(steps, max(cells["before"][0] + batch - 1, 0), exact=True), []

    def _fit(self, rows: int) -> int:
        return min(self.steps, -(-rows // self.lanes))
