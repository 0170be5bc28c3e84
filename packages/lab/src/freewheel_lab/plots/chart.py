"""Charts as data: what is drawn, whoever draws it (`svg` into a page, `picture` into files). One palette for all.

The colours are those of Okabe and Ito, which people who confuse red and green can tell apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from freewheel_lab.plots.numbers import Show, duration, number, short

#: On light paper; a page has lighter ones for a dark screen.
PALETTE = ("#6b7280", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8f6bb3")

Point: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class Bar:
    """One value with its spread; None: not known."""

    label: str
    value: float | None
    low: float | None = None
    high: float | None = None
    colour: int = 0  # in the palette
    note: str = ""  # in place of the value


@dataclass(frozen=True)
class BarChart:
    """A bar for each label, side by side for the eye to compare."""

    name: str  # of its file
    title: str
    about: str  # unit, and what is better
    bars: tuple[Bar, ...] = ()
    show: Show = number
    ideal: float | None = None  # a line to compare with
    ideal_label: str = ""
    whole: float | None = None  # the axis reaches at least as far as this

    @property
    def top(self) -> float:
        """Where the axis ends; it begins at zero."""
        ends = [end for bar in self.bars for end in (bar.value, bar.high) if end is not None]
        return max([*ends, self.ideal or 0.0, self.whole or 0.0]) or 1.0

    @property
    def empty(self) -> bool:
        return all(bar.value is None for bar in self.bars)


@dataclass(frozen=True)
class ChartLine:
    """Points in the order of x, with a band from low to high if there is one; a whisker each for dots."""

    label: str
    points: tuple[Point, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    colour: int = 0
    style: Literal["line", "dashed", "steps", "dots"] = "line"


@dataclass(frozen=True)
class LineChart:
    """Lines over one axis."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: tuple[ChartLine, ...]
    log_x: bool = False
    from_zero: bool = False  # whether the axis of y begins at zero
    mark: float | None = None  # a vertical line at this x
    mark_label: str = ""
    show_x: Show = short
    show_y: Show = short
    styles: Mapping[str, str] = field(default_factory=dict)  # what a style of line stands for, where several are drawn

    @property
    def empty(self) -> bool:
        return not any(line.points for line in self.lines)

    def labelled(self) -> list[ChartLine]:
        """One line of each label, for the legend."""
        return list({line.label: line for line in reversed(self.lines) if line.points}.values())[::-1]

    def xs(self) -> list[float]:
        return [x for line in self.lines for x, _ in line.points]

    def x_ticks(self) -> list[float]:
        """Round numbers, of seconds round times."""
        xs = [*self.xs(), *([] if self.mark is None else [self.mark])]
        if self.log_x:
            return log_ticks(min(xs), max(xs))
        return ticks(min(xs), max(xs), 7, SECONDS if self.show_x is duration and max(xs) - min(xs) > SECONDS[0] else ())

    def y_span(self) -> tuple[float, float]:
        """What the axis has to show: a tenth of its values at least, so that a small difference looks small."""
        points = itertools.chain.from_iterable(
            (*(y for _, y in line.points), *line.low, *line.high) for line in self.lines
        )
        ys = [*points, *([0.0] if self.from_zero else [])]
        low, high = min(ys), max(ys)
        room = max(0.1 * max(abs(low), abs(high)) - (high - low), 0.0) / 2
        return low - room, high + room


@dataclass(frozen=True)
class StackedBar:
    """Shares of a whole, one after the other; kinds have colours of their own."""

    label: str
    shares: tuple[tuple[str, float], ...]  # kind and share of 1, in the order in which they are drawn


@dataclass(frozen=True)
class StackedBarChart:
    """A whole for each label, cut into the same kinds."""

    name: str
    title: str
    about: str
    stacks: tuple[StackedBar, ...]
    colours: Mapping[str, str]  # of every kind
    meanings: Mapping[str, str]  # of kinds, a sentence each

    @property
    def empty(self) -> bool:
        return not any(stack.shares for stack in self.stacks)

    def kinds(self) -> list[str]:
        """Those that can be seen, in the order of their colours."""
        seen = {kind for stack in self.stacks for kind, share in stack.shares if share >= 0.005}
        return [kind for kind in self.colours if kind in seen]


@dataclass(frozen=True)
class SpanTrack:
    """What one party did: spans of (begin, end, kind) in seconds, in order."""

    label: str
    spans: tuple[tuple[float, float, str], ...]


@dataclass(frozen=True)
class SpanChart:
    """Parties below each other over the same seconds; only pictures show it, pages have a timeline that can be zoomed."""

    name: str
    title: str
    about: str
    tracks: tuple[SpanTrack, ...]
    begin: float
    end: float
    colours: Mapping[str, str]  # of every kind, in the order of the legend
    thin: frozenset[str] = frozenset()  # kinds that are waits


Chart: TypeAlias = BarChart | LineChart | StackedBarChart


#: Seconds between two ticks of an axis of time.
SECONDS = [unit * count for unit in (1, 60) for count in (1, 2, 5, 10, 15, 30)] + [
    3600,
    7200,
    14_400,
    21_600,
    43_200,
    86_400,
]


def ticks(low: float, high: float, most: int = 6, steps: Sequence[float] = ()) -> list[float]:
    """Round numbers from `low` or below to `high` or above, at most so many and at least two; `steps`: rather so far apart."""
    if not high > low:
        margin = abs(low) / 10 or 1.0
        low, high = low - margin * (low != 0), high + margin
    rough = (high - low) / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    for step in (*steps, *(factor * power for factor in (1, 2, 2.5, 5, 10, 20))):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first + 1 <= most:
            break
    return [_clean(step * at) for at in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... as far as needed."""
    steps = [factor * 10.0**power for power in range(-6, 16) for factor in (1, 2, 5)]
    first = max((at for at, step in enumerate(steps) if step <= low * (1 + 1e-9)), default=0)
    last = min((at for at, step in enumerate(steps) if step >= high * (1 - 1e-9)), default=len(steps) - 1)
    return [_clean(step) for step in steps[first : max(last, first + 1) + 1]]


def thinned(points: Sequence[int], most: int) -> list[int]:
    """At most so many of them, evenly, the first and the last included."""
    if len(points) <= most:
        return list(points)
    return [points[round(at * (len(points) - 1) / (most - 1))] for at in range(most)]


def _clean(value: float) -> float:
    """Without what adding has left: 0.30000000000000004 is 0.3."""
    return float(f"{value:.12g}")
