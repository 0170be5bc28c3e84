"""Worlds that behave oddly at the boundary: exceptions that do strange things, answers that are none, observations outside their
space. They do so in every process, also in a survey."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from freewheel.core import NDArray
from tests.support.worlds import Toy


class MuteError(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class UnpicklableError(Exception):
    """It cannot be sent to another process."""

    def __init__(self, more: Any) -> None:
        super().__init__("unpicklable")
        self.more = more

    def __reduce__(self) -> Any:
        raise TypeError("not me")


#: What is raised in a step, and what the report says of it.
ERRORS: dict[str, tuple[Exception, str]] = {
    "its __str__ raises": (MuteError(), "raised MuteError: (no text: __str__ raised RuntimeError)"),
    "half of a surrogate pair": (ValueError("a\ud800b"), r"raised ValueError: a\ud800b"),
    "a message of 40 MB": (ValueError("x" * (40 << 20)), "characters left out ...]"),
    "it cannot be pickled": (UnpicklableError(lambda: None), "raised UnpicklableError: unpicklable"),
}


class Unspeakable:
    """Neither true nor false, and its text cannot be had."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


#: What a step answers in place of `terminated`, and what the report says of it.
FLAGS: dict[str, tuple[Any, str]] = {
    "terminated is None": (None, "wrong answer in step(): terminated must be True or False, not None"),
    "terminated is unspeakable": (
        Unspeakable(),
        "terminated must be True or False, not Unspeakable (no text: repr() raised",
    ),
}
#: What a report says, by how a world is odd.
STEPS = {how: text for how, (_, text) in {**ERRORS, **FLAGS}.items()}


class Odd(Toy):
    """Odd at step `at` of the episodes whose seed is a multiple of `every`; `how`: one of STEPS, or "close" for its close()."""

    def __init__(self, how: str, at: int = 3, every: int = 1) -> None:
        super().__init__(8)
        self.observation_space, self.action_space = Box(0.0, 8.0, (1,), np.float32), Discrete(2)
        self.how, self.at, self.every = how, at, every

    def observe(self) -> NDArray:
        return np.array([self.count], np.float32)

    def judge(self, action: Any) -> float:
        return float(action)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        if self.count == self.at and self.seed % self.every == 0:
            if self.how in ERRORS:
                raise ERRORS[self.how][0]
            if self.how in FLAGS:
                terminated = FLAGS[self.how][0]
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        if self.how == "close":
            raise MuteError


class Strays(Toy):
    """An observation outside its space at step `at` of every episode; at 0: its first one."""

    def __init__(self, at: int = 2, value: float = 7.25) -> None:
        super().__init__(4)
        self.observation_space, self.action_space = Box(-1.0, 5.0, (3,), np.float32), Discrete(2)
        self.at, self.value = at, value

    def observe(self) -> NDArray:
        return np.array([0.5, self.value if self.count == self.at else 0.25, self.count], np.float32)

    def judge(self, action: Any) -> float:
        return float(action)
