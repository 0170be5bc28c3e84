"""Pictures come back from their files pixel by pixel."""

from __future__ import annotations

import io

import numpy as np
import pytest

from freewheel.files import png
from tests.support.pictures import decoded


@pytest.mark.parametrize("shape", [(1, 1, 3), (7, 5, 3), (2, 300, 3)])
def test_a_picture_comes_back(shape: tuple[int, ...]) -> None:
    picture = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    assert (decoded(png.encode(picture)) == picture).all()
    turned = picture[::-1, ::-1]  # not contiguous
    assert (decoded(png.encode(turned)) == turned).all()


def test_others_read_it() -> None:
    from PIL import Image

    picture = np.random.default_rng(1).integers(0, 256, (9, 11, 3), np.uint8)
    with Image.open(io.BytesIO(png.encode(picture))) as read:
        assert (np.asarray(read) == picture).all()


def test_what_repeats_itself_is_small() -> None:
    row = np.random.default_rng(2).integers(0, 256, (1, 960, 3), np.uint8)
    assert len(png.encode(np.broadcast_to(row, (480, 960, 3)))) < 10_000
