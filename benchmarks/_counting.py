"""A learner that computes nothing: what a collector can do when nobody competes with it for the cores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from freewheel.core import Array, Chunk, Learner, Metrics, RowCounts, Snapshot


class Counting(Learner):
    """Takes S rows an update, oldest version first, and publishes the same weights again."""

    def __init__(self, weights: Snapshot, rows: int, max_lag: int | None) -> None:
        self.version = 0
        self._weights, self._rows, self._max_lag = weights, rows, max_lag
        self._held: Counter[int] = Counter()  # rows by version
        self._trained = self._stale = 0

    @property
    def ready(self) -> bool:
        return self._held.total() >= self._rows

    @property
    def hungry(self) -> bool:
        return not self.ready

    @property
    def buffer_util(self) -> float:
        return min(1.0, self._held.total() / self._rows)

    def observe(self, chunk: Chunk[Any]) -> None:
        self._held[chunk.version] += chunk.rows
        self._expire()

    def update(self) -> Metrics:
        oldest, missing, late = min(self._held), self._rows, 0
        while missing:
            version = min(self._held)
            taken = min(missing, self._held[version])
            self._held[version] -= taken
            if not self._held[version]:
                del self._held[version]
            missing, late = missing - taken, late + taken * (self.version - version)
        metrics = {"lag_max": float(self.version - oldest), "lag_mean": late / self._rows}
        self._trained += self._rows
        self.version += 1
        self._expire()
        return metrics

    def snapshot(self) -> Snapshot:
        return replace(self._weights, version=self.version)

    def rows(self) -> RowCounts:
        return RowCounts(
            trained=self._trained, queued=self._held.total(), dropped={"stale": self._stale} if self._stale else {}
        )

    def state_dict(self) -> dict[str, Array]:
        return {}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Nothing was learned."""

    def _expire(self) -> None:
        if self._max_lag is not None:
            for version in [version for version in self._held if version < self.version - self._max_lag]:
                self._stale += self._held.pop(version)
