"""The rows of a run in bounded memory: a curve that thins itself out, and the last minute as it was."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from freewheel.core import LEARNER_TIME, WORKER_TIME

Point: TypeAlias = list[float | None]

MOST = 3000  # points of a curve: more than a screen has columns
MINUTE = 60.0  # seconds
DENSEST = 600  # rows of the last minute at most, where --log-every is short
COLUMNS = ("wall_s", "env_steps", "return_mean", "eval_return", "steps_per_s")
#: Columns of the last minute, and the metrics that they are.
KINDS = {
    "wall_s": "wall_s",
    **{f"worker/{kind}": f"time/worker_{kind.replace('-', '_')}" for kind in WORKER_TIME},
    **{f"learner/{kind}": f"time/learner_{kind.replace('-', '_')}" for kind in LEARNER_TIME},
}


class _KeptPoint(NamedTuple):
    number: int  # of the row
    point: Point


class ThinnedCurve:
    """Every k-th row, where k doubles when there are too many of them, and the newest."""

    def __init__(self) -> None:
        self._kept: list[_KeptPoint] = []
        self._every, self.rows = 1, 0
        self.tail: Point | None = None
        self.turned = 0  # how often points that were there have been taken away

    def add(self, row: Mapping[str, Any]) -> None:
        self.tail = numbers(row, COLUMNS)
        if self.rows % self._every == 0:
            self._kept.append(_KeptPoint(self.rows, self.tail))
        self.rows += 1
        if len(self._kept) > MOST:
            self._kept = self._kept[::2]
            self._every *= 2
            self.turned += 1

    def cut(self, rows: int) -> None:
        """Only the first so many rows hold."""
        self._kept = [kept for kept in self._kept if kept.number < rows]
        self.tail = self._kept[-1].point if self._kept else None
        self.rows = rows
        self.turned += 1

    def points(self, since: int = 0) -> list[Point]:
        """Those of row number `since` and later."""
        first = len(self._kept)
        while first and self._kept[first - 1].number >= since:
            first -= 1
        return [kept.point for kept in self._kept[first:]]


class LastMinute:
    """Where the time went, row by row."""

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
    """Values of these names; None where there is no number."""
    return [number(row.get(name)) for name in names]


def number(value: object) -> float | None:
    """A finite number of a row, which may hold anything: others may have written it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int):
        return value if abs(value) < 2**53 else None
    return value if math.isfinite(value) else None
