"""One world that is far slower than the rest: the others do not wait for it, and it is named, and nobody else is."""

from __future__ import annotations

import time

import pytest

from tests.support.chaos import LONG, MODES, trial, world

WORKERS = 8
STEP_S = 0.005
SHARE, WATCHED_S = (0.95, 15.0) if LONG else (0.4, 0.8)  # the machine may be busy with other things


@pytest.mark.parametrize("mode", ["continuous", "episodes"])
def test_the_others_do_not_wait_for_the_slow_one(mode: str) -> None:
    """As fast as 7 of 8 of a twin where nobody is slow; in the short form, as 7 workers that do nothing but sleep."""
    twin = rows(mode, factor=1.0) if LONG else WORKERS * WATCHED_S / STEP_S
    assert rows(mode, factor=100.0) > SHARE * (WORKERS - 1) / WORKERS * twin


def rows(mode: str, factor: float) -> float:
    """That are delivered while it is watched."""
    args = {"seconds": STEP_S, "factor": factor}
    with trial(world("Slow"), mode, workers=WORKERS, num_envs=WORKERS, env_args=args) as on:
        on.run(lambda: len(on.audit.incarnations()) >= WORKERS - 1)
        on.learn(2)
        return on.run_for(WATCHED_S)


@pytest.mark.parametrize("mode", MODES)
def test_the_slow_one_is_named_soon_and_nobody_else(mode: str) -> None:
    with trial(world("Slow"), mode, workers=4, num_envs=4, env_args={"seconds": 0.0005, "only": 2}) as on:
        began = time.monotonic()
        on.run(lambda: "slow" in on.told)
        assert time.monotonic() - began < 10.0
        on.run_for(0.3)
        named = [text for text in on.messages if "slow" in text]
        assert [text.startswith("worker 2 is slow: ") for text in named] == [True]


@pytest.mark.parametrize("mode", MODES if LONG else ["continuous"])
def test_where_all_are_alike_nobody_is_called_slow(mode: str) -> None:
    """Though a fragment takes longer than the window that steps are averaged over."""
    args = {"seconds": 0.4 if LONG else 0.03}
    with trial(world("Certified"), mode, workers=6, num_envs=6, env_args=args) as on:
        on.run_for(20.0 if LONG else 0.8)
        assert on.messages == []
