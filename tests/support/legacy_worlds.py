"""Worlds as old gym had them, and its spaces, written down by hand: gym itself is nowhere to be found."""

from __future__ import annotations

import random
from typing import Any

import gymnasium
import numpy as np


class Box:
    """gym.spaces.Box, as far as it matters."""

    def __init__(self, low: float, high: float, shape: tuple[int, ...], dtype: Any = np.float32) -> None:
        self.low, self.high, self.dtype = np.full(shape, low, dtype), np.full(shape, high, dtype), np.dtype(dtype)


class Discrete:
    def __init__(self, n: int) -> None:
        self.n = n


class MultiDiscrete:
    def __init__(self, nvec: list[int]) -> None:
        self.nvec = np.array(nvec)


class MultiBinary:
    def __init__(self, n: int) -> None:
        self.n = n


class Tuple:
    def __init__(self, *spaces: Any) -> None:
        self.spaces = spaces


class Dict:
    def __init__(self, **spaces: Any) -> None:
        self.spaces = spaces


class Graph:
    """One that nobody converts."""


class Old:
    """Four values, no seed, whole numbers under a Box of floats; all chance is that of the global generators."""

    observation_space: Any = Box(-1.0, 1.0, (3,))
    action_space: Any = Discrete(4)

    def __init__(self, length: int = 5, clock: bool = False) -> None:
        self.length, self.clock, self.closed = length, clock, False

    def reset(self) -> Any:
        self.t = 0
        return self.look(0)

    def look(self, action: int) -> Any:
        return np.array([random.randrange(2), np.random.randint(2), int(action > 1)])  # noqa: NPY002

    def step(self, action: Any) -> Any:
        self.t += 1
        done = self.t >= self.length
        info = {"TimeLimit.truncated": True} if done and self.clock else {}
        return self.look(action), np.float64(random.random()), done, info

    def close(self) -> None:
        self.closed = True


class Seeded(Old):
    """Of gym 0.21: a generator of its own, which `seed` starts."""

    def seed(self, seed: int | None = None) -> list[int | None]:
        self.rng = random.Random(seed)
        return [seed]

    def look(self, action: int) -> Any:
        return np.array([self.rng.randrange(2), self.rng.randrange(2), 1])


class Newer(Old):
    """Of gym 0.26: five values and a seed, and yet not Gymnasium's."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.rng = random.Random(seed)
        self.t = 0
        return self.look(0), {"seed": seed}

    def look(self, action: int) -> Any:
        return np.array([self.rng.randrange(2)] * 3)

    def step(self, action: Any) -> Any:
        observation, _, done, info = super().step(action)
        return observation, 1, done and not self.clock, done and self.clock, info


class InNameOnly(gymnasium.Env[Any, Any]):
    """Gymnasium's by its class, with a reset that takes no seed."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3,))
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, truthy: bool = False) -> None:
        self.old, self.truthy = Old(), truthy

    def reset(self) -> Any:  # type: ignore[override]
        return self.old.reset(), {}

    def step(self, action: Any) -> Any:
        observation, reward, done, info = self.old.step(action)
        return observation, reward, done, info if self.truthy else False, info


class Nested(Old):
    observation_space = Dict(
        a=Tuple(Discrete(3), MultiBinary(2)), b=MultiDiscrete([2, 3]), c=Box(0, 255, (1,), np.uint8)
    )

    def look(self, action: int) -> Any:
        return {"a": (2, [0, 1]), "b": [1, 2], "c": [7]}


class Odd(Old):
    observation_space = Graph()


class Stepless:
    observation_space, action_space = Old.observation_space, Old.action_space

    def reset(self) -> None: ...
