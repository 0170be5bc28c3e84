"""Random actions are allowed and uniform; the cost of a step is measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from freewheel.core import ActionSpec, EnvSpec, NDArray, SeedStream, Slice, Step
from freewheel.envs.gym import GymConfig
from freewheel.rollout.probe import random_actions, step_cost

LANES = 30_000


def spec(action: ActionSpec, *slices: Slice) -> EnvSpec:
    return EnvSpec("Toy-v0", LANES, 5, "float32", slices, action)


def test_box_actions_are_uniform_between_the_bounds() -> None:
    action = random_actions(spec(ActionSpec("box", 2)), np.zeros((LANES, 5)), np.random.default_rng(0))
    assert action.shape == (LANES, 2)
    assert action.dtype == np.float32
    assert np.abs(action).max() <= 1
    assert np.abs(action.mean(axis=0)).max() < 4 / np.sqrt(3 * LANES)
    assert action.var(axis=0) == pytest.approx(1 / 3, rel=0.03)


@pytest.mark.parametrize("allowed", [[1, 1, 1], [0, 1, 1], [1, 0, 1], [0, 0, 1]])
def test_discrete_actions_are_uniform_over_the_allowed_ones(allowed: list[int]) -> None:
    masked = spec(ActionSpec("discrete", 3), Slice("action_mask", 1, 4, (3,)))
    obs = np.tile(np.array([9, *allowed, 9], np.float32), (LANES, 1))
    action = random_actions(masked, obs, np.random.default_rng(0))
    counts = np.bincount(action, minlength=3)
    expected = LANES / sum(allowed)
    assert action.dtype == np.int64
    assert not counts[np.array(allowed) == 0].any()
    assert np.abs(counts[np.array(allowed) == 1] - expected).max() < 4 * np.sqrt(expected)


def test_without_a_mask_all_actions_are_allowed() -> None:
    action = random_actions(spec(ActionSpec("discrete", 4)), np.zeros((LANES, 5)), np.random.default_rng(0))
    assert np.bincount(action, minlength=4) == pytest.approx(LANES / 4, abs=4 * np.sqrt(LANES / 4))


class Timed:
    """Four lanes; a step takes `cost` seconds, the first one 100; a reset, after every second step, takes 7 seconds."""

    def __init__(self, cost: float) -> None:
        self.env = GymConfig("tests.support.worlds:Counter", {"length": 2}).make(range(4))
        self.cost, self.seconds, self.steps, self.ended = cost, 50.0, 0, False

    @property
    def spec(self) -> EnvSpec:
        return self.env.spec

    def reset(self, seeds: Sequence[SeedStream]) -> NDArray:
        return self.env.reset(seeds)

    def step(self, action: NDArray) -> Step:
        self.seconds += self.cost if self.steps else 100.0
        self.steps += 1
        step = self.env.step(action)
        self.ended = bool(step.terminated.all())
        return step

    def set_context(self, context: NDArray) -> None:
        self.env.set_context(context)

    def autoreset(self) -> NDArray:
        self.seconds, self.ended = self.seconds + 7.0 * self.ended, False
        return self.env.autoreset()

    def render(self) -> None:
        return None

    def close(self) -> None:
        self.env.close()


@pytest.mark.parametrize(
    ("cost", "limit", "steps", "resets"), [(0.001, 99.0, 20, 10), (0.1, 7.25, 3, 1), (0.1, 0.2, 2, 1), (9.0, 0.3, 1, 0)]
)
def test_the_cost_of_a_step_is_measured_after_a_warm_up_and_within_a_limit(
    monkeypatch: pytest.MonkeyPatch, cost: float, limit: float, steps: int, resets: int
) -> None:
    env = Timed(cost)
    monkeypatch.setattr("freewheel.rollout.probe.perf_counter", lambda: env.seconds)
    monkeypatch.setattr("freewheel.rollout.probe.process_time", lambda: env.seconds / 2)
    mean = (steps * cost + resets * 7.0) / (steps * 4)
    assert step_cost(env, seed=3, steps=20, limit=limit) == pytest.approx((mean, mean / 2))
    assert env.steps == steps + 1
