"""Observations of several parts, and actions that are not always allowed."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

import freewheel

ITEMS = 4


class Packing(gymnasium.Env[Any, Any]):
    """Put the items into the box, the largest value first; an item that is in the box cannot be put there again."""

    observation_space = spaces.Dict(
        {"values": spaces.Box(0, 1, (ITEMS,), np.float32), "packed": spaces.MultiBinary(ITEMS)}
    )
    action_space = spaces.Discrete(ITEMS)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.values = self.np_random.random(ITEMS, np.float32)
        self.packed = np.zeros(ITEMS, np.int8)
        return self.see()

    def see(self) -> tuple[Any, dict[str, Any]]:
        return {"values": self.values, "packed": self.packed.copy()}, {"action_mask": 1 - self.packed}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(self.values[action]) * (ITEMS - int(self.packed.sum()))
        self.packed[action] = 1
        obs, info = self.see()
        return (
            obs,
            reward,
            bool(self.packed.all()),
            False,
            info if not self.packed.all() else {"action_mask": np.ones(ITEMS)},
        )


if __name__ == "__main__":
    result = freewheel.train(Packing, steps=30_000, seed=1)
    policy = freewheel.load(result)
    env = Packing()
    obs, info = env.reset(seed=3)
    order = []
    for _ in range(ITEMS):
        action, _ = policy.predict(obs, mask=info["action_mask"])
        order.append(int(action))
        obs, _reward, _terminated, _truncated, info = env.step(action)
    print(f"values {np.round(env.values, 2)}, packed in the order {order}")
