"""Slow environments: no row older than --max-lag is trained on, other workers do not wait, the slow worker is reported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import freewheel
from freewheel.core import NDArray
from tests.support.chaos import Trial, modes, trial, world
from tests.support.places import LONG
from tests.support.pools import wire_of
from tests.support.trainers import SEED

UPDATES = 400 if LONG else 8
#: Steps that take 1 ms and, one in a hundred, 200: ten times the patience of the learner.
RARE = {"seconds": 0.001, "rate": 0.01, "how": "sleeps"}


@contextmanager
def sleeping(mode: str, max_lag: int | None, **options: Any) -> Iterator[Trial]:
    lag = {} if max_lag is None else {"max_lag": max_lag}
    with trial(world("Faulty"), mode, workers=6, num_envs=6, env_args=RARE, **lag, **options) as on:
        on.wait_for_workers()
        on.learn(UPDATES, limit=120.0)
        yield on


@pytest.mark.parametrize(
    ("mode", "max_lag"),
    [
        ("continuous", 0),
        pytest.param("episodes", 1, marks=pytest.mark.system),
        pytest.param("continuous", 2, marks=pytest.mark.system),
        *[("episodes", 0), ("continuous", 1), ("episodes", 2)] * LONG,
    ],
)
def test_no_row_is_trained_on_that_is_older_than_max_lag(mode: str, max_lag: int) -> None:
    with sleeping(mode, max_lag) as on:
        assert max(on.witness.lags) <= max_lag
        assert on.meter.totals()["lag_max"] == max(on.witness.lags)
        assert on.dropped.keys() <= {"stale"}
        if mode == "continuous":  # only the rows of long steps are dropped
            assert on.dropped.get("stale", 0) < 0.05 * on.balance().produced
        assert sum(on.witness.lags.values()) == on.balance().trained


def test_in_batch_the_lag_is_one_for_any_step_times() -> None:
    with sleeping("batch", None) as on:
        assert on.witness.lags.keys() == {0, 1}
        assert on.witness.lags[0] == 6 * 16  # the first batch
        assert on.dropped == {}


@pytest.mark.system
def test_the_summary_shows_which_episodes_are_missing(tmp_path: Any) -> None:
    """Episodes with a long step are dropped more often: compare the seconds of produced and trained episodes."""
    result = freewheel.train(
        world("Faulty"), mode="continuous", workers=6, num_envs=6, num_steps_per_env=16, max_lag=0, env_args=RARE,
        steps=40_000 if LONG else 2_000, evals=0, seed=SEED, quiet=True, runs_dir=tmp_path, policy={"hidden": [8]},
    )  # fmt: skip
    produced, trained = (result.summary[f"episodes_{which}"] for which in ("produced", "trained"))
    assert produced.keys() == trained.keys() == {"count", "length_mean", "seconds_mean"}
    assert 0 < trained["count"] <= produced["count"]
    assert result.summary["lag_max"] == 0
    assert result.summary["dropped"].keys() <= {"stale", "shutdown"}
    assert result.summary["dropped"]["stale"] > 0
    seconds = [episodes["count"] * episodes["seconds_mean"] for episodes in (trained, produced)]
    assert seconds[0] <= seconds[1] * (1 + 1e-9)
    if LONG:  # a mean over few episodes may go either way: the last ones are dropped whatever they took
        assert trained["seconds_mean"] <= produced["seconds_mean"]


WORKERS = 8
STEP_S = 0.003


@pytest.mark.parametrize("mode", ["continuous", pytest.param("episodes", marks=pytest.mark.system)])
def test_other_workers_do_not_wait_for_a_slow_one(mode: str) -> None:
    """They take far more steps than the one whose steps take a hundred times as long."""
    args = {"seconds": STEP_S, "factor": 100.0}
    with trial(world("Slow"), mode, workers=WORKERS, num_envs=WORKERS, env_args=args) as on:
        on.run(lambda: len(on.audit.incarnations()) >= WORKERS - 1)
        on.learn(2)
        before = heartbeats(on)
        on.run(lambda: bool((heartbeats(on)[1:] - before[1:]).min() >= 100))
        assert (heartbeats(on) - before)[0] < 50


def heartbeats(on: Trial) -> NDArray:
    """Steps of each worker so far."""
    return wire_of(on.collector).heartbeats.memory["steps"].copy()


@pytest.mark.parametrize("mode", modes("continuous"))
def test_only_the_slow_worker_is_reported(mode: str) -> None:
    with trial(world("Slow"), mode, workers=4, num_envs=4, env_args={"seconds": 0.0005, "only": 2}) as on:
        on.run(lambda: "slow" in on.shown)
        on.run_for(0.3)
        reports = [text for text in on.messages if "slow" in text]
        assert [text.startswith("worker 2 is slow: ") for text in reports] == [True]


@pytest.mark.parametrize("mode", modes("continuous") if LONG else ["continuous"])
def test_no_worker_is_reported_if_all_are_equally_slow(mode: str) -> None:
    """Even if a fragment takes longer than the window over which steps are averaged."""
    with trial(world("Certified"), mode, workers=6, num_envs=6, env_args={"seconds": 0.4 if LONG else 0.03}) as on:
        on.learn(2, limit=120.0)
        assert on.messages == []
