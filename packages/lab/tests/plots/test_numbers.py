"""Tests of the formatting of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from freewheel_lab.plots import numbers
from freewheel_lab.plots.chart import log_ticks, thinned, ticks


@pytest.mark.parametrize(
    ("show", "shown"),
    [
        (numbers.number, {
            0: "0", 1234.5: "1,234", 12.345: "12.3", 1.5: "1.5", 0.01234: "0.0123", 99.96: "100", 999.6: "1,000",
            -3.14159: "-3.14", 1234567: "1,234,567", 3e-9: "3.00e-09", None: "–", math.nan: "–", math.inf: "–"}),
        (numbers.duration, {
            0.84: "0.84 s", 12.34: "12.3 s", 59.97: "1 min", 60: "1 min", 200.4: "3 min 20 s", 3599.9: "1 h", 3600: "1 h",
            7980: "2 h 13 min", 86399: "1 d", 86400 * 4 + 3 * 3600 + 5: "4 d 3 h", 0: "0 s", None: "–"}),
        (numbers.times, {1: "1.00×", 3.14: "3.14×", 12.34: "12.3×", 321.0: "321×", None: "–"}),
        (numbers.percent, {0: "0 %", 0.034: "3.4 %", 0.12: "12 %", 1.5: "150 %", None: "–"}),
        (numbers.megabytes, {412.3: "412 MB", 2048: "2.0 GB", None: "–"}),
        (numbers.short, {250: "250", 1500: "1.5k", 2e4: "20k", 3e6: "3M", None: "–"}),
    ],
)  # fmt: skip
def test_a_number_in_its_unit(show: Callable[[float | None], str], shown: dict[float | None, str]) -> None:
    assert {value: show(value) for value in shown} == shown


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 0), (-3, 7), (5, 5), (0.001, 0.0014), (99, 101), (0, 123456), (-9, -9)]
)
def test_ticks_are_few_and_hold_what_is_between(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low <= high <= found[-1]
    assert 2 <= len(found) <= 6
    assert found == sorted(set(found))


def test_ticks_of_a_logarithmic_axis() -> None:
    assert log_ticks(1, 200) == [1, 2, 5, 10, 20, 50, 100, 200]
    assert log_ticks(3, 3) == [2, 5]


def test_thinning_keeps_the_ends() -> None:
    assert thinned(range(10), 20) == list(range(10))
    assert thinned(range(100), 3) == [0, 50, 99]
