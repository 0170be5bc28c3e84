"""Averages and pooled statistics agree with closed forms, and their properties hold for any numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.core import ActionSpec, EnvSpec, NDArray, Slice
from freewheel.learn.moments import RunningMoments
from freewheel.learn.spec import OBS_STATISTICS, POLICY
from freewheel.policies.spec import PolicyConfig
from freewheel_ray.federate.average import (
    Contribution,
    average,
    bounded,
    distance,
    joined,
    round_of,
    weights_of,
    without,
)

NUMBERS = st.floats(-1e3, 1e3, width=32)


def statistics(rows: NDArray) -> NDArray:
    moments = RunningMoments[NDArray](rows.shape[1])
    moments.add(rows)
    return moments.state()


def test_weights_count_by_rows_and_keep_their_type() -> None:
    base = {"w": np.zeros(2, np.float32)}
    sites = [
        Contribution({"w": np.array([1, 10], np.float32)}, 300),
        Contribution({"w": np.array([5, 2], np.float32)}, 100),
    ]
    mean = average(base, sites)
    assert mean["w"].tolist() == [2.0, 8.0]
    assert mean["w"].dtype == np.float32
    # The squared distances are 1 + 4 with 3/4 of the rows and 9 + 36 with 1/4; the squared norm of the mean is 68.
    assert distance(mean, sites) == pytest.approx(math.sqrt((0.75 * 5 + 0.25 * 45) / 68))


@given(st.lists(st.tuples(NUMBERS, st.integers(1, 10**9)), min_size=1, max_size=6))
def test_an_average_lies_between_its_sites_whatever_their_order(sites: list[tuple[float, int]]) -> None:
    base = {"w": np.zeros((), np.float32)}
    found = [Contribution({"w": np.full((), value, np.float32)}, rows) for value, rows in sites]
    mean, again = average(base, found)["w"], average(base, found[::-1])["w"]
    low, high = min(value for value, _ in sites), max(value for value, _ in sites)
    assert np.float32(low) - 1e-3 <= mean <= np.float32(high) + 1e-3
    assert mean == pytest.approx(again, rel=1e-6, abs=1e-6)


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 40), min_size=2, max_size=4))
def test_statistics_of_sites_are_those_of_all_their_rows(seed: int, counts: list[int]) -> None:
    rng = np.random.default_rng(seed)
    before = rng.normal(3.0, 2.0, (10, 3)).astype(np.float32)
    parts = [rng.normal(-1.0, 5.0, (count, 3)).astype(np.float32) for count in counts]
    base = {OBS_STATISTICS: statistics(before)}
    sites = []
    for rows in parts:  # each continues from the same base and sends the statistics of its new rows
        moments = RunningMoments[NDArray](3)
        moments.restore(base[OBS_STATISTICS])
        moments.add(rows)
        sites.append(Contribution(round_of({OBS_STATISTICS: moments.state()}, base), max(1, len(rows))))
    pooled = average(base, sites)[OBS_STATISTICS]
    np.testing.assert_allclose(pooled, statistics(np.concatenate([before, *parts])), rtol=1e-6, atol=1e-6)


def test_statistics_count_for_no_more_rows_than_they_may() -> None:
    rows = np.random.default_rng(0).normal(2.0, 3.0, (40, 2))
    found, same = bounded({OBS_STATISTICS: statistics(rows)}, 10), statistics(rows)
    mean, square = found[OBS_STATISTICS][:2], found[OBS_STATISTICS][2:4]
    np.testing.assert_allclose((mean, square / 10), (rows.mean(0), rows.var(0)))
    assert found[OBS_STATISTICS][-1] == 10
    assert bounded({OBS_STATISTICS: same}, 40)[OBS_STATISTICS] is same
    with pytest.raises(ValueError, match="does not hold statistics of rows"):
        bounded({OBS_STATISTICS: -same}, 40)


def test_a_part_can_be_taken_out_of_a_whole() -> None:
    rng = np.random.default_rng(0)
    one, other = statistics(rng.normal(size=(30, 2))), statistics(rng.normal(9.0, 3.0, (20, 2)))
    np.testing.assert_allclose(without(joined(one, other), one), other, rtol=1e-9)
    assert not without(one, one).any(), "nothing is left"
    np.testing.assert_array_equal(joined(np.zeros(5), np.zeros(5)), np.zeros(5))


def test_the_weights_of_a_checkpoint_read_observations_by_the_pooled_statistics() -> None:
    world = EnvSpec("toy", 2, 3, "float32", (Slice("policy", 0, 3, (3,)),), ActionSpec("discrete", 2))
    policy = PolicyConfig(hidden=(2,), normalize_obs=True).resolve(world)
    rows = np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 7.0]])
    learned = {f"{POLICY}norm.mean": np.zeros(3, np.float32), f"{POLICY}norm.scale": np.ones(3, np.float32)}
    weights = weights_of(learned | {OBS_STATISTICS: statistics(rows), "critics": np.zeros(4)}, policy)
    assert weights.keys() == {"norm.mean", "norm.scale"}, "what acts, under its own names"
    assert weights["norm.mean"].tolist() == [2.0, 2.0, 5.0]
    np.testing.assert_allclose(weights["norm.scale"][[0, 2]], [1.0, 0.5])
    assert not learned[f"{POLICY}norm.mean"].any(), "what was given is as before"
