"""What the environments of a process are doing, by what they have written down."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from freewheel.metrics.workers import own_environments
from freewheel.rollout import call_state as at
from freewheel.rollout.call_state import ALL, CALL, CONSTRUCT, ELSEWHERE, RESET, cells


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = bytes(cells)
    for phase, limit in enumerate((120_000, 60_000, 30_000, 0)):
        cells[at.LIMITS + phase] = limit
    yield
    cells.cast("B")[:] = before


def write(phase: int, lane: int, step: int, seconds: float = 5.0) -> None:
    cells[at.SINCE], cells[at.PHASE] = time.monotonic_ns() - int(seconds * 1e9), phase
    cells[at.LANE], cells[at.STEP] = lane, step
    if lane != ALL:
        cells[at.SEEDS + lane] = 77


@pytest.mark.parametrize(
    ("phase", "lane", "step", "told"),
    [
        (CALL, 3, 4, ("step", 3, 77, 4, 30.0)),
        (RESET, 3, 0, ("reset", 3, 77, None, 60.0)),
        (CONSTRUCT, 3, 0, ("construct", 3, None, None, 120.0)),
        (CALL, ALL, 0, ("step", None, None, None, 30.0)),
        (ELSEWHERE, ALL, 0, ("step", None, None, None, 30.0)),  # processes, and none of them takes long
        (ELSEWHERE, 2, 9, ("step", 2, 77, 9, 30.0)),
        (ELSEWHERE, 2, 0, ("reset", 2, 77, None, 60.0)),
    ],
)
def test_a_call_that_goes_on(phase: int, lane: int, step: int, told: tuple[object, ...]) -> None:
    write(phase, lane, step)
    found = own_environments(steps=10, pid=1)
    assert (found.state, found.lane, found.seed, found.step, found.limit_s) == told
    assert 5.0 <= found.since_s < 60.0
    assert (found.worker, found.steps, found.pid) == (0, 10, 1)


def test_between_calls_it_is_their_turn_or_that_of_the_learner() -> None:
    cells[at.SINCE] = 0
    assert own_environments().state == "step"
    waiting = own_environments(idle_since_ns=time.monotonic_ns() - 2_000_000_000)
    assert (waiting.state, waiting.lane) == ("wait-credit", None)
    assert 2.0 <= waiting.since_s < 60.0
