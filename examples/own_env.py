"""Your own slow simulator, trained by workers that never wait for each other, and used afterwards."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np

import freewheel


class Warehouse(gymnasium.Env[Any, Any]):
    """Drive the forklift to the door. A step of the simulator takes 5 ms on average, and sometimes much longer."""

    observation_space = gymnasium.spaces.Box(-9.0, 9.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(4)
    moves = np.array([[1, 0], [-1, 0], [0, 1], [0, -1]], np.float32)

    def __init__(self, mean_ms: float = 5.0) -> None:
        self.mean_ms = mean_ms

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.at = 0, self.np_random.integers(-5, 6, 2).astype(np.float32)
        return self.at, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self.np_random.exponential(self.mean_ms / 1000))
        self.at, self.steps = np.clip(self.at + self.moves[action], -9, 9), self.steps + 1
        return self.at, -1.0, not self.at.any(), self.steps >= 50, {}


if __name__ == "__main__":
    result = freewheel.train(Warehouse, mode="continuous", steps=20_000, seed=1)
    policy = freewheel.load(result)
    env = Warehouse()
    obs, _ = env.reset(seed=7)
    over, total = False, 0.0
    while not over:
        action, _ = policy.predict(obs)
        obs, reward, terminated, truncated, _ = env.step(action)
        over, total = terminated or truncated, total + reward
    print(f"from the start to the door in {-total:.0f} steps")
