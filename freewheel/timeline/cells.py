"""Many short spans as fewer longer ones: within a cell of time, one span for each kind, as long as all of it together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from freewheel.core import NDArray
from freewheel.timeline.model import Row, Span, Timeline


def gathered(spans: NDArray, cell: int) -> NDArray:
    """Spans [n, 3] (begin, end, code; in order, none overlaps) with those shorter than a cell gathered. Sums by code stay."""
    if not len(spans):
        return spans
    begin, end, code = spans.T
    length = end - begin
    long = length >= cell
    number = begin // cell
    first = np.ones(len(spans), np.bool_)  # of a group: one long span, or short ones that begin in the same cell
    first[1:] = (number[1:] != number[:-1]) | long[1:] | long[:-1]
    group = np.cumsum(first) - 1
    keys, which = np.unique(group << 32 | code, return_inverse=True)
    sums = np.zeros(len(keys), np.int64)
    np.add.at(sums, which, length)
    owner = keys >> 32
    ends = np.cumsum(sums)
    opening = np.ones(len(keys), np.bool_)
    opening[1:] = owner[1:] != owner[:-1]
    before = (ends - sums)[opening][np.cumsum(opening) - 1]  # all that lies before the group
    start = begin[first][owner] + ends - sums - before
    return np.stack([start, start + sums, keys & 0xFFFFFFFF], axis=1)


def fitted(spans: NDArray, most: int, cell: int) -> tuple[NDArray, int]:
    """At most so many spans, in cells of this length or longer; and the length it took."""
    spans = gathered(spans, cell) if len(spans) > most else spans
    while len(spans) > most and cell < spans[-1, 1] - spans[0, 0]:  # in one cell, there is a span for each code
        cell *= 2
        spans = gathered(spans, cell)
    return spans, cell


def coarse(timeline: Timeline, most: int = 5000) -> Timeline:
    """The same in at most about so many spans, for a page that shows it beside others."""
    each = max(most // max(len(timeline.rows), 1), 50)
    return replace(timeline, rows=[_coarse_row(row, each) for row in timeline.rows])


def _coarse_row(row: Row, most: int) -> Row:
    if len(row.spans) <= most:
        return row
    looks = list(dict.fromkeys((span.kind, span.waits_for) for span in row.spans))
    number = {look: place for place, look in enumerate(looks)}
    numbers = [
        (round(span.t0_s * 1e9), round(span.t1_s * 1e9), number[span.kind, span.waits_for]) for span in row.spans
    ]
    spans, _ = fitted(np.array(numbers, np.int64), most, 1_000_000)
    found = []
    for begin, end, code in spans.tolist():
        kind, party = looks[code]
        found.append(Span(kind, begin / 1e9, end / 1e9, party))
    return replace(row, spans=found)
