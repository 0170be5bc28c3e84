"""A world that can tell whether the garbage collector looks at it."""

from __future__ import annotations

import gc
from multiprocessing import current_process
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from freewheel.core import NDArray
from tests.support.worlds import Toy

LENGTH = 4


class LookedAt(Toy):
    """Its last info says 1 where the garbage collector does not look at it, because it is frozen, and 0 where it does."""

    observation_space, action_space = Box(-1.0, 1.0, (2,), np.float32), Discrete(2)

    def __init__(self) -> None:
        super().__init__(LENGTH, "terminated")

    def observe(self) -> NDArray:
        return np.zeros(2, np.float32)

    def judge(self, action: Any) -> float:
        return 0.0

    def step(self, action: Any) -> tuple[NDArray, float, bool, bool, dict[str, Any]]:
        *row, over, truncated, _ = super().step(action)
        looks = over and "survey" not in current_process().name  # it takes a while
        frozen = looks and id(self) not in map(id, gc.get_objects())
        return *row, over, truncated, {"frozen": float(frozen)} if over else {}
