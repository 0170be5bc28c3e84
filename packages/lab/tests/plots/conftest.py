"""Matplotlib opens and keeps its font files here, so that the check for leftovers does not count them."""

from __future__ import annotations

from pathlib import Path

import pytest

from freewheel_lab.plots import picture
from freewheel_lab.plots.chart import Bar, BarChart


@pytest.fixture(scope="session", autouse=True)
def fonts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fonts")
    for ending in picture.FORMATS:
        picture.write([BarChart("x", "x", "x", (Bar("–", 1.0),))], folder / f"x.{ending}", title="x")
    return folder
