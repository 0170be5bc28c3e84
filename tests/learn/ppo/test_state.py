"""What PPO keeps from update to update: counts, statistics, schedules, snapshots, and nothing of an update that fails."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.core import BatchSpec, NDArray, RowCounts
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.ppo.learner import PPO
from freewheel.learn.spec import LearnerSpec, WorldFacts
from freewheel.ledger import balance
from freewheel.policies.spec import PolicySpec
from tests.support.learning import Spy, play, sign, to_tensors

SPEC = PolicySpec(4, "float32", ((0, 4),), ((0, 4),), (), None, "categorical", 3, (16,), "tanh", 0.0, "")
NORMALISED = replace(SPEC, normalised=((0, 1), (2, 4)))
SHAPE = (8, 3)
ROWS = 24


def learner_for(
    spec: PolicySpec = SPEC, config: PPOConfig | None = None, *, seed: int = 0, total: int | None = None, **batch: Any
) -> PPO:
    config = config or PPOConfig(lr=1e-2, epochs=2, minibatch=8)
    return PPO(config, LearnerSpec(policy=spec, batch=BatchSpec(8, 3, **batch), seed=seed, total_steps=total))


def weights_and_adam(learner: PPO) -> dict[str, NDArray]:
    state = learner.state_dict()
    return {name: np.array(state[name]) for name in ("params", "adam.mean", "adam.square", "adam.steps")}


def assert_identical(one: Mapping[str, NDArray], other: Mapping[str, NDArray]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.tobytes() == other[name].tobytes(), name


def test_the_guard_takes_back_minibatches_that_were_fine() -> None:
    learner = learner_for(config=PPOConfig(lr=1e-2, epochs=1, minibatch=6))
    spy = Spy(learner)
    before = weights_and_adam(learner)
    spy.slope = 1.0
    calls = 0

    def third_time_unlucky(*batch: object) -> object:
        nonlocal calls
        calls += 1
        spy.slope = math.nan if calls == 3 else 1.0
        return spy.gradient(*batch)  # type: ignore[arg-type]

    learner.engine.gradient = third_time_unlucky  # type: ignore[union-attr, method-assign]
    learner.observe(sign(play(SPEC, learner.snapshot(), SHAPE)))
    learner.update()
    assert calls == 3
    assert_identical(weights_and_adam(learner), before)


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12), seed=st.integers(0, 99), wrong=st.integers(0, 3))
def test_every_row_is_on_the_books(sizes: list[int], seed: int, wrong: int) -> None:
    learner = learner_for(config=PPOConfig(epochs=1))
    delivered = 0
    for sequence, steps in enumerate(sizes):
        data = play(SPEC, learner.snapshot(), (steps, 3), seed + sequence, gaps=True)
        if sequence % 4 == wrong:
            data.reward[:] = np.nan
        chunk = sign(data, version=learner.version, sequence=sequence)
        learner.observe(chunk)
        delivered += chunk.rows
        while learner.ready:
            learner.update()
        rows = balance(RowCounts(produced=delivered), learner.rows())
        assert rows.queued < ROWS
        assert rows.trained + sum(rows.dropped.values()) == learner.version * ROWS


def test_it_is_hungry_until_it_is_ready() -> None:
    learner = learner_for()
    for step in range(8):
        assert (learner.ready, learner.hungry, learner.buffer_util) == (False, True, step / 8)
        learner.observe(sign(play(SPEC, learner.snapshot(), (1, 3), step), sequence=step))
    assert (learner.ready, learner.hungry, learner.buffer_util) == (True, False, 1)
    assert learner.rows() == RowCounts(queued=ROWS)
    learner.update()
    assert (learner.ready, learner.hungry) == (False, True)


@pytest.mark.parametrize("simulated", [False, True])
def test_nothing_older_than_the_lag_is_ever_learned_from(simulated: bool) -> None:
    """Neither what comes too late, nor what was held too long: both are on the books as stale."""
    spec = replace(learner_for(max_lag=1).spec, world=WorldFacts(batched_on_device=simulated))
    learner = PPO(PPOConfig(epochs=1), spec)
    data = play(SPEC, learner.snapshot(), (10, 3), 0)

    def observe(steps: slice = slice(None), *, version: int, sequence: int = 0) -> None:
        chunk = sign(data, steps, version=version, sequence=sequence)
        learner.observe(to_tensors(chunk) if simulated else chunk)

    observe(version=0)  # six rows more than the update takes
    learner.update()
    assert learner.rows() == RowCounts(trained=ROWS, queued=6)
    observe(slice(0, 7), version=1, sequence=1)
    assert learner.update()["lag_max"] == 1
    assert learner.rows() == RowCounts(trained=2 * ROWS, queued=3)
    observe(slice(0, 8), version=0, sequence=2)
    assert learner.rows() == RowCounts(trained=2 * ROWS, queued=3, dropped={"stale": 24})
    observe(slice(0, 9), version=2, sequence=3)
    assert learner.update()["lag_max"] == 1
    observe(slice(0, 8), version=3, sequence=4)
    learner.update()
    assert learner.version == 4
    assert learner.rows().queued == 6


def test_held_rows_that_grow_too_old_are_dropped_and_the_books_are_restored() -> None:
    learner = learner_for(config=PPOConfig(epochs=1), max_lag=0)
    data = play(SPEC, learner.snapshot(), (10, 3), 0)
    learner.observe(sign(data, version=0))
    learner.update()
    assert learner.rows() == RowCounts(trained=ROWS, dropped={"stale": 6})
    twin = learner_for(config=PPOConfig(epochs=1), max_lag=0)
    data.reward[0, 0] = np.nan
    learner.observe(sign(data, slice(0, 8), version=1, sequence=1))
    learner.update()
    twin.load_state_dict(learner.state_dict())
    assert twin.version == 2
    assert twin.rows() == learner.rows() == RowCounts(trained=ROWS, dropped={"stale": 6, "nan": ROWS})


def test_an_update_may_be_of_whole_chunks() -> None:
    learner = learner_for(config=PPOConfig(epochs=1), episodes=2)
    trained = 0
    for sequence, steps in enumerate((3, 5, 2, 9)):
        assert not learner.ready
        learner.observe(sign(play(SPEC, learner.snapshot(), (steps, 1), sequence), sequence=sequence))
        assert learner.buffer_util == (1 if sequence % 2 else 0.5)
        if sequence % 2:
            assert learner.ready
            learner.update()
            trained = learner.rows().trained
            assert learner.rows().queued == 0
    assert trained == 19


def test_an_update_trains_with_its_own_versions_statistics() -> None:
    learner = learner_for(NORMALISED, PPOConfig(epochs=1, minibatch=1000))
    spy = Spy(learner)
    seen: list[NDArray] = []
    mean, scale = np.zeros(4), np.ones(4)
    for version in range(3):
        snapshot = learner.snapshot()
        np.testing.assert_allclose(snapshot.params["norm.mean"], mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(snapshot.params["norm.scale"], scale, rtol=1e-5)
        data = play(NORMALISED, snapshot, SHAPE, version, gaps=False)
        data.obs[..., 2] += 5 * version
        learner.observe(sign(data, version=version, sequence=version))
        learner.update()
        rows = data.obs.reshape(-1, 4).astype(np.float64)
        expected = (rows - mean) * scale
        np.testing.assert_allclose(spy.batches[-1].inputs, np.clip(expected, -10, 10), rtol=1e-4, atol=1e-5)
        seen.append(rows)
        so_far = np.concatenate(seen)
        mean, scale = so_far.mean(axis=0), 1 / np.sqrt(so_far.var(axis=0) + 1e-8)
        mean[1], scale[1] = 0, 1  # a column that is not normalised


def test_rows_in_gaps_are_no_statistics() -> None:
    learner = learner_for(NORMALISED, PPOConfig(epochs=1))
    data = play(NORMALISED, learner.snapshot(), (20, 3), gaps=True)
    data.obs[~data.valid] = np.nan
    learner.observe(sign(data))
    learner.update()
    np.testing.assert_allclose(
        learner.snapshot().params["norm.mean"][2:], data.obs[data.valid].mean(axis=0)[2:], rtol=1e-4
    )


def test_rewards_are_divided_by_the_deviation_of_returns() -> None:
    """Without a future the value target is the reward and the return is the reward."""
    learner = learner_for(SPEC, PPOConfig(gamma=0.0, epochs=1, minibatch=1000, reward_scale="returns"))
    spy = Spy(learner)
    seen = np.zeros(0)
    for version in range(2):
        data = play(SPEC, learner.snapshot(), SHAPE, version)
        reward = 50 * data.reward
        learner.observe(sign(replace(data, reward=reward), version=version, sequence=version))
        seen = np.concatenate([seen, reward.ravel()])
        learner.update()
        np.testing.assert_allclose(spy.batches[-1].value, reward.ravel() / seen.std(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "constant"])
def test_what_is_linear_falls_to_nothing_over_the_budget(kind: str) -> None:
    schedules: dict[str, Any] = {f"{name}_schedule": kind for name in ("lr", "clip", "entropy")}
    learner = learner_for(SPEC, PPOConfig(lr=0.01, clip=0.2, entropy=0.1, epochs=1, **schedules), total=4 * ROWS)
    spy = Spy(learner)
    spy.slope = 1e-3  # a gradient that never changes moves every weight by one step size a step
    for version, left in enumerate([1.0, 0.75, 0.5, 0.25, 0.0, 0.0] if kind == "linear" else [1.0] * 6):
        before = learner.engine.net.array.copy()
        learner.observe(sign(play(SPEC, learner.snapshot(), SHAPE, version), version=version, sequence=version))
        learner.update()
        np.testing.assert_allclose(before - learner.engine.net.array, 0.01 * left, rtol=0.02, atol=1e-7)
        assert spy.coefficients[-1][:3] == pytest.approx((0.01 * left, 0.2 * left, 0.1 * left))


@pytest.mark.parametrize(("target", "steps"), [(None, 6), (0.1, 6), (0.05, 4), (0.01, 1)])
def test_an_update_stops_when_the_policy_has_moved_too_far(target: float | None, steps: int) -> None:
    """Beyond one and a half times the target nothing more is stepped."""
    learner = learner_for(SPEC, PPOConfig(epochs=2, minibatch=8, target_kl=target))
    spy = Spy(learner)
    spy.slope, spy.kl = 1.0, [0.0, 0.02, 0.07, 0.075, 0.08, 0.12]
    learner.observe(sign(play(SPEC, learner.snapshot(), SHAPE)))
    about = learner.update()
    assert learner.state_dict()["adam.steps"] == steps
    assert learner.rows() == RowCounts(trained=ROWS)
    assert about["policy/kl"] == pytest.approx(np.mean([0.0, 0.02, 0.07, 0.075, 0.08, 0.12][: steps + 1]))
