"""Tests of curves in Braille dots and of their scale."""

from __future__ import annotations

from itertools import pairwise

from freewheel_watch import braille


def plain(*args: object, **kwargs: object) -> list[str]:
    return [text.plain for text in braille.draw(*args, **kwargs)]  # type: ignore[arg-type]


def test_a_rising_line_goes_from_the_lower_left_to_the_upper_right() -> None:
    shown = plain([(0, 0.0), (100, 10.0)], [], 29, 6)
    assert len(shown) == 6
    assert [line[:8].strip() for line in shown[:5]] == ["10", "", "5", "", "0"]
    cells = [line[9:].ljust(19) for line in shown[:5]]
    assert ord(cells[4][0]) & 0x40  # the lowest dot of the first column
    assert ord(cells[0][18]) & 0x08  # the highest dot of the last column
    assert (cells[0][0], cells[4][18]) == (" ", " ")
    filled = [[column for column, letter in enumerate(row) if letter != " "] for row in cells]
    assert filled[0][-1] == 18
    assert all(upper[0] > lower[0] for upper, lower in pairwise(filled))
    assert shown[5].split() == ["0", "steps", "100"]


def test_evaluations_are_marks_and_ascii_needs_no_braille() -> None:
    shown = plain([(0, 0.0), (10, 0.0)], [(10, 4.0)], 20, 4, ascii_only=True)
    assert shown[0].rstrip().endswith("o")
    assert set("".join(line[9:] for line in shown[:3])) <= set(" *o")
    assert "●" in plain([(0, 0.0)], [(10, 4.0)], 20, 4)[0]


def test_nothing_one_point_and_too_little_room() -> None:
    assert plain([], [], 40, 5)[0] == "nothing to draw yet"
    assert len(plain([], [], 40, 5)) == 5
    assert len(plain([(3, 3.0)], [], 40, 5)) == 5
    assert plain([(3, 3.0)], [], 5, 5)[0] == "nothing to draw yet"
