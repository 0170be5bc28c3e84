"""Shapes have the right place and size, and never go beyond the edges."""

from __future__ import annotations

import math

import numpy as np
import pytest

from freewheel.core import NDArray
from freewheel_drone import canvas

WHITE = 255, 255, 255


def covered(picture: NDArray) -> float:
    """Count white pixels, weighted by how white they are."""
    return float(picture[..., 0].sum()) / 255


def test_mixing_is_linear() -> None:
    pixels = np.array([[[0, 100, 200]]], np.uint8)
    assert canvas.mix(pixels, (100, 0, 200), 0.25).tolist() == [[[25, 75, 200]]]
    assert canvas.mix(pixels, WHITE, np.array([[1.0]])).tolist() == [[[255, 255, 255]]]


@pytest.mark.parametrize("radius", [3.0, 7.5, 20.0])
def test_areas(radius: float) -> None:
    picture = canvas.blank(60, 60, (0, 0, 0))
    canvas.disc(picture, np.array((30.3, 29.8)), radius, WHITE)
    assert covered(picture) == pytest.approx(math.pi * radius**2, rel=0.02)
    picture[:] = 0
    canvas.ring(picture, np.array((30.3, 29.8)), radius, WHITE, 2)
    assert covered(picture) == pytest.approx(2 * math.pi * radius * 2, rel=0.02)


def test_a_line_has_the_given_length_and_width() -> None:
    picture = canvas.blank(60, 60, (0, 0, 0))
    canvas.lines(picture, np.array(((10.2, 12.9),)), np.array(((40.7, 51.1),)), WHITE, 1.5)
    assert covered(picture) == pytest.approx(math.hypot(30.5, 38.2) * 1.5 + math.pi * 0.75**2, rel=0.02)
    picture = canvas.blank(60, 40, (0, 0, 0))
    canvas.path(picture, np.array(((10.0, 20.0), (30.0, 20.0), (50.0, 20.0))), WHITE, 4)
    assert covered(picture) == pytest.approx(40 * 4 + math.pi * 2**2, rel=0.03)  # includes the round ends
    assert (picture[18:22, 10:50] == 255).all()
    assert not picture[:17].any()
    assert not picture[23:].any()


def test_lines_that_cross_are_laid_on_once() -> None:
    picture = canvas.blank(20, 20, (0, 0, 0))
    canvas.lines(picture, np.array(((2.5, 10.5), (10.5, 2.5))), np.array(((18.5, 10.5), (10.5, 18.5))), WHITE, 1, 0.5)
    assert picture[10, 10, 0] == picture[10, 5, 0] == 128
    picture[:] = 0
    canvas.lines(picture, np.empty((0, 2)), np.empty((0, 2)), WHITE, 3)
    canvas.path(picture, np.ones((1, 2)), WHITE, 3)
    assert not picture.any(), "nothing is drawn of no lines"


@pytest.mark.parametrize("middle", [(0, 0), (-3, 10), (25, 25), (500, -500)])
def test_what_lies_beyond_the_edge_is_cut_off(middle: tuple[float, float]) -> None:
    large, small = canvas.blank(80, 80, (0, 0, 0)), canvas.blank(20, 20, (0, 0, 0))
    for picture, shift in (large, 30), (small, 0):
        at = np.array(middle, np.float64) + shift
        canvas.disc(picture, at, 8, WHITE, 0.5)
        canvas.ring(picture, at, 5, WHITE)
        canvas.path(picture, np.stack((at, at + 12)), (255, 0, 0), 3, (0, 0, 255))
        canvas.lines(picture, at[None], at[None] - 6, (0, 255, 0), 2)
    assert (large[30:50, 30:50] == small).all()


def test_letters_differ_and_text_is_as_wide_as_they_are() -> None:
    assert set("abcdefghijklmnopqrstuvwxyz0123456789 .:-/%,()+") == set(canvas.GLYPHS)
    assert {glyph.shape for glyph in canvas.GLYPHS.values()} == {(9, 6)}
    assert len({glyph.tobytes() for glyph in canvas.GLYPHS.values()}) == len(canvas.GLYPHS)
    assert not any(glyph[:, 5].any() for glyph in canvas.GLYPHS.values())
    picture = canvas.blank(80, 30, (0, 0, 0))
    assert canvas.write(picture, (4, 5), "Ab 1", WHITE, 2) == 4 + 4 * 6 * 2
    assert covered(picture) == 4 * sum(int(canvas.GLYPHS[letter].sum()) for letter in "ab1")
