"""This module keeps the rows of a run in bounded memory: a curve that is thinned when it grows, and
all rows of the last minute."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from freewheel.core import LEARNER_TIME, WORKER_TIME

Point: TypeAlias = list[float | None]

MOST = 3000  # maximum number of points of a curve, which is more than a screen has columns
MINUTE = 60.0  # seconds
DENSEST = 600  # maximum number of rows of the last minute, for a short --log-every
COLUMNS = ("wall_s", "env_steps", "return_mean", "eval_return", "steps_per_s")
#: Columns of the last minute, and the metrics that they show.
KINDS = {
    "wall_s": "wall_s",
    **{f"worker/{kind}": f"time/worker_{kind.replace('-', '_')}" for kind in WORKER_TIME},
    **{f"learner/{kind}": f"time/learner_{kind.replace('-', '_')}" for kind in LEARNER_TIME},
}


class _KeptPoint(NamedTuple):
    number: int  # number of the row
    point: Point


class ThinnedCurve:
    """Keeps every k-th row and the newest one. k doubles when there are too many rows."""

    def __init__(self) -> None:
        self._kept: list[_KeptPoint] = []
        self._every = 1
        self.rows = 0
        self.tail: Point | None = None
        self.removals = 0  # how often existing points have been removed

    def add(self, row: Mapping[str, Any]) -> None:
        self.tail = numbers(row, COLUMNS)
        if self.rows % self._every == 0:
            self._kept.append(_KeptPoint(self.rows, self.tail))
        self.rows += 1
        if len(self._kept) > MOST:
            self._kept = self._kept[::2]
            self._every *= 2
            self.removals += 1

    def cut(self, rows: int) -> None:
        """Drop all rows except the first `rows`."""
        self._kept = [kept for kept in self._kept if kept.number < rows]
        self.tail = self._kept[-1].point if self._kept else None
        self.rows = rows
        self.removals += 1

    def points(self, since: int = 0) -> list[Point]:
        """Return the points of row number `since` and later."""
        first = len(self._kept)
        while first and self._kept[first - 1].number >= since:
            first -= 1
        return [kept.point for kept in self._kept[first:]]


class LastMinute:
    """Keeps where the time of the last minute went, row by row."""

    def __init__(self) -> None:
        self._kept: deque[_KeptPoint] = deque(maxlen=DENSEST)

    def add(self, number: int, row: Mapping[str, Any]) -> None:
        point = numbers(row, KINDS.values())
        if (now := point[0]) is None:
            return
        while self._kept and (self._kept[0].point[0] or 0.0) < now - MINUTE:
            self._kept.popleft()
        self._kept.append(_KeptPoint(number, point))

    def cut(self, rows: int) -> None:
        while self._kept and self._kept[-1].number >= rows:
            self._kept.pop()

    def points(self, since: int = 0) -> list[Point]:
        return [kept.point for kept in self._kept if kept.number >= since]


def numbers(row: Mapping[str, Any], names: Iterable[str]) -> Point:
    """Return the values of these names. A value is None if there is no number."""
    return [number(row.get(name)) for name in names]


def number(value: object) -> float | None:
    """Return a finite number, or None. A row may hold any value, because other programs may have
    written it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int):
        return value if abs(value) < 2**53 else None
    return value if math.isfinite(value) else None
