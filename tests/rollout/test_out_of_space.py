"""Observations beyond the bounds of their space: rows are kept and counted, and the user is told once, wherever envs run."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary

from freewheel.core import EnvSpec, NDArray
from freewheel.envs.gym import GymConfig
from freewheel.envs.spaces import layout_of
from freewheel.errors import EnvError
from freewheel.rollout.kernel import numpy_outside, outside
from freewheel.rollout.runner import KEPT, SpaceCheck, empty_transitions
from freewheel.seeding import training_episodes
from tests.support.collecting import Collection, collecting
from tests.support.odd_worlds import Strays

WORLD = "tests.support.odd_worlds:Strays"
TOLD = re.compile(
    r"lane [0-3] of tests\.support\.odd_worlds:Strays gave an observation outside its space: "
    r"column 1 of 'obs' is 7\.25, and its bounds are -1 and 5\n  "
)


def spec_of(space: gymnasium.Space[Any], lanes: int = 1) -> EnvSpec:
    return layout_of(space, Discrete(2)).spec("World", lanes, ())


@pytest.fixture(scope="module")
def spec() -> EnvSpec:
    with closing(GymConfig(WORLD).make(range(1))) as env:
        return env.spec


def test_bounds_are_those_of_boxes_by_column() -> None:
    velocity = Box(np.array([-2, -np.inf], np.float32), np.array([np.inf, 3], np.float32))
    spec = spec_of(Dict(bits=MultiBinary(2), number=Discrete(3), velocity=velocity))
    none = np.inf
    assert spec.bounds is not None
    assert spec.bounds.tolist() == [[0, 0, -none, -none, -none, -2, -none], [1, 1, none, none, none, none, 3]]


@pytest.mark.parametrize(
    "space",
    [
        Box(-np.inf, np.inf, (3,), np.float32),
        Box(np.finfo(np.float32).min, np.finfo(np.float32).max, (3,), np.float32),
        Box(np.finfo(np.float64).min, np.finfo(np.float64).max, (3,), np.float64),
        Box(0, 255, (4, 4, 3), np.uint8),
        Discrete(4),
    ],
    ids=str,
)
def test_the_largest_numbers_of_a_type_are_no_bounds(space: gymnasium.Space[Any]) -> None:
    assert spec_of(space).bounds is None


@pytest.mark.parametrize("count", [numpy_outside, outside], ids=["numpy", "compiled"])
@pytest.mark.parametrize("columns", [1, 4, 37])
def test_rows_are_counted_once(count: Any, columns: int) -> None:
    obs, after = np.random.default_rng(columns).uniform(-1, 1, (2, 8, 3, columns)).astype(np.float32)
    valid, bounds = np.ones((8, 3), np.bool_), np.repeat(np.array([[-1.0], [1.0]], np.float32), columns, axis=1)
    assert count(obs, after, valid, bounds, 8) == 0
    obs[2, 1, 0] = after[2, 1, -1] = 1.5  # one row
    after[3, 0, 0] = -1.5
    after[4] = np.nan  # what is no number is somebody else's business
    obs[5, 2], valid[5, 2] = 9.0, False
    assert [count(obs, after, valid, bounds, steps) for steps in (0, 2, 3, 8)] == [0, 0, 1, 2]
    bounds[:, 0] = -np.inf, np.inf
    assert count(obs, after, valid, bounds, 8) == (0 if columns == 1 else 1)


def test_the_compiled_one_reads_nothing_beyond_its_arrays() -> None:
    if outside is numpy_outside:
        pytest.skip("it is not built")
    rows = np.zeros((2, 1, 3), np.float32)
    with pytest.raises(ValueError, match="as wide as the bounds"):
        outside(rows, rows, np.ones((2, 1), np.bool_), np.zeros((2, 4), np.float32), 2)
    with pytest.raises(ValueError, match="as many steps as there are"):
        outside(rows, rows, np.ones((2, 1), np.bool_), np.zeros((2, 3), np.float32), 3)


@pytest.mark.parametrize("value", [1.0 + 1e-6, 1000.001])
def test_rounding_is_not_told(value: float) -> None:
    spec = spec_of(Box(0.0, round(value), (1,), np.float32))
    data = empty_transitions(2, spec)
    for column in (data.obs, data.next_obs):
        column[:] = value
    data.valid[:] = True
    check = SpaceCheck(spec, range(1))
    assert (check.look(data, 2), check.rows) == ("", 0)
    data.next_obs[1] = value * 1.001
    assert "column 0 of 'obs' is" in check.look(data, 2)
    assert (check.look(data, 1), check.look(data, 2), check.rows) == ("", "", 2)


def share(on: Collection) -> NDArray:
    """[rows] whether an observation of the row is outside."""
    parts = [(chunk.data.obs[..., 1] > 5) | (chunk.data.next_obs[..., 1] > 5) for chunk in on.chunks]
    return np.concatenate([part.reshape(-1) for part in parts])


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "continuous", "workers": 2, "num_envs": 2},
        {"mode": "batch", "workers": 2, "num_envs": 4},
        {"mode": "lockstep", "num_envs": 2, "placement": "processes"},
        {"mode": "lockstep", "num_envs": 4, "placement": "inline"},
        {"mode": "sequential", "num_envs": 1},
    ],
    ids=lambda options: f"{options['mode']} {options.get('placement', '')}",
)
def test_rows_are_kept_and_the_user_is_told_once(options: dict[str, Any], spec: EnvSpec) -> None:
    with collecting(WORLD, spec, **options) as on:
        on.until(lambda: on.rows >= 32)
    told = [message for message in on.messages if "outside" in message]
    assert len(told) == 1
    assert TOLD.match(told[0])
    assert told[0].endswith(KEPT)
    assert on.collector.summary()["out_of_space"] >= share(on).sum() >= 16  # every second row; more may not have come
    assert on.collector.rows().dropped == {}
    if options["mode"] in ("lockstep", "sequential"):
        assert on.collector.summary()["out_of_space"] == share(on).sum()


@pytest.mark.parametrize(("args", "counted"), [({"at": 0}, 4), ({"value": 5.0}, 0)], ids=["first", "none"])
def test_a_first_observation_counts_and_none_says_nothing(spec: EnvSpec, args: dict[str, Any], counted: int) -> None:
    with collecting(WORLD, spec, mode="sequential", num_envs=1, env_args=args) as on:
        on.until(lambda: on.rows >= 16)
    assert (bool(on.messages), on.collector.summary()["out_of_space"]) == (counted > 0, counted)


class Mislabelled(Strays):
    """A label that its Discrete space does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = Discrete(4)

    def observe(self) -> Any:
        return 9 if self.count == 2 else 1


def test_a_label_that_is_none_is_still_an_error() -> None:
    with closing(GymConfig("Mislabelled", factory=Mislabelled).make(range(1))) as env:
        env.reset([training_episodes(0, 0)])
        env.step(np.zeros(1, np.int64))
        with pytest.raises(
            EnvError, match=r"wrong observation in step\(\): obs: expected a value of Discrete\(4\), got"
        ) as found:
            env.step(np.zeros(1, np.int64))
    assert found.value.cause == "shape"


def test_the_spec_of_a_lane_takes_its_bounds_along(spec: EnvSpec) -> None:
    assert replace(spec, lanes=7).bounds is spec.bounds
