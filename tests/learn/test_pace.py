"""Updates per row stay within hard bounds on both sides, whoever is the faster one."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.learn.pace import Pace


@pytest.mark.parametrize(
    ("ratio", "starts", "rows", "updates"),
    [
        (1.0, 100, 99, 0), (1.0, 100, 100, 0), (1.0, 100, 101, 1), (1.0, 0, 7, 7),
        (20.0, 5, 8, 60), (0.25, 10, 13, 0), (0.25, 10, 14, 1), (0.25, 10, 29, 4),
        (0.1, 0, 30, 3), (1 / 3, 0, 300, 100), (1.1, 0, 10, 11),
    ],
)  # fmt: skip
def test_so_many_updates_are_called_for(ratio: float, starts: int, rows: int, updates: int) -> None:
    assert Pace(ratio, starts, 1).called_for(rows) == updates


@pytest.mark.parametrize(("slack", "rows", "behind"), [(8, 8, False), (8, 9, True), (1, 1, False), (1, 2, True)])
def test_more_than_the_slack_is_behind(slack: int, rows: int, behind: bool) -> None:
    pace = Pace(3.0, 100, slack)
    pace.rows = 100 + rows
    assert pace.due == 3 * rows
    assert pace.behind is behind
    pace.updates = pace.due
    assert not pace.behind


def test_what_was_achieved_counts_from_where_learning_began() -> None:
    pace = Pace(2.0, 50, 4)
    assert pace.achieved == 0.0
    pace.rows, pace.updates = 90, 60
    assert pace.achieved == 1.5


#: Who comes next, and with how much: rows arrive, or updates are done as far as they are due.
Moves = st.lists(st.tuples(st.sampled_from(["rows", "updates"]), st.integers(1, 40)), max_size=60)
Ratios = st.sampled_from([Fraction(1, 64), Fraction(1, 10), Fraction(1, 3), Fraction(1), Fraction(7, 4), Fraction(20)])


@given(ratio=Ratios, starts=st.integers(1, 60), slack=st.integers(1, 30), moves=Moves)
def test_neither_side_gets_further_ahead_than_it_may(
    ratio: Fraction, starts: int, slack: int, moves: list[tuple[str, int]]
) -> None:
    pace, largest = Pace(float(ratio), starts, slack), 0
    for who, count in moves:
        if who == "updates":
            pace.updates += min(count, pace.due)
        elif not pace.behind:
            pace.rows += count
            largest = max(largest, count)
        earned = ratio * max(0, pace.rows - starts)
        assert pace.updates <= earned, "updates ran ahead of the rows"
        assert earned - pace.updates <= ratio * (slack + largest) + 1, "rows ran ahead of the updates"
        assert pace.due == math.floor(earned) - pace.updates
        assert pace.due >= 1 or not pace.behind, "neither rows nor updates may go on"
