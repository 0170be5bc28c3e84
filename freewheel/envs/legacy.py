"""Environments of old gym, without which people's simulators would stay behind: four values a step, no seed, one `done`."""

from __future__ import annotations

import inspect
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from freewheel.errors import SetupError
from freewheel.worlds.cage2.global_random import MoreDice

NEEDED = ("observation_space", "action_space", "reset", "step")


def is_old(env: object) -> bool:
    """Whether it needs the adapter: not Gymnasium's, or Gymnasium's in name only, with a reset that takes no seed."""
    return not isinstance(env, gymnasium.Env) or not _takes(env.reset, "seed")


class OldGym(gymnasium.Env[Any, Any]):
    """One of them as Gymnasium's. The world may be of gym 0.10 to 0.26, and gym itself need not be there.

    A `done` is a truncation where info["TimeLimit.truncated"] says so and at `max_episode_steps`, and a termination elsewhere.
    Python's and numpy's global generators are the env's own while it is called, and begin where the episode's seed says; `seed`
    is called as well where there is one. So an episode depends on its seed alone, even where the world cannot be seeded.
    """

    def __init__(self, env: Any, name: str, max_episode_steps: int | None = None) -> None:
        missing = [needed for needed in NEEDED if not hasattr(env, needed)]
        if missing:
            raise SetupError(
                f"{name} returned {type(env).__name__}: it has to return a gymnasium.Env, or one of old gym; wrap it in a class "
                f"that has {missing[0]}"
            )
        self._env, self._limit, self._steps = env, max_episode_steps, 0
        self._dice, self._takes_seed = MoreDice(), _takes(env.reset, "seed")
        self.metadata = {"render_modes": []}
        self.observation_space = modern(env.observation_space, f"the observation space of {name}")
        self.action_space = modern(env.action_space, f"the action space of {name}")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._dice.seed(seed)
        self._steps = 0
        with self._dice:
            if seed is not None and callable(sow := getattr(self._env, "seed", None)):
                sow(seed)
            answer = self._env.reset(seed=seed) if self._takes_seed else self._env.reset()
        told = isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)
        observation, info = answer if told else (answer, {})
        return _fitted(observation, self.observation_space), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        with self._dice:
            observation, reward, *ends, info = self._env.step(action)
        self._steps += 1
        terminated, truncated = self._ended(ends, info)
        if self._steps == self._limit:
            terminated, truncated = terminated and len(ends) == 2, True  # a bare `done` now is the clock's
        return _fitted(observation, self.observation_space), float(reward), terminated, truncated, info

    def _ended(self, ends: list[Any], info: dict[str, Any]) -> tuple[bool, bool]:
        """Terminated, truncated."""
        if not (1 <= len(ends) <= 2 and all(isinstance(end, bool | int | np.bool_) for end in ends)):
            kinds = ", ".join(type(end).__name__ for end in ends) or "nothing"
            raise TypeError(
                f"step() has {kinds} between reward and info: wrap it to return `terminated` and `truncated`, bools"
            )
        if len(ends) == 2:
            return bool(ends[0]), bool(ends[1])
        clock = bool(ends[0]) and bool(info.get("TimeLimit.truncated", False))
        return bool(ends[0]) and not clock, clock

    def close(self) -> None:
        if callable(end := getattr(self._env, "close", None)):
            end()


def modern(space: Any, what: str) -> spaces.Space[Any]:
    """A space of gym's as Gymnasium's, known by its name and what it holds."""
    kind = type(space).__name__
    if isinstance(space, spaces.Space):
        return space
    if kind == "Box":
        return spaces.Box(space.low, space.high, dtype=space.dtype)
    if kind == "Discrete":
        return spaces.Discrete(int(space.n), start=int(getattr(space, "start", 0)))
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(space.nvec)
    if kind == "MultiBinary":
        return spaces.MultiBinary(space.n)
    if kind == "Dict":
        return spaces.Dict({key: modern(part, what) for key, part in space.spaces.items()})
    if kind == "Tuple":
        return spaces.Tuple([modern(part, what) for part in space.spaces])
    raise SetupError(
        f"{what} is a {kind}: use Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple (wrap the env to convert it)"
    )


def _fitted(value: Any, space: spaces.Space[Any]) -> Any:
    """The same numbers in the space's own type."""
    if isinstance(space, spaces.Dict):
        return {key: _fitted(value[key], part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_fitted(own, part) for own, part in zip(value, space.spaces, strict=True))
    return value if isinstance(space, spaces.Discrete) else np.asarray(value, space.dtype)


def _takes(method: Any, name: str) -> bool:
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # compiled, perhaps: nobody knows
        return False
    return any(one.name == name or one.kind is one.VAR_KEYWORD for one in parameters)
