"""Worlds that train, but break the contract in one way each; and one that keeps it."""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from freewheel.core import NDArray


class Sound(gymnasium.Env[Any, Any]):
    """A random walk of three numbers, episodes of 25 steps."""

    dtype: Any = np.float32

    def __init__(self) -> None:
        self.observation_space, self.action_space = Box(-50.0, 50.0, (3,), np.float32), Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.place, self.count = self.draw(), 0
        return self.place.astype(self.dtype), {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        self.place, self.count = self.place + self.draw() + int(action), self.count + 1
        return self.place.astype(self.dtype), float(self.place[0]), False, self.count >= 25, {}

    def draw(self) -> NDArray:
        return self.np_random.normal(size=3)


class IgnoresSeed(Sound):
    """Draws from a generator that no seed reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.own = np.random.default_rng()

    def draw(self) -> NDArray:
        return self.own.normal(size=3)


class OneEpisode(Sound):
    """Begins the same episode under every seed."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=7, options=options)


class NotANumber(Sound):
    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, float("nan") if self.count == 5 else reward, terminated, truncated, info


class Doubles(Sound):
    """Observations of float64 where the space says float32."""

    dtype = np.float64


class Endless(Sound):
    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        self.count = 0
        return super().step(action)


class Frozen(Sound):
    def draw(self) -> NDArray:
        return np.zeros(3)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        return super().step(0)


class Integers(Sound):
    """terminated and truncated are numbers."""

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, int(terminated), int(truncated), info


class OfItsProcess(Endless):
    """Draws what its process draws, and never ends."""

    def draw(self) -> NDArray:
        return self.np_random.normal(size=3) + os.getpid() % 1000 / 50


class Hangs(Sound):
    """Waits for ever in its third step."""

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        if self.count == 2:
            time.sleep(600)
        return super().step(action)


class Raises(Sound):
    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        raise RuntimeError("the pump is broken")


class RaisesSeldom(Sound):
    calls = 0

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        self.calls += 1
        if self.calls % 60 == 0:
            raise RuntimeError("the licence server is away")
        return super().step(action)


class Sleeps(Sound):
    """Steps of 3 ms."""

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        time.sleep(0.003)
        return super().step(action)
