"""Three tiers of tests, by what a test needs and by the time it takes; a test that outgrows its tier fails.

*unit* is the default. `pytest.mark.system` and `pytest.mark.long` put a test, a class or a module (`pytestmark`) into another
tier; what NEEDS names is put there by itself. docs/testing.md says what belongs where.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Generator, Iterable
from pathlib import Path

import pytest

#: Seconds that a test of a tier may take on a quiet machine, set-up of shared fixtures apart.
LIMITS = {"unit": 2.0, "system": 15.0, "long": 120.0}
#: A test fails when it takes this many times as long: the same test varies by a factor of two from run to run, ...
SLACK = 3.0
#: ... and more on a machine that needs longer than this for LOOPS turns of a loop, or that is busy.
REFERENCE, LOOPS = 0.016, 300_000
#: Folders and files whose tests need another program, another machine's worth of processes, or the built package.
NEEDS = {
    "packages/ray/tests/actors": "system",
    "packages/ray/tests/cluster": "long",  # three Ray nodes
    "packages/ray/tests/mode": "system",
    "tests/gpu": "system",
    "tests/test_benchmarks.py": "long",
}


def pytest_configure(config: pytest.Config) -> None:
    for tier, limit in LIMITS.items():
        config.addinivalue_line("markers", f"{tier}: a test of at most {limit:g} s, see docs/testing.md")


def tier_of(item: pytest.Item) -> str:
    """The highest tier that the test is marked with or that what it needs belongs to."""
    path = Path(item.path).relative_to(item.config.rootpath).as_posix()
    asked = {mark.name for mark in item.iter_markers()}
    asked |= {tier for place, tier in NEEDS.items() if path == place or path.startswith(f"{place}/")}
    return next(tier for tier in reversed(LIMITS) if tier in asked or tier == "unit")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """Give every test the mark of its tier, which `-m` selects by."""
    for item in items:
        if (tier := tier_of(item)) not in item.keywords:
            item.add_marker(tier)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    began = time.perf_counter()
    result = yield
    took, tier = time.perf_counter() - began, tier_of(pyfuncitem)
    if took > (most := LIMITS[tier] * SLACK * busy()):
        pytest.fail(outgrown(tier, took, most), pytrace=False)
    return result


def busy() -> float:
    """How many times longer than on a quiet, fast machine a test may take."""
    return slowness() * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


@functools.cache
def slowness() -> float:
    """Of this machine, by processor time, which other programs do not change much."""

    def seconds() -> float:
        began, total = time.process_time(), 0
        for number in range(LOOPS):
            total += number * number % 7
        return time.process_time() - began

    return max(1.0, min(seconds() for _ in range(3)) / REFERENCE)


def outgrown(tier: str, took: float, most: float) -> str:
    """What a test is told that takes too long."""
    higher = {"unit": "system", "system": "long"}.get(tier)
    move = f", or mark it pytest.mark.{higher} if it cannot" if higher else ""
    return f"this test took {took:.1f} s, where tier {tier} allows {most:.1f} s: make it faster{move} (docs/testing.md)"
