"""scripts/durations.py: where the seconds of a test are added up."""

from __future__ import annotations

import pytest

from scripts.durations import folder


@pytest.mark.parametrize(
    ("test", "row"),
    [
        ("tests/run/checkpoints/test_x.py::test_y", "run"),
        ("tests/test_x.py::test_y", "(top level)"),
        ("packages/lab/tests/compare/test_x.py::test_y", "packages/lab"),
        ("packages/watch/tests/test_x.py::test_y", "packages/watch"),
    ],
)
def test_a_folder_and_a_package_have_a_row_each(test: str, row: str) -> None:
    assert folder(test) == row
