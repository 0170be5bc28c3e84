"""The steps that an update still needs, in modes that alternate steps and updates and whose environments may fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from freewheel.core import Array, Chunk


class Quota:
    """The steps and rows that the current update still needs, in chunks of at most `longest` steps (None: one chunk).

    On-policy, extra steps before the update replace the rows that a failed environment lost, so the update learns only
    from rows of its own weights. All lanes take these steps together, so the last step may bring more rows than needed.
    """

    def __init__(self, steps: int, lanes: int, longest: int | None = None, *, on_policy: bool = True) -> None:
        self._steps, self._lanes, self._longest, self._on_policy = steps, lanes, longest or steps, on_policy
        self._left = steps  # steps still to come
        self._lacking = 0  # rows that will be missing after those steps

    @property
    def next(self) -> int:
        """Steps of the next chunk."""
        return min(self._longest, self._left)

    def take(self, chunk: Chunk[Any]) -> tuple[Chunk[Any], int]:
        """Return the chunk with no more rows than the update still takes, and how many rows were left out."""
        steps, lanes = chunk.data.valid.shape
        self._left -= steps
        self._lacking += steps * lanes - chunk.rows if self._on_policy else 0
        if self._left:
            return chunk, 0
        if self._lacking > 0:
            self._left = -(-self._lacking // lanes)
            self._lacking -= self._left * lanes
            return chunk, 0
        surplus, self._lacking, self._left = -self._lacking, 0, self._steps
        if not surplus:
            return chunk, 0
        valid = chunk.data.valid & (np.cumsum(chunk.data.valid).reshape(steps, lanes) <= chunk.rows - surplus)
        return replace(chunk, data=replace(chunk.data, valid=valid), rows=chunk.rows - surplus), surplus

    def state(self) -> dict[str, Array]:
        return {"done": np.array(self._steps - self._left), "lacking": np.array(self._lacking)}

    def restore(self, state: Mapping[str, Array], rows: int) -> None:
        """`rows`: delivered so far. A state saved by an earlier version lacks the number of lost rows, but its learner
        took the same number of rows for each update and holds the rest."""
        self._left = self._steps - int(state["done"])
        if "lacking" in state:
            self._lacking = int(state["lacking"])
        elif self._on_policy:
            missing = self._steps * self._lanes - rows % (self._steps * self._lanes)
            self._left = -(-missing // self._lanes)
            self._lacking = missing - self._left * self._lanes
