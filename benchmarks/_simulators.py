"""Simulators as users bring them: nothing of ours is in them."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete


class Uneven(gymnasium.Env[Any, Any]):
    """A queue to be held at 0 by one of three pumps; it waits for its answers, for a log-normal time with this mean."""

    def __init__(self, mean_ms: float = 5.0, sigma: float = 0.7, length: int = 200) -> None:
        self.observation_space = Box(-10.0, 10.0, (8,), np.float32)
        self.action_space = Discrete(3)
        self._mean, self._sigma, self._length = mean_ms / 1e3, sigma, length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._level, self._steps = self.np_random.normal(0.0, 2.0, 8), 0
        return self._shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        noise = self.np_random.normal(0.0, 0.3, 8)
        self._level = np.clip(self._level + noise + 0.5 * (int(action) - 1), -10.0, 10.0)
        self._steps += 1
        self._spend(self._mean * float(np.exp(self._sigma * self.np_random.normal() - self._sigma**2 / 2)))
        return self._shown(), -float(np.abs(self._level).mean()), False, self._steps >= self._length, {}

    def _shown(self) -> Any:
        return self._level.astype(np.float32)

    def _spend(self, seconds: float) -> None:
        time.sleep(seconds)


class Burning(Uneven):
    """The same, but it computes for so long."""

    def __init__(self, mean_ms: float = 2.0, sigma: float = 0.3, length: int = 200) -> None:
        super().__init__(mean_ms, sigma, length)

    def _spend(self, seconds: float) -> None:
        enough = time.thread_time() + seconds
        while time.thread_time() < enough:
            pass


class Pixels(Burning):
    """The same as a stack of four grey pictures, as emulators show them."""

    SHAPE = (84, 84, 4)

    def __init__(self, mean_ms: float = 1.0, sigma: float = 0.3, length: int = 200) -> None:
        super().__init__(mean_ms, sigma, length)
        self.observation_space = Box(0, 255, self.SHAPE, np.uint8)

    def _shown(self) -> Any:
        return np.full(self.SHAPE, 12 * (10 + self._level[:4]), np.uint8)
