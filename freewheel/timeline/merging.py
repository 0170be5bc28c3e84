"""Merges many short spans into fewer longer ones: in each cell of time, one span per kind with the total duration."""

from __future__ import annotations

import numpy as np

from freewheel.core import NDArray

DENSE = 32  # keys per span up to which a table of all keys is faster than sorting
KINDS = 4  # in a typical cell


def gathered(spans: NDArray, cell: int) -> NDArray:
    """Merge the spans [n, 3] (begin, end, code; sorted, disjoint) shorter than a cell. The sums by code stay equal."""
    if not len(spans):
        return spans
    begin, end, code = spans.T
    length = end - begin
    long = length >= cell
    number = begin // cell
    first = np.ones(len(spans), np.bool_)  # of its group: one long span, or short ones that begin in the same cell
    first[1:] = (number[1:] != number[:-1]) | long[1:] | long[:-1]
    group = np.cumsum(first) - 1
    known = np.flatnonzero(np.bincount(code))  # codes that occur
    places = np.zeros(known[-1] + 1, np.int64)
    places[known] = np.arange(len(known))
    keys, sums = _sums(group * len(known) + places[code], length)
    owner = keys // len(known)
    ends = np.cumsum(sums)
    opening = np.ones(len(keys), np.bool_)
    opening[1:] = owner[1:] != owner[:-1]
    before = (ends - sums)[opening][np.cumsum(opening) - 1]  # the sum of all spans before the group
    start = begin[first][owner] + ends - sums - before
    return np.stack([start, start + sums, known[keys % len(known)]], axis=1)


def _sums(keys: NDArray, lengths: NDArray) -> tuple[NDArray, NDArray]:
    """Return the keys that occur, in order, and the sum of the lengths of each."""
    if int(keys[-1]) < DENSE * len(keys):
        sums = np.bincount(keys, lengths)
        found = np.flatnonzero(np.bincount(keys))
        return found, sums[found].astype(np.int64)
    found, which = np.unique(keys, return_inverse=True)
    return found, np.bincount(which, lengths).astype(np.int64)


def fitted(spans: NDArray, most: int, cell: int) -> tuple[NDArray, int]:
    """Merge to at most `most` spans, in cells of this length or longer; also return the length that was used."""
    if len(spans) <= most:
        return spans, cell
    extent = int(spans[-1, 1] - spans[0, 0])
    spans = gathered(spans, cell)
    while len(spans) > most and cell < extent:  # a single cell still has a span for each code
        cell *= 2
        spans = gathered(spans, cell)
    return spans, cell


def cell_for(extent: int, most: int) -> int:
    """Return the cell length with which `extent` becomes about `most` spans."""
    return max(extent * KINDS // most, 1)
