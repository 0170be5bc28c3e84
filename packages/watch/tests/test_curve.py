"""Tests of curves, which stay small in long runs and can be cut when a run is resumed."""

from __future__ import annotations

import math

import pytest

from freewheel_watch import curve
from freewheel_watch.curve import COLUMNS, KINDS, MOST, LastMinute, ThinnedCurve, number
from tests.support.watching import row

X = COLUMNS.index("wall_s")


def drawn(rows: int) -> ThinnedCurve:
    found = ThinnedCurve()
    for count in range(rows):
        found.add(row(count))
    return found


@pytest.mark.parametrize(("rows", "every"), [(MOST, 1), (MOST + 1, 2), (2 * MOST + 7, 4), (20_000, 8)])
def test_a_long_run_is_thinned_evenly_from_its_beginning_to_its_end(rows: int, every: int) -> None:
    found = drawn(rows)
    at = [point[X] for point in found.points()]
    assert MOST / 2 <= len(at) <= MOST
    assert at == list(range(0, rows, every))
    assert 2**found.removals == every
    assert found.tail is not None
    assert found.tail[X] == rows - 1


def test_new_points_are_those_since_a_row() -> None:
    found = drawn(10)
    assert [point[X] for point in found.points(since=8)] == [8, 9]
    assert found.points(since=10) == []


@pytest.mark.parametrize("rows", [20, 5 * MOST])
def test_rows_that_a_resume_has_cut_are_gone_and_the_new_ones_follow(rows: int) -> None:
    found, kept = drawn(rows), rows // 2 + 1
    removals = found.removals
    found.cut(kept)
    for count in range(kept, rows):
        found.add(row(count, return_mean=-1.0))
    assert found.removals > removals  # clients with the old points need all of them again
    at = {point[X]: point[COLUMNS.index("return_mean")] for point in found.points()}
    assert list(at) == [point[X] for point in drawn(rows).points()]
    assert all((value == -1.0) == (x >= kept) for x, value in at.items() if x is not None and value is not None)


def test_the_last_minute_is_a_minute_and_has_every_kind() -> None:
    minute = LastMinute()
    for count in range(200):
        minute.add(count, row(count))
    points = minute.points()
    assert [point[0] for point in points] == list(range(139, 200))
    assert dict(zip(KINDS, points[-1], strict=True))["worker/step"] == 0.75
    assert len(minute.points(since=198)) == 2
    minute.cut(150)
    assert minute.points()[-1][0] == 149


def test_rows_that_come_often_do_not_grow_it() -> None:
    minute = LastMinute()
    for count in range(5000):
        minute.add(count, row(count, wall_s=count / 1000))
    assert len(minute.points()) == curve.DENSEST


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "9", None, [1], 10**30])
def test_only_numbers_that_a_page_can_read_are_taken(value: object) -> None:
    assert number(value) is None
    assert number(3) == 3
    assert number(-0.5) == -0.5
