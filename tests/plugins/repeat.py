"""`--times N`: every selected test N times, which `make torture` does beside a program that takes the processor away."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=int, default=1, help="run every test so many times")


@pytest.fixture
def _time(request: pytest.FixtureRequest) -> int:
    """Which of the repetitions this is."""
    return int(request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if (times := metafunc.config.getoption("times")) > 1:
        metafunc.fixturenames.append("_time")
        metafunc.parametrize("_time", range(times), indirect=True, ids=lambda number: f"time {number}")
