"""Adapts environments of old gym, and others that use the global random generators, to Gymnasium."""

from __future__ import annotations

import inspect
import random
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from freewheel.errors import SetupError

NEEDED = ("observation_space", "action_space", "reset", "step")


class GlobalRandom:
    """A separate random stream: inside `with stream`, Python's global `random` draws from this stream; afterwards the
    caller's state is restored."""

    __slots__ = ("_callers", "state")

    def __init__(self, seed: int | None = None) -> None:
        self._callers: Any = None
        self.state: Any = None  # the position of the stream; may be saved and restored
        self.seed(seed)

    def seed(self, seed: int | None) -> None:
        """Set the stream to the state after `random.seed(seed)`."""
        self.state = random.Random(seed).getstate()

    def __enter__(self) -> None:
        self._callers = random.getstate()
        random.setstate(self.state)

    def __exit__(self, *_: object) -> None:
        self.state = random.getstate()
        random.setstate(self._callers)


class GlobalRandoms(GlobalRandom):
    """Separate streams for Python's and numpy's global generators. A normal number that numpy has cached is lost."""

    __slots__ = ("_numpy", "_numpy_callers")

    def seed(self, seed: int | None) -> None:
        super().seed(seed)
        self._numpy = np.random.MT19937(seed)

    def __enter__(self) -> None:
        super().__enter__()
        self._numpy_callers = np.random.mtrand.get_bit_generator()
        np.random.mtrand.set_bit_generator(self._numpy)

    def __exit__(self, *_: object) -> None:
        np.random.mtrand.set_bit_generator(self._numpy_callers)
        super().__exit__()


def is_old(env: object) -> bool:
    """Return whether `env` needs the adapter: it is not a gymnasium.Env, or its reset takes no seed."""
    return not isinstance(env, gymnasium.Env) or not _takes(env.reset, "seed")


class OldGym(gymnasium.Env[Any, Any]):
    """Presents an environment of gym 0.10 to 0.26 as a Gymnasium environment; gym itself need not be installed.

    `done` is a truncation if info["TimeLimit.truncated"] is true or `max_episode_steps` is reached, else a termination.
    During every call, separate streams replace Python's and numpy's global generators. The episode's seed starts them,
    and is passed to the environment's `seed` method, if there is one. An episode therefore depends only on its seed.
    """

    def __init__(self, env: Any, name: str, max_episode_steps: int | None = None) -> None:
        missing = [needed for needed in NEEDED if not hasattr(env, needed)]
        if missing:
            wanted = f"an environment of Gymnasium or old gym, with the attribute {missing[0]}"
            raise SetupError(f"{name} returned {type(env).__name__}: it has to return {wanted}")
        self._env, self._limit, self._steps = env, max_episode_steps, 0
        self._random, self._takes_seed = GlobalRandoms(), _takes(env.reset, "seed")
        self.metadata = {"render_modes": []}
        self.observation_space = modern(env.observation_space, f"the observation space of {name}")
        self.action_space = modern(env.action_space, f"the action space of {name}")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._random.seed(seed)
        self._steps = 0
        with self._random:
            if seed is not None and callable(set_seed := getattr(self._env, "seed", None)):
                set_seed(seed)
            answer = self._env.reset(seed=seed) if self._takes_seed else self._env.reset()
        has_info = isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)
        observation, info = answer if has_info else (answer, {})
        return _fitted(observation, self.observation_space), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        with self._random:
            observation, reward, *ends, info = self._env.step(action)
        self._steps += 1
        terminated, truncated = self._ended(ends, info)
        if self._steps == self._limit:
            terminated, truncated = terminated and len(ends) == 2, True  # a single `done` at the limit is a truncation
        return _fitted(observation, self.observation_space), float(reward), terminated, truncated, info

    def _ended(self, ends: list[Any], info: dict[str, Any]) -> tuple[bool, bool]:
        """Return terminated and truncated."""
        if not (1 <= len(ends) <= 2 and all(isinstance(end, bool | int | np.bool_) for end in ends)):
            kinds = ", ".join(type(end).__name__ for end in ends) or "nothing"
            wanted = "wrap it to return `terminated` and `truncated`, bools"
            raise TypeError(f"step() has {kinds} between reward and info: {wanted}")
        if len(ends) == 2:
            return bool(ends[0]), bool(ends[1])
        clock = bool(ends[0]) and bool(info.get("TimeLimit.truncated", False))
        return bool(ends[0]) and not clock, clock

    def close(self) -> None:
        if callable(end := getattr(self._env, "close", None)):
            end()


def modern(space: Any, what: str) -> spaces.Space[Any]:
    """Convert a space of old gym, recognised by its class name and its attributes, to Gymnasium."""
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
    known = "Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple"
    raise SetupError(f"{what} is a {kind}: use {known} (wrap the env to convert it)")


def _fitted(value: Any, space: spaces.Space[Any]) -> Any:
    """Return the same values with the dtype of the space."""
    if isinstance(space, spaces.Dict):
        return {key: _fitted(value[key], part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_fitted(own, part) for own, part in zip(value, space.spaces, strict=True))
    return value if isinstance(space, spaces.Discrete) else np.asarray(value, space.dtype)


def _takes(method: Any, name: str) -> bool:
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # for example compiled code, which has no signature
        return False
    return any(one.name == name or one.kind is one.VAR_KEYWORD for one in parameters)
