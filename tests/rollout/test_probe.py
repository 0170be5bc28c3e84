"""Trying a world out: actions that are allowed and even, and what a step costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from freewheel.core import ActionSpec, EnvSpec, NDArray, Slice, Step
from freewheel.rollout.probe import random_actions, step_cost

if TYPE_CHECKING:
    from tests.rollout.conftest import Stage

LANES = 30_000


def spec(action: ActionSpec, *slices: Slice) -> EnvSpec:
    return EnvSpec("Toy-v0", LANES, 5, "float32", slices, action)


def test_boxes_are_drawn_evenly_between_the_bounds() -> None:
    action = random_actions(spec(ActionSpec("box", 2)), np.zeros((LANES, 5)), np.random.default_rng(0))
    assert action.shape == (LANES, 2)
    assert action.dtype == np.float32
    assert np.abs(action).max() <= 1
    assert np.abs(action.mean(axis=0)).max() < 4 / np.sqrt(3 * LANES)
    assert action.var(axis=0) == pytest.approx(1 / 3, rel=0.03)


@pytest.mark.parametrize("allowed", [[1, 1, 1], [0, 1, 1], [1, 0, 1], [0, 0, 1]])
def test_choices_are_drawn_evenly_among_the_allowed(allowed: list[int]) -> None:
    masked = spec(ActionSpec("discrete", 3), Slice("action_mask", 1, 4, (3,)))
    obs = np.tile(np.array([9, *allowed, 9], np.float32), (LANES, 1))
    action = random_actions(masked, obs, np.random.default_rng(0))
    counts = np.bincount(action, minlength=3)
    expected = LANES / sum(allowed)
    assert action.dtype == np.int64
    assert not counts[np.array(allowed) == 0].any()
    assert np.abs(counts[np.array(allowed) == 1] - expected).max() < 4 * np.sqrt(expected)


def test_choices_without_a_mask_are_all_allowed() -> None:
    action = random_actions(spec(ActionSpec("discrete", 4)), np.zeros((LANES, 5)), np.random.default_rng(0))
    assert np.bincount(action, minlength=4) == pytest.approx(LANES / 4, abs=4 * np.sqrt(LANES / 4))


@pytest.mark.parametrize(("cost", "limit", "steps"), [(0.001, 1.0, 20), (0.1, 0.25, 3), (9.0, 0.3, 1)])
def test_a_steps_cost_is_measured_after_a_first_one_and_within_a_limit(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, cost: float, limit: float, steps: int
) -> None:
    seconds = 50.0
    world = stage.recipe.make(range(4))
    take = world.step

    def step(action: NDArray) -> Step:
        nonlocal seconds
        seconds += 100.0 if stage.world.steps == 0 else cost
        return take(action)

    monkeypatch.setattr(world, "step", step)
    monkeypatch.setattr("freewheel.rollout.probe.perf_counter", lambda: seconds)
    monkeypatch.setattr("freewheel.rollout.probe.process_time", lambda: seconds / 2)
    assert step_cost(world, seed=3, steps=20, limit=limit) == pytest.approx((cost / 4, cost / 8))
    assert stage.world.steps == steps + 1
