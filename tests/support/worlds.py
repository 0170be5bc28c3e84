"""Environments for tests: toy worlds whose rows can be predicted, and faulty worlds."""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete

from freewheel.core import NDArray


class Toy(gymnasium.Env[Any, Any], ABC):
    """Episodes of `length` steps; a subclass gives the observation and the reward."""

    def __init__(self, length: int, ends: Literal["terminated", "truncated"] = "truncated") -> None:
        self.length, self.ends, self.count, self.seed = length, ends, 0, 0

    @abstractmethod
    def observe(self) -> Any: ...

    @abstractmethod
    def judge(self, action: Any) -> float: ...

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.count, self.seed = 0, seed or 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = self.judge(action)
        self.count += 1
        terminated, truncated = (self.count >= self.length and self.ends == end for end in ("terminated", "truncated"))
        return self.observe(), reward, terminated, truncated, {"count": self.count}


class Identity(Toy):
    """Name the class: a random class as a one-hot observation, reward 1 for the right one."""

    def __init__(self, n: int = 4, length: int = 16) -> None:
        super().__init__(length)
        self.observation_space, self.action_space = Box(0.0, 1.0, (n,), np.float32), Discrete(n)
        self.classes = np.eye(n, dtype=np.float32)

    def observe(self) -> NDArray:
        self.shown = int(self.np_random.integers(len(self.classes)))
        return np.array(self.classes[self.shown])

    def judge(self, action: Any) -> float:
        return float(action == self.shown)


class IdentityBox(Toy):
    """The same with Box actions: a random point in [-1, 1]^n, reward 1 minus the mean squared distance of the action."""

    def __init__(self, n: int = 2, length: int = 16) -> None:
        super().__init__(length)
        self.observation_space = self.action_space = Box(-1.0, 1.0, (n,), np.float32)

    def observe(self) -> NDArray:
        self.shown = self.np_random.uniform(-1.0, 1.0, self.observation_space.shape or ()).astype(np.float32)
        return self.shown

    def judge(self, action: Any) -> float:
        return 1.0 - float(np.mean((action - self.shown) ** 2))


class Drifting(Toy):
    """The right action increases by one at every step, modulo n, from a start that the seed sets; nothing else is random.

    Observation: the right action as one-hot, and the share of the episode that is over. So every row can be checked by itself:
    its reward is 1 where the action is the argmax of obs[:n], else 0, and the argmax of next_obs[:n] is one more, modulo n.
    A row whose parts come from different steps, lanes or episodes breaks this.
    """

    def __init__(self, n: int = 8, length: int = 20) -> None:
        super().__init__(length)
        self.observation_space, self.action_space = Box(0.0, 1.0, (n + 1,), np.float32), Discrete(n)
        self.n = n

    def observe(self) -> NDArray:
        right = np.arange(self.n) == (self.seed + self.count) % self.n
        return np.append(right, self.count / self.length).astype(np.float32)

    def judge(self, action: Any) -> float:
        return float(action == (self.seed + self.count) % self.n)


class Wandering(gymnasium.Env[Any, Any]):
    """A point that drifts with the actions and by chance; episodes end by chance, or after `length` steps. Not determined by
    its seed if it is `fickle`."""

    def __init__(
        self, n: int = 2, length: int = 12, *, fickle: bool = False, discrete: int = 0, ends: float = 0.1
    ) -> None:
        self.observation_space = Box(-np.inf, np.inf, (n,), np.float32)
        self.action_space = Discrete(discrete) if discrete else Box(-1.0, 1.0, (n,), np.float32)
        self.length, self.fickle, self.discrete = length, fickle, discrete
        self.ends = ends  # how probable the end is after each step

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=None if self.fickle else seed, options=options)
        self.point, self.count = self.np_random.normal(size=self.observation_space.shape), 0
        return self.point.astype(np.float32), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        moved = (action / self.discrete - 0.5) if self.discrete else np.asarray(action, np.float64)
        self.point = 0.9 * self.point + moved + 0.1 * self.np_random.normal(size=self.point.shape)
        over = bool(self.np_random.random() < self.ends)
        reward = -float(np.abs(self.point).sum())
        return self.point.astype(np.float32), reward, over, self.count >= self.length, self._info()

    def _info(self) -> dict[str, Any]:
        if not self.discrete:
            return {}
        mask = np.ones(self.discrete, np.int8)
        mask[int(abs(self.point[0]) * 10) % self.discrete] = 0
        return {"action_mask": mask}


class Counter(Toy):
    """Rows that can be predicted: observation (seed mod 1000, steps so far), reward the number of the step."""

    def __init__(self, length: int = 3, ends: Literal["terminated", "truncated"] = "terminated") -> None:
        super().__init__(length, ends)
        self.observation_space, self.action_space = Box(0.0, 1000.0, (2,), np.float32), Discrete(2)

    def observe(self) -> NDArray:
        return np.array([self.seed % 1000, self.count], np.float32)

    def judge(self, action: Any) -> float:
        return float(self.count + 1)


class Conditioned(Toy):
    """Its return depends only on its seed and its context (a, b): step t has reward (seed mod 5 + 1)(a + b t).

    So a wrong or outdated context shows in the return.
    """

    def __init__(self, length: int = 3) -> None:
        super().__init__(length)
        steps, context = Box(0.0, float(length), (1,), np.float32), Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space, self.action_space = Dict(steps=steps, context=context), Discrete(2)
        self.context = np.zeros(2, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.context = options["context"] if options else np.zeros(2, np.float32)
        return super().reset(seed=seed, options=options)

    def observe(self) -> dict[str, NDArray]:
        return {"steps": np.array([self.count], np.float32), "context": self.context}

    def judge(self, action: Any) -> float:
        return (self.seed % 5 + 1) * float(self.context[0] + self.context[1] * (self.count + 1))

    @staticmethod
    def worth(seed: int, context: Sequence[float], length: int = 3) -> float:
        """The return of such an episode."""
        first, slope = context
        return (seed % 5 + 1) * (length * first + slope * length * (length + 1) / 2)


class Forbidden(Toy):
    """Two of five actions are allowed, different ones at every step; the others raise."""

    def __init__(self) -> None:
        super().__init__(length=6)
        self.observation_space, self.action_space = Box(0, 1, (2,), np.float32), Discrete(5)

    def observe(self) -> NDArray:
        self.mask = np.zeros(5, np.int8)
        self.mask[self.np_random.choice(5, 2, replace=False)] = 1
        return self.np_random.random(2, np.float32)

    def judge(self, action: Any) -> float:
        if not self.mask[action]:
            raise ValueError(f"action {action} is not allowed by {self.mask}")
        return float(action)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray, dict[str, Any]]:
        return super().reset(seed=seed)[0], {"action_mask": self.mask}

    def step(self, action: Any) -> tuple[NDArray, float, bool, bool, dict[str, Any]]:
        return *super().step(action)[:4], {"action_mask": self.mask}


class Faulty(Counter):
    """A Counter that fails at step `at` (0: in reset) of every episode or, given `only_seed`, of the one with that seed.

    With a `rate`, each step fails with that probability instead; the seed decides which.
    """

    def __init__(self, at: int = 3, only_seed: int | None = None, length: int = 8, rate: float | None = None) -> None:
        super().__init__(length)
        self.at, self.only_seed, self.rate = at, only_seed, rate

    def due(self) -> bool:
        if self.rate is not None:
            return self.count > 0 and self.np_random.random() < self.rate
        return self.count == self.at and self.only_seed in (None, self.seed)

    def observe(self) -> NDArray:
        return self.fail(super().observe()) if self.due() else super().observe()

    @abstractmethod
    def fail(self, observation: NDArray) -> NDArray: ...


class Raises(Faulty):
    def fail(self, observation: NDArray) -> NDArray:
        raise ValueError("boom")


class Breaks(Raises):
    """Raises in every episode, but not under these seeds."""

    def __init__(self, spared: Sequence[int], **faults: Any) -> None:
        super().__init__(**faults)
        self.spared = set(spared)

    def due(self) -> bool:
        return super().due() and self.seed not in self.spared


class Dies(Faulty):
    """Kills its process: for workers only."""

    def fail(self, observation: NDArray) -> NDArray:
        os.kill(os.getpid(), signal.SIGKILL)
        return observation


class Hangs(Faulty):
    """Never returns; `deaf`: it also ignores SIGTERM."""

    def __init__(self, *, deaf: bool = False, **faults: Any) -> None:
        super().__init__(**faults)
        self.deaf = deaf

    def fail(self, observation: NDArray) -> NDArray:
        if self.deaf:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(60.0)


class Crawls(Faulty):
    """Takes `seconds` for every step from `at` on."""

    def __init__(self, *, seconds: float = 0.01, at: int = 1, **faults: Any) -> None:
        super().__init__(at, **faults)
        self.seconds = seconds

    def due(self) -> bool:
        return self.count >= self.at and self.only_seed in (None, self.seed)

    def fail(self, observation: NDArray) -> NDArray:
        time.sleep(self.seconds)
        return observation


class ReturnsNaN(Faulty):
    def fail(self, observation: NDArray) -> NDArray:
        return np.full_like(observation, np.nan)


class WrongShape(Faulty):
    """Observes one column, which would broadcast."""

    def fail(self, observation: NDArray) -> NDArray:
        return observation[:1]


class MutatesBuffer(Counter):
    """Returns the same array every time, so the caller has to copy it at once."""

    def __init__(self, length: int = 3) -> None:
        super().__init__(length)
        self.buffer = np.zeros(2, np.float32)

    def observe(self) -> NDArray:
        self.buffer[:] = super().observe()
        return self.buffer
