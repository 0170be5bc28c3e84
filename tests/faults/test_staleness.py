"""Old rows: none older than --max-lag is trained on, whatever steps take; what comes too late is counted, and shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import freewheel
from tests.support.chaos import LONG, SEED, Trial, trial, world

UPDATES = 400 if LONG else 8
#: Steps that take 1 ms and, one in a hundred, 200: ten times the patience of the learner.
RARE = {"seconds": 0.001, "rate": 0.01, "how": "naps"}


@contextmanager
def napping(mode: str, max_lag: int | None, **options: Any) -> Iterator[Trial]:
    lag = {} if max_lag is None else {"max_lag": max_lag}
    with trial(world("Mishap"), mode, workers=6, num_envs=6, env_args=RARE, **lag, **options) as on:
        on.wait_for_workers()
        on.learn(UPDATES, limit=120.0)
        yield on


@pytest.mark.parametrize(
    ("mode", "max_lag"),
    [
        ("continuous", 0),
        ("episodes", 1),
        ("continuous", 2),
        *[("episodes", 0), ("continuous", 1), ("episodes", 2)] * LONG,
    ],
)
def test_no_row_is_trained_on_that_is_older_than_max_lag(mode: str, max_lag: int) -> None:
    with napping(mode, max_lag) as on:
        assert max(on.witness.lags) <= max_lag
        assert on.meter.totals()["lag_max"] == max(on.witness.lags)
        assert on.dropped.keys() <= {"stale"}
        if mode == "continuous":  # it is paced, not thrown away: a row for each nap, and the rest of its step
            assert on.dropped.get("stale", 0) < 0.05 * on.balance().produced
        assert sum(on.witness.lags.values()) == on.balance().trained


def test_in_batch_the_lag_is_one_whatever_steps_take() -> None:
    with napping("batch", None) as on:
        assert on.witness.lags.keys() == {0, 1}
        assert on.witness.lags[0] == 6 * 16  # the first batch
        assert on.dropped == {}


def test_the_books_tell_which_episodes_are_missing(tmp_path: Any) -> None:
    """Episodes with a nap are dropped more often: their seconds show it, produced beside trained."""
    result = freewheel.train(
        world("Mishap"), mode="continuous", workers=6, num_envs=6, num_steps_per_env=16, max_lag=0, env_args=RARE,
        steps=40_000 if LONG else 2_000, evals=0, seed=SEED, quiet=True, runs_dir=tmp_path, policy={"hidden": [8]},
    )  # fmt: skip
    produced, trained = (result.summary[f"episodes_{which}"] for which in ("produced", "trained"))
    assert produced.keys() == trained.keys() == {"count", "length_mean", "seconds_mean"}
    assert 0 < trained["count"] <= produced["count"]
    assert result.summary["lag_max"] == 0
    assert result.summary["dropped"].keys() <= {"stale", "shutdown"}
    assert result.summary["dropped"]["stale"] > 0
    assert trained["seconds_mean"] <= produced["seconds_mean"]
