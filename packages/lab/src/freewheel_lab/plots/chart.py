"""This module describes charts as data. `svg` draws them into a page, and `picture` draws them into
files. All charts share one palette.

The colours are those of Okabe and Ito, which people with red-green colour blindness can
distinguish.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from freewheel_lab.plots.numbers import Show, duration, number, short

#: Colours on light paper; a page has lighter ones for a dark screen.
PALETTE = ("#6b7280", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8f6bb3")

Point: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class Bar:
    """Holds one value with its spread. None means that the value is not known."""

    label: str
    value: float | None
    low: float | None = None
    high: float | None = None
    colour: int = 0  # index in the palette
    note: str = ""  # text that replaces the value


@dataclass(frozen=True)
class BarChart:
    """A chart with a bar for each label."""

    name: str  # base name of its file
    title: str
    about: str  # the unit, and whether higher or lower is better
    bars: tuple[Bar, ...] = ()
    show: Show = number
    ideal: float | None = None  # value of a reference line
    ideal_label: str = ""
    whole: float | None = None  # the axis reaches at least this value

    @property
    def top(self) -> float:
        """Return where the axis ends. It begins at zero."""
        ends = [end for bar in self.bars for end in (bar.value, bar.high) if end is not None]
        return max([*ends, self.ideal or 0.0, self.whole or 0.0]) or 1.0

    @property
    def empty(self) -> bool:
        return all(bar.value is None for bar in self.bars)


@dataclass(frozen=True)
class ChartLine:
    """Holds points in ascending order of x. `low` and `high` are the edges of a band, or for dots
    the ends of a whisker."""

    label: str
    points: tuple[Point, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    colour: int = 0
    style: Literal["line", "dashed", "steps", "dots"] = "line"


@dataclass(frozen=True)
class LineChart:
    """A chart of lines that share one axis."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: tuple[ChartLine, ...]
    log_x: bool = False
    from_zero: bool = False  # whether the y axis begins at zero
    mark: float | None = None  # x of a vertical line
    mark_label: str = ""
    show_x: Show = short
    show_y: Show = short
    styles: Mapping[str, str] = field(default_factory=dict)  # meaning of each line style, if there are several

    @property
    def empty(self) -> bool:
        return not any(line.points for line in self.lines)

    def labelled(self) -> list[ChartLine]:
        """Return one line of each label, for the legend."""
        return list({line.label: line for line in reversed(self.lines) if line.points}.values())[::-1]

    def xs(self) -> list[float]:
        return [x for line in self.lines for x, _ in line.points]

    def x_ticks(self) -> list[float]:
        """Return round numbers for the x axis. For seconds they are round times."""
        xs = [*self.xs(), *([] if self.mark is None else [self.mark])]
        if self.log_x:
            return log_ticks(min(xs), max(xs))
        return ticks(min(xs), max(xs), 7, SECONDS if self.show_x is duration and max(xs) - min(xs) > SECONDS[0] else ())

    def y_span(self) -> tuple[float, float]:
        """Return the range of the y axis. It is at least a tenth of its values, so that a small
        difference looks small."""
        points = itertools.chain.from_iterable(
            (*(y for _, y in line.points), *line.low, *line.high) for line in self.lines
        )
        ys = [*points, *([0.0] if self.from_zero else [])]
        low = min(ys)
        high = max(ys)
        room = max(0.1 * max(abs(low), abs(high)) - (high - low), 0.0) / 2
        return low - room, high + room


@dataclass(frozen=True)
class StackedBar:
    """Holds the shares of a whole in order. Each kind has a colour."""

    label: str
    shares: tuple[tuple[str, float], ...]  # kind and share of 1, in drawing order


@dataclass(frozen=True)
class StackedBarChart:
    """A chart that divides a whole into the same kinds for each label."""

    name: str
    title: str
    about: str
    stacks: tuple[StackedBar, ...]
    colours: Mapping[str, str]  # colour of every kind
    meanings: Mapping[str, str]  # a sentence for each kind

    @property
    def empty(self) -> bool:
        return not any(stack.shares for stack in self.stacks)

    def kinds(self) -> list[str]:
        """Return the kinds that are large enough to be seen, in the order of their colours."""
        seen = {kind for stack in self.stacks for kind, share in stack.shares if share >= 0.005}
        return [kind for kind in self.colours if kind in seen]


@dataclass(frozen=True)
class SpanTrack:
    """Holds what one executor did, as spans of (begin, end, kind) in seconds, in order."""

    label: str
    spans: tuple[tuple[float, float, str], ...]


@dataclass(frozen=True)
class SpanChart:
    """A chart of executors over the same seconds. Only pictures have it, because pages have a
    timeline with zoom."""

    name: str
    title: str
    about: str
    tracks: tuple[SpanTrack, ...]
    begin: float
    end: float
    colours: Mapping[str, str]  # colour of every kind, in the order of the legend
    thin: frozenset[str] = frozenset()  # kinds that are waits


Chart: TypeAlias = BarChart | LineChart | StackedBarChart


#: Possible seconds between two ticks of a time axis.
SECONDS = [unit * count for unit in (1, 60) for count in (1, 2, 5, 10, 15, 30)] + [
    3600,
    7200,
    14_400,
    21_600,
    43_200,
    86_400,
]


def ticks(low: float, high: float, most: int = 6, steps: Sequence[float] = ()) -> list[float]:
    """Return at least two and at most `most` round numbers. The first is at or below `low`, and the
    last is at or above `high`. Distances in `steps` are preferred."""
    if not high > low:
        margin = abs(low) / 10 or 1.0
        low = low - margin * (low != 0)
        high = high + margin
    rough = (high - low) / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    for step in (*steps, *(factor * power for factor in (1, 2, 2.5, 5, 10, 20))):
        first = math.floor(low / step + 1e-9)
        last = math.ceil(high / step - 1e-9)
        if last - first + 1 <= most:
            break
    return [_clean(step * at) for at in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return the values 1, 2, 5, 10, ... that cover the range."""
    steps = [factor * 10.0**power for power in range(-6, 16) for factor in (1, 2, 5)]
    first = max((at for at, step in enumerate(steps) if step <= low * (1 + 1e-9)), default=0)
    last = min((at for at, step in enumerate(steps) if step >= high * (1 - 1e-9)), default=len(steps) - 1)
    return [_clean(step) for step in steps[first : max(last, first + 1) + 1]]


def thinned(points: Sequence[int], most: int) -> list[int]:
    """Return at most `most` points at even distances, including the first and the last."""
    if len(points) <= most:
        return list(points)
    return [points[round(at * (len(points) - 1) / (most - 1))] for at in range(most)]


def _clean(value: float) -> float:
    """Remove the rounding error of a sum: 0.30000000000000004 becomes 0.3."""
    return float(f"{value:.12g}")
