"""This module draws charts as SVG for a page. The page sets colours and fonts by its classes (c0,
c1, ...), so charts adapt to light and dark screens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from html import escape

from freewheel_lab.plots.chart import (
    PALETTE,
    Bar,
    BarChart,
    Chart,
    ChartLine,
    LineChart,
    StackedBarChart,
    thinned,
    ticks,
)
from freewheel_lab.plots.numbers import percent

BARS_WIDTH = 380
ROW = 42
THICK = 12
LINES_WIDTH = 560
HEIGHT = 300
LEFT = 58
RIGHT = 16
TOP = 12
BOTTOM = 48
LABEL = 38  # letters that fit above a bar
MOST_POINTS = 240


def draw(chart: Chart) -> str:
    """Return the chart, with a legend if it needs one. The page adds the title."""
    if isinstance(chart, StackedBarChart):
        return _stacks(chart)
    return _bars(chart) if isinstance(chart, BarChart) else _lines(chart)


def colour(number: int) -> str:
    """Return the class of a colour of the palette."""
    return f"c{number % len(PALETTE)}"


def _open(width: int, height: float, label: str) -> str:
    return f'<svg class="chart" viewBox="0 0 {width} {height:g}" role="img" aria-label="{escape(label)}">'


def _bars(chart: BarChart) -> str:
    height = ROW * len(chart.bars) + (18 if chart.ideal is not None else 2)
    description = "; ".join(f"{bar.label} {bar.note or chart.show(bar.value)}" for bar in chart.bars)
    parts = [_open(BARS_WIDTH, height, f"{chart.title}: {description}")]
    for at, bar in enumerate(chart.bars):
        parts += _bar(chart, bar, at * ROW, BARS_WIDTH / chart.top)
    if chart.ideal is not None:
        x = min(chart.ideal * BARS_WIDTH / chart.top, BARS_WIDTH - 1)
        over = "".join(f"M{x:.1f} {at * ROW + 17}v{THICK + 6}" for at in range(len(chart.bars)))
        parts.append(f'<path class="ideal" d="{over}"/>')
        anchor = "end" if x > BARS_WIDTH / 2 else "start"
        where = f'x="{x:.1f}" y="{height - 4:g}" text-anchor="{anchor}"'
        parts.append(f'<text class="faint" {where}>{escape(chart.ideal_label)}</text>')
    return "".join([*parts, "</svg>"])


def _bar(chart: BarChart, bar: Bar, y: float, scale: float) -> Iterator[str]:
    label = bar.label if len(bar.label) <= LABEL else f"{bar.label[: LABEL - 1]}…"
    shown = bar.note or chart.show(bar.value)
    spread = bar.low is not None and bar.high is not None and bar.low < bar.high
    description = f"{bar.label}: {shown}" + (f" ({chart.show(bar.low)} to {chart.show(bar.high)})" if spread else "")
    base = y + 20
    yield f"<g><title>{escape(description)}</title>"
    yield f'<text x="0" y="{y + 14:g}">{escape(label)}</text>'
    strong = "faint" if bar.note or bar.value is None else "strong"
    yield f'<text class="{strong}" x="{BARS_WIDTH}" y="{y + 14:g}" text-anchor="end">{escape(shown)}</text>'
    yield f'<rect class="track" x="0" y="{base:g}" width="{BARS_WIDTH}" height="{THICK}" rx="2"/>'
    if bar.value is not None:
        width = max(bar.value * scale, 0.0)
        least = 1.5 if bar.value > 0 else 0.0
        yield (
            f'<rect class="bar {colour(bar.colour)}" x="0" y="{base:g}" width="{max(width, least):.1f}" '
            f'height="{THICK}" rx="2"/>'
        )
    if spread:
        assert bar.low is not None, "it has a spread"
        assert bar.high is not None, "it has a spread"
        low = max(bar.low, 0) * scale
        high = min(bar.high * scale, BARS_WIDTH - 1)
        middle = base + THICK / 2
        path = (
            f"M{low:.1f} {middle:g}H{high:.1f}M{low:.1f} {base + 2:g}v{THICK - 4}M{high:.1f} {base + 2:g}v{THICK - 4}"
        )
        yield f'<path class="whisker" d="{path}"/>'
    yield "</g>"


def _lines(chart: LineChart) -> str:
    x_ticks = chart.x_ticks()
    y_ticks = ticks(*chart.y_span())
    place_x = _scale(x_ticks[0], x_ticks[-1], LEFT, LINES_WIDTH - RIGHT, log=chart.log_x)
    place_y = _scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    names = ", ".join(dict.fromkeys(line.label for line in chart.lines))
    parts = [_open(LINES_WIDTH, HEIGHT, f"{chart.title}: {chart.y_label} over {chart.x_label} of {names}")]
    parts += _axes(
        chart, [(place_x(x), chart.show_x(x)) for x in x_ticks], [(place_y(y), chart.show_y(y)) for y in y_ticks]
    )
    if chart.mark is not None:
        parts += _mark(chart, place_x(chart.mark))
    for line in chart.lines:
        if line.points:
            parts += _line(chart, line, place_x, place_y)
    return "".join([*parts, "</svg>", _legend(chart)])


def _scale(low: float, high: float, start: float, stop: float, *, log: bool = False) -> Callable[[float], float]:
    if log:
        low = math.log(low)
        high = math.log(high)
    return lambda value: start + (stop - start) * ((math.log(value) if log else value) - low) / (high - low)


def _axes(chart: LineChart, xs: Sequence[tuple[float, str]], ys: Sequence[tuple[float, str]]) -> Iterator[str]:
    for y, shown in ys:
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{LINES_WIDTH - RIGHT}"/>'
        yield f'<text class="tick" x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{escape(shown)}</text>'
    bottom = HEIGHT - BOTTOM
    for x, shown in xs:
        yield f'<path class="axis" d="M{x:.1f} {bottom}v4"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(shown)}</text>'
    yield f'<path class="axis" d="M{LEFT} {bottom}H{LINES_WIDTH - RIGHT}"/>'
    middle = (LEFT + LINES_WIDTH - RIGHT) / 2
    yield f'<text class="faint" x="{middle:g}" y="{HEIGHT - 8}" text-anchor="middle">{escape(chart.x_label)}</text>'
    y = (TOP + bottom) / 2
    yield f'<text class="faint" transform="translate(12 {y:g}) rotate(-90)" text-anchor="middle">{escape(chart.y_label)}</text>'


def _mark(chart: LineChart, x: float) -> Iterator[str]:
    yield f'<path class="ideal" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>'
    left = x > LINES_WIDTH / 2
    where = f'x="{x - 6 if left else x + 6:.1f}" y="{TOP + 12}" text-anchor="{"end" if left else "start"}"'
    yield f'<text class="faint" {where}>{escape(chart.mark_label)}</text>'


def _line(
    chart: LineChart, line: ChartLine, place_x: Callable[[float], float], place_y: Callable[[float], float]
) -> Iterator[str]:
    kept = thinned(range(len(line.points)), MOST_POINTS)
    points = [(place_x(line.points[at][0]), place_y(line.points[at][1])) for at in kept]
    own = colour(line.colour)
    steps = line.style == "steps"
    if line.low and line.high:
        upper = [(points[n][0], place_y(line.high[at])) for n, at in enumerate(kept)]
        lower = [(points[n][0], place_y(line.low[at])) for n, at in enumerate(kept)]
        if steps:
            upper = _stepped(upper)
            lower = _stepped(lower)
        yield f'<path class="band {own}" d="{_path([*upper, *reversed(lower)])}Z"/>'
    if line.style != "dots" and len(points) > 1:
        dashed = " dashed" if line.style == "dashed" else ""
        yield f'<path class="line{dashed} {own}" d="{_path(_stepped(points) if steps else points)}"/>'
    if line.style == "dots" or len(points) <= 24:
        large = 4.5 if line.style == "dots" or len(points) == 1 else 2.6
        for (x, y), at in zip(points, kept, strict=True):
            before, after = line.points[at]
            description = f"{line.label}: {chart.show_y(after)} at {chart.show_x(before)}"
            yield f'<circle class="dot {own}" cx="{x:.1f}" cy="{y:.1f}" r="{large}"><title>{escape(description)}</title></circle>'


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _stepped(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points of a step curve, in which a value holds until the next one."""
    found = list(points[:1])
    for (_, y), (x, new) in itertools.pairwise(points):
        found += [(x, y), (x, new)]
    return found


def _legend(chart: LineChart) -> str:
    styles = {line.style for line in chart.lines if line.points} if chart.styles else set()
    plain = "line" if chart.styles else ""
    keys = [(colour(line.colour), plain or line.style, line.label) for line in chart.labelled()]
    keys += [("ink", style, text) for style, text in chart.styles.items() if style in styles]
    items = (f'<li class="{own} {style}"><i></i>{escape(text)}</li>' for own, style, text in keys)
    return f'<ul class="legend">{"".join(items)}</ul>'


def _stacks(chart: StackedBarChart) -> str:
    description = "; ".join(
        f"{one.label} {', '.join(f'{kind} {percent(share)}' for kind, share in one.shares)}" for one in chart.stacks
    )
    parts = [_open(LINES_WIDTH, ROW * len(chart.stacks) + 2, f"{chart.title}: {description}")]
    for at, stack in enumerate(chart.stacks):
        y = at * ROW
        x = 0.0
        parts.append(f'<text x="0" y="{y + 14}">{escape(stack.label)}</text>')
        parts.append(f'<rect class="track" x="0" y="{y + 20}" width="{LINES_WIDTH}" height="{THICK + 4}"/>')
        for kind, share in stack.shares:
            width = min(max(share, 0.0) * LINES_WIDTH, LINES_WIDTH - x)
            if width >= 0.3:
                title = f"<title>{escape(f'{stack.label}: {kind} {percent(share)}')}</title>"
                area = f'x="{x:.1f}" y="{y + 20}" width="{width:.1f}" height="{THICK + 4}"'
                parts.append(f'<rect fill="{escape(chart.colours[kind])}" {area}>{title}</rect>')
            x += width
    keys = (
        f'<li title="{escape(chart.meanings.get(kind, ""))}"><svg class="key" viewBox="0 0 12 12"><rect width="12" height="12" '
        f'rx="2" fill="{escape(chart.colours[kind])}"/></svg>{escape(kind)}</li>'
        for kind in chart.kinds()
    )
    return "".join([*parts, f'</svg><ul class="legend">{"".join(keys)}</ul>'])
