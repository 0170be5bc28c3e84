"""A world whose step times follow a seeded distribution, to measure how collectors handle slow steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, get_args

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box, Discrete

from freewheel.core import NDArray
from freewheel.envs import gym
from freewheel.envs.family import WorldFamily
from freewheel.errors import UsageError, nearest

Law = Literal["lognormal", "ninety_ten", "rare", "constant"]
Kind = Literal["sleep", "burn"]

COLUMNS, ACTIONS, NOISE = 52, 145, 0.25
TARGETS = np.arange(4, ACTIONS, 9)  # [C] the right action of each of 16 contexts
# [C, 52] the sign of each column in each context: Walsh functions, so that any two contexts differ in about half of them.
PATTERNS = np.array([[(-1) ** (c & column).bit_count() for column in range(COLUMNS)] for c in range(len(TARGETS))])
SHOWN = (PATTERNS * (1 - NOISE)).astype(np.float32)


def relative_times(law: Law, count: int, rng: np.random.Generator, sigma: float) -> NDArray:
    """Draw random times with an expected value of exactly 1."""
    if law == "lognormal":
        return np.exp(sigma * rng.standard_normal(count) - sigma**2 / 2)
    if law == "constant":
        return np.ones(count)
    share, ratio = (0.1, 10.0) if law == "ninety_ten" else (0.001, 1000.0)
    return np.where(rng.random(count) < share, ratio, 1.0) / (1 - share + share * ratio)


def sleep(seconds: float) -> float:
    """Sleep for this long; return the seconds that have passed."""
    begun = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - begun


def burn(seconds: float) -> float:
    """Use this much CPU time of this thread; return the seconds that have passed."""
    begun, enough = time.perf_counter(), time.thread_time() + seconds
    while time.thread_time() < enough:
        pass
    return time.perf_counter() - begun


class Straggler(gymnasium.Env[NDArray, Any]):
    """Name the context that the observation shows; every step takes a random time.

    Every observation shows one of 16 random contexts as a pattern of ±0.75 on all 52 columns, plus uniform noise of ±0.25.
    Each context has one right action among the 145 (4, 13, ..., 139): it earns 1, any other 0. Thus the best return is
    `length`, random actions earn length / 145, and one constant action earns length / 16 at most. The map is linear; a
    small network learns it after it has found each right action a few times. After `length` steps the episode is
    `terminated`, not truncated: its last state has no value.

    The time of a step or a reset is drawn from the distribution `law` with mean `mean` or `reset_mean` seconds, independently
    of the actions; a mean of 0 takes no time. lognormal: with standard deviation `sigma` of the logarithm, not capped (at 0.7
    the slowest of 100 takes about 5 times the mean). ninety_ten: 1 in 10 takes 10 times as long as the others. rare: 1 in
    1000 takes 1000 times as long. constant: always the mean. `kind`: the time is slept, or burnt as CPU time of this thread.

    Observations and times come from two separate generators. `seconds` holds the times drawn for this episode, its reset
    first; the last info has their sum as `drawn_s` and the wall time they took as `slept_s`.
    """

    def __init__(
        self,
        length: int = 100,
        law: Law = "lognormal",
        mean: float = 0.010,
        kind: Kind = "sleep",
        reset_mean: float = 0.0,
        sigma: float = 0.7,
    ) -> None:
        for name, value, choices in ("law", law, get_args(Law)), ("kind", kind, get_args(Kind)):
            if value not in choices:
                raise UsageError(f"Straggler has no {name} '{value}'{nearest(str(value), choices)}")
        if length < 1 or min(mean, reset_mean, sigma) < 0:
            raise UsageError("Straggler needs length 1 or more, and mean, reset_mean and sigma 0 or more")
        self.observation_space = Box(-1.0, 1.0, (COLUMNS,), np.float32)
        self.action_space = Discrete(ACTIONS)
        self._law, self._sigma = law, sigma
        self._means = np.array([reset_mean, *[mean] * length])  # [length + 1]
        self._spend: Callable[[float], float] = {"sleep": sleep, "burn": burn}[kind]
        self.seconds: list[float] = []  # [length + 1]
        self._count, self._slept = 0, 0.0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        sights, times = self.np_random.spawn(2)
        rows = len(self._means)
        contexts = sights.integers(len(TARGETS), size=rows)
        noise = sights.random((rows, COLUMNS), np.float32) * (2 * NOISE) - NOISE
        self._observations = SHOWN[contexts] + noise  # [length + 1, 52]
        self._targets: list[int] = TARGETS[contexts].tolist()
        self.seconds = (self._means * relative_times(self._law, rows, times, self._sigma)).tolist()
        self._count, self._slept = 0, self._spend(self.seconds[0]) if self.seconds[0] else 0.0
        return self._observations[0], {}

    def step(self, action: Any) -> tuple[NDArray, float, bool, bool, dict[str, Any]]:
        before, now = self._count, self._count + 1
        if now >= len(self.seconds):
            raise ResetNeeded("Straggler is not in an episode: call reset() first")
        self._count = now
        if seconds := self.seconds[now]:
            self._slept += self._spend(seconds)
        over = now == len(self.seconds) - 1
        reward = 1.0 if action == self._targets[before] else 0.0
        info = {"drawn_s": sum(self.seconds), "slept_s": self._slept} if over else {}
        return self._observations[now], reward, over, False, info


ID = "freewheel/Straggler-v0"
FAMILY = WorldFamily(
    name="straggler",
    serves=lambda name: name == ID,
    options=gym.GymOptions,
    build=gym.build,
    ids={ID: {"entry_point": "freewheel.testing.straggler:Straggler"}},
)
