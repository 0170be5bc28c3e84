"""Draw smooth lines, discs, rings, rectangles and small letters on a picture of bytes [H, W, 3].

Points are (x, y) in pixels from the upper left corner of the picture, so the middle of the first pixel is (0.5, 0.5).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TypeAlias

import numpy as np

from freewheel.core import NDArray

Colour: TypeAlias = tuple[int, int, int]

#: Letters of 5 x 9 pixels. The last two rows are below the base line.
LETTERS = Path(__file__).with_name("letters.txt")


def _cut(letters: str) -> dict[str, NDArray]:
    """Return [9, 6] bools for each letter."""
    glyphs = {" ": np.zeros((9, 6), np.bool_)}
    for band in letters.strip().split("\n\n"):
        names, *rows = band.splitlines()
        pixels = np.array([[mark == "#" for mark in row + " "] for row in rows])
        glyphs |= {name: pixels[:, 6 * at : 6 * at + 6] for at, name in enumerate(names.split())}
    return glyphs


GLYPHS = _cut(LETTERS.read_text())


def blank(width: int, height: int, colour: Colour) -> NDArray:
    """Return a new picture of one colour."""
    return np.full((height, width, 3), colour, np.uint8)


def mix(pixels: NDArray, colour: Colour, share: NDArray | float) -> NDArray:
    """Mix a share of a colour (0 to 1, [...] or one number) into pixels [..., 3]."""
    part = np.asarray(share, np.float32)[..., None]
    mixed: NDArray = np.rint(pixels + (np.array(colour, np.float32) - pixels) * part).astype(np.uint8)
    return mixed


def box(picture: NDArray, corner: tuple[int, int], size: tuple[int, int], colour: Colour) -> None:
    """Draw a filled rectangle."""
    (left, top), (width, height) = corner, size
    picture[top : top + height, left : left + width] = colour


def disc(picture: NDArray, middle: NDArray, radius: float, colour: Colour, opacity: float = 1.0) -> None:
    part, away = _around(picture, middle, radius + 1)
    part[:] = mix(part, colour, opacity * np.clip(radius + 0.5 - away, 0, 1))


def ring(picture: NDArray, middle: NDArray, radius: float, colour: Colour, width: float = 1.5) -> None:
    """Draw a circle with a line of this width."""
    part, away = _around(picture, middle, radius + width / 2 + 1)
    part[:] = mix(part, colour, np.clip(width / 2 + 0.5 - np.abs(away - radius), 0, 1))


def _around(picture: NDArray, middle: NDArray, reach: float) -> tuple[NDArray, NDArray]:
    """Return the square of a picture around a point, and the distances [h, w] of its pixels' middles from the point."""
    sides = zip(middle.tolist(), (picture.shape[1], picture.shape[0]), strict=True)
    spans = [(max(0, int(at - reach)), max(0, min(size, math.ceil(at + reach)))) for at, size in sides]
    x, y = (np.arange(*span) + 0.5 - at for span, at in zip(spans, middle, strict=True))
    (left, right), (top, bottom) = spans
    return picture[top : max(top, bottom), left : max(left, right)], np.hypot(x, y[:, None])


def path(picture: NDArray, points: NDArray, colour: Colour, width: float, outline: Colour | None = None) -> None:
    """Draw a line through points [N, 2], with an edge in the colour `outline` if that is given."""
    pixels, away = _distances(picture, points[:-1], points[1:], width / 2 + 1.5)
    if outline is not None:
        _lay(picture, pixels, away, outline, width + 2.5, 0.7)
    _lay(picture, pixels, away, colour, width, 1.0)


def lines(picture: NDArray, start: NDArray, end: NDArray, colour: Colour, width: float, opacity: float = 1.0) -> None:
    """Draw lines from points to points [N, 2]; equal points give dots. Where lines cross, the colour is applied once."""
    pixels, away = _distances(picture, start, end, width / 2)
    _lay(picture, pixels, away, colour, width, opacity)


def _distances(picture: NDArray, start: NDArray, end: NDArray, reach: float) -> tuple[NDArray, NDArray]:
    """Return the numbers of the pixels within reach of lines, and the distances of their middles from the nearest line.

    The search visits a point in every pixel's length of each line, and tests the pixels around it.
    """
    height, width, _ = picture.shape
    start, course = np.broadcast_arrays(start, end - start)  # [N, 2]
    square = np.maximum((course**2).sum(1), 1e-12)  # squared lengths
    share = np.linspace(0, 1, math.ceil(math.sqrt(square.max(initial=0))) + 1)[:, None, None]
    around = np.arange(-math.ceil(reach + 1), math.ceil(reach + 1) + 1)
    column, row = np.moveaxis(np.floor(start + course * share).astype(np.int64), -1, 0)  # [S, N]
    column, row = column + around[:, None, None], row + around[:, None, None, None]  # [R, R, S, N] when combined
    x, y = column + 0.5 - start[:, 0], row + 0.5 - start[:, 1]
    along = np.clip((x * course[:, 0] + y * course[:, 1]) / square, 0, 1)
    away = np.hypot(x - along * course[:, 0], y - along * course[:, 1])
    near = (away < reach + 0.5) & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    nearest = np.full(height * width, np.inf)
    np.minimum.at(nearest, (row * width + column)[near], away[near])
    pixels = np.flatnonzero(nearest < np.inf)
    return pixels, nearest[pixels]


def _lay(picture: NDArray, pixels: NDArray, away: NDArray, colour: Colour, width: float, opacity: float) -> None:
    """Colour the pixels with these numbers, which are this far away from a line of this width."""
    row, column = np.divmod(pixels, picture.shape[1])
    picture[row, column] = mix(picture[row, column], colour, opacity * np.clip(width / 2 + 0.5 - away, 0, 1))


def write(picture: NDArray, corner: tuple[int, int], text: str, colour: Colour, scale: int = 1) -> int:
    """Write a line of small letters, which must fit into the picture, and return the column where it ends."""
    pixels = np.concatenate([GLYPHS[letter] for letter in text.lower()], 1).repeat(scale, 0).repeat(scale, 1)
    left, top = corner
    picture[top : top + pixels.shape[0], left : left + pixels.shape[1]][pixels] = colour
    return left + int(pixels.shape[1])
