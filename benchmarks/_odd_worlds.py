"""Environments as people write them: odd spaces, slow calls, episodes of one step. Random runs get a copy of this file."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class World(gymnasium.Env[Any, Any]):
    """Observations are drawn; the reward is larger for smaller actions."""

    observation_space: spaces.Space[Any] = spaces.Box(-1, 1, (3,), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(2)
    length, step_s, reset_s = 50, 0.0, 0.0

    def __init__(self, length: int | None = None) -> None:
        self._length, self._taken = length or self.length, 0

    def _seen(self) -> Any:
        self.observation_space.seed(int(self.np_random.integers(1 << 30)))
        return self.observation_space.sample()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._taken = 0
        time.sleep(self.reset_s)
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._taken += 1
        time.sleep(self.step_s)
        return (
            self._seen(),
            -float(np.abs(np.asarray(action, np.float64)).mean()),
            self._taken >= self._length,
            False,
            {},
        )


class Plain(World):
    pass


class Nested(World):
    observation_space = spaces.Dict(
        {
            "place": spaces.Box(-10, 10, (2,), np.float64),
            "parts": spaces.Tuple((spaces.Discrete(4), spaces.MultiBinary(3))),
        }
    )


class Choices(World):
    observation_space = spaces.MultiDiscrete([3, 5])
    action_space = spaces.Discrete(3, start=-1)


class Many(World):
    action_space = spaces.MultiDiscrete([2, 3, 2])


class Bits(World):
    observation_space = spaces.MultiBinary(6)
    action_space = spaces.MultiBinary(2)


class Picture(World):
    observation_space = spaces.Box(0, 255, (16, 16, 3), np.uint8)
    length = 20


class LargePicture(World):
    observation_space = spaces.Box(0, 255, (84, 84, 3), np.uint8)


class Wide(World):
    observation_space = spaces.Box(-np.inf, np.inf, (300,), np.float32)
    action_space = spaces.Box(-2.0, 3.0, (4,), np.float32)


class OneStep(World):
    length = 1
    action_space = spaces.Box(-1, 1, (1,), np.float64)


class Slow(World):
    step_s, length = 0.02, 30


class SlowReset(World):
    reset_s, length = 0.5, 20


class Endless(World):
    length = 1_000_000_000
