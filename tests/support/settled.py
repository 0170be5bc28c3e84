"""An environment that reports whether it is excluded from garbage collection."""

from __future__ import annotations

import gc
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from freewheel.core import NDArray

LENGTH = 4


class LookedAt(gymnasium.Env[NDArray, Any]):
    """`frozen` in its last info is 1 if it is excluded from garbage collection, otherwise 0."""

    observation_space = Box(-1.0, 1.0, (2,), np.float32)
    action_space = Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray, dict[str, Any]]:
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[NDArray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        over = self.steps == LENGTH
        info = {"frozen": float(all(thing is not self for thing in gc.get_objects()))} if over else {}
        return np.zeros(2, np.float32), 0.0, over, False, info
