"""This module draws curves in a terminal. A character cell has eight Braille dots, two across and
four down."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.text import Text

from freewheel.sinks.formats import rate

Points = Sequence[tuple[float, float]]

BLANK = 0x2800  # first of Unicode's Braille patterns
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # bits by column and row of a cell
LABEL = 9  # columns of the scale
LINE = "cyan"
MARK = "bold yellow"


def draw(line: Points, marks: Points, width: int, height: int, *, ascii_only: bool = False) -> list[Text]:
    """Return `height` lines of text with a curve through points (x, y), single points as marks, and
    the scales of both axes."""
    known = [*line, *marks]
    if not known or height < 2 or width < LABEL + 4:
        return [Text("nothing to draw yet", "dim")] + [Text()] * (height - 1)
    columns = width - LABEL - 1
    rows = height - 1
    left, right = _span([x for x, _ in known])
    low, high = _span([y for _, y in known])
    cells = [[0] * columns for _ in range(rows)]
    for x, y in _dots(line, (left, right), (low, high), (2 * columns, 4 * rows)):
        cells[y // 4][x // 2] |= DOTS[x % 2][y % 4]
    letters = [[_letter(bits, ascii_only) for bits in row] for row in cells]
    marked = {_at(mark, (left, right), (low, high), (columns, rows)) for mark in marks}
    shown = []
    for number, row in enumerate(letters):
        text = Text(f"{_scale(number, rows, low, high):>{LABEL - 1}} ", "dim", no_wrap=True)
        for column, letter in enumerate(row):
            mark = (column, number) in marked
            text.append(("o" if ascii_only else "●") if mark else letter, MARK if mark else LINE)
        shown.append(text)
    begin = f"{rate(left)} steps"
    end = rate(right)
    return [*shown, Text(f"{'':{LABEL}}{begin}{end:>{max(1, columns - len(begin))}}", "dim", no_wrap=True)]


def _span(values: Sequence[float]) -> tuple[float, float]:
    low = min(values)
    high = max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _letter(bits: int, ascii_only: bool) -> str:
    return (" *"[bits > 0]) if ascii_only else chr(BLANK + bits) if bits else " "


def _scale(row: int, rows: int, low: float, high: float) -> str:
    """Return the value of the first, the middle or the last row, and an empty text for the others."""
    places = {0: high, rows - 1: low, (rows - 1) // 2: high - (high - low) * ((rows - 1) // 2) / max(1, rows - 1)}
    return f"{places[row]:.4g}" if row in places else ""


def _at(
    point: tuple[float, float], across: tuple[float, float], up: tuple[float, float], size: tuple[int, int]
) -> tuple[int, int]:
    x, y = point
    left, right = across
    low, high = up
    columns, rows = size
    column = int((x - left) / (right - left) * (columns - 1) + 0.5)
    return column, rows - 1 - int((y - low) / (high - low) * (rows - 1) + 0.5)


def _dots(
    line: Points, across: tuple[float, float], up: tuple[float, float], size: tuple[int, int]
) -> Iterator[tuple[int, int]]:
    """Yield the dots of a curve. In each column the mean of the points is joined to that of the
    column before."""
    heights: dict[int, list[float]] = {}
    for x, y in line:
        heights.setdefault(_at((x, y), across, up, size)[0], []).append(y)
    before: tuple[int, int] | None = None
    for column in sorted(heights):
        mean = math.fsum(heights[column]) / len(heights[column])
        dot = column, _at((across[0], mean), across, up, size)[1]
        yield from [dot] if before is None else _joined(before, dot)
        before = dot


def _joined(begin: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    across = end[0] - begin[0]
    down = end[1] - begin[1]
    count = max(abs(across), abs(down))
    for part in range(1, count + 1):
        yield begin[0] + round(across * part / count), begin[1] + round(down * part / count)
