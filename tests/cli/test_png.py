"""Pictures come back from their files pixel by pixel."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from freewheel.cli import png
from tests.support.pictures import decoded


@pytest.mark.parametrize("shape", [(1, 1, 3), (7, 5, 3), (2, 300, 3)])
def test_a_picture_comes_back(shape: tuple[int, ...]) -> None:
    picture = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    for one in (picture, picture[::-1, ::-1]):  # the second is not contiguous
        assert (decoded(png.encode(one)) == one).all()
        with Image.open(io.BytesIO(png.encode(one))) as others:
            assert (np.asarray(others) == one).all()


def test_what_repeats_itself_is_small() -> None:
    row = np.random.default_rng(2).integers(0, 256, (1, 960, 3), np.uint8)
    assert len(png.encode(np.broadcast_to(row, (480, 960, 3)))) < 10_000
