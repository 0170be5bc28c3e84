"""A vector env of worlds that wander: lanes have seeds of their own and are stepped together."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from freewheel.core import NDArray
from tests.support.worlds import Wandering


class Together(VectorEnv[Any, NDArray, NDArray]):
    """As Gymnasium's contract has it: a lane that has ended has to be reset before the next step."""

    metadata: dict[str, Any] = {  # noqa: RUF012 - as Gymnasium has it
        "render_modes": [], "autoreset_mode": AutoresetMode.DISABLED, "lane_seeds": True,
    }  # fmt: skip

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.lanes = num_envs, [Wandering() for _ in range(num_envs)]
        self.single_observation_space = self.lanes[0].observation_space
        self.single_action_space = self.lanes[0].action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.begun, self.over = [0] * num_envs, np.ones(num_envs, np.bool_)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[NDArray, dict[str, Any]]:
        options = options or {}
        if "seeds" in options:
            self.streams, self.begun = options["seeds"], [0] * self.num_envs
        for lane in np.flatnonzero(options.get("reset_mask", np.ones(self.num_envs, np.bool_))).tolist():
            self.lanes[lane].reset(seed=self.streams[lane].seed(self.begun[lane]))
            self.begun[lane] += 1
            self.over[lane] = False
        return self._seen(), {}

    def step(self, actions: NDArray) -> Any:
        assert not self.over.any(), "a lane that has ended was not reset"
        answers = [lane.step(action) for lane, action in zip(self.lanes, actions, strict=True)]
        _, reward, terminated, truncated, _ = (np.array(part) for part in zip(*answers, strict=True))
        self.over = terminated | truncated
        return self._seen(), reward, terminated, truncated, {}

    def _seen(self) -> NDArray:
        return np.array([lane.point for lane in self.lanes], np.float32)


WHERE = "tests.support.together"
gymnasium.register("tests/Together-v0", entry_point=f"{WHERE}:Wandering", vector_entry_point=f"{WHERE}:Together")
