"""scripts/sizes.py: what is measured, and what is too much."""

from __future__ import annotations

from scripts import sizes
from tests.support.places import ROOT


def test_every_package_has_a_number_of_its_own() -> None:
    assert (
        {*sizes.packages()}
        == {*sizes.LINES}
        == {"freewheel", *(f"freewheel_{p.name}" for p in ROOT.glob("packages/*"))}
    )


def test_totals_have_limits() -> None:
    lines = {name: limit for name, (limit, _) in sizes.LINES.items()}
    whole = sum(lines.values())
    rows = {name: (count, limit) for name, count, limit in sizes.totals({**lines, "freewheel_new": 1}, whole)}
    assert all(rows[name] == (limit, limit) for name, limit in lines.items())
    assert rows["freewheel_new"] == (1, 0)
    assert rows["the engine and its packages"] == (whole + 1, sizes.TOGETHER[0])
    assert rows["all tests"] == (whole, whole + 1 + sizes.TESTS_BEYOND[0])


def test_folders_have_few_modules() -> None:
    modules = {"freewheel": 9, "freewheel.run": 12, "freewheel_lab": 12, "freewheel_lab.tune": 13}
    assert [*sizes.full_folders(modules)] == [
        "freewheel has 9 modules, at most 8",
        "freewheel_lab.tune has 13 modules, at most 12",
    ]
