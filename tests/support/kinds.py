"""An environment of any space: observations are drawn from it by the seed of the episode, rewards depend on all that is given."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import gymnasium.spaces as gs
import numpy as np
from gymnasium.spaces.utils import flatten

BOX, PICTURE = gs.Box(-1, 1, (3,)), gs.Box(0, 255, (4, 3, 1), np.uint8)
NESTED = gs.Dict(
    {
        "arm": gs.Dict({"angle": gs.Box(-3, 3, (2,), np.float64), "gear": gs.Discrete(3, start=-1)}),
        "pair": gs.Tuple([gs.MultiBinary(2), gs.Box(0, 9, (), np.int64)]),
        "picture": PICTURE,
    }
)
#: Observation space, action space, and where the action mask is, by name.
KINDS: dict[str, tuple[gs.Space[Any], gs.Space[Any], str]] = {
    "box": (BOX, gs.Discrete(3), ""),
    "start": (BOX, gs.Discrete(4, start=-2), ""),
    "scaled": (gs.Box(-1, 1, (2, 2), np.float64), gs.Box(*np.array([[[-2, 1]], [[5, 9]]], np.float32)), ""),
    "half bounded": (BOX, gs.Box(np.array([-np.inf, 0.0]), np.array([np.inf, np.inf]), dtype=np.float64), ""),
    "whole": (BOX, gs.Box(0, 10, (2,), np.int64), ""),
    "discrete": (gs.Discrete(5, start=3), gs.Discrete(3), ""),
    "multidiscrete": (gs.MultiDiscrete([2, 3], start=[4, 8]), gs.Discrete(2), ""),
    "multibinary": (gs.MultiBinary(4), gs.Box(-1, 1, (1,)), ""),
    "picture": (PICTURE, gs.Discrete(3), ""),
    "tuple": (gs.Tuple([BOX, gs.Discrete(3)]), gs.Discrete(3), ""),
    "nested": (NESTED, gs.Discrete(3), ""),
    "mask in obs": (gs.Dict({"action_mask": gs.MultiBinary(4), "x": BOX}), gs.Discrete(4), "obs"),
    "mask in info": (BOX, gs.Discrete(4, start=1), "info"),
    "critic": (gs.Dict({"critic": gs.Box(-1, 1, (5,)), "policy": BOX}), gs.Box(-2, 2, (1,)), ""),
    "context": (gs.Dict({"context": gs.Box(0, 1, (2,)), "x": BOX}), gs.Discrete(3), ""),
}


class Kinds(gymnasium.Env[Any, Any]):
    """Episodes of 8 steps in the spaces of this name."""

    def __init__(self, kind: str) -> None:
        self.observation_space, self.action_space, self._masked = copy.deepcopy(KINDS[kind])
        self._context: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self._context = (options or {}).get("context", np.zeros(2, np.float32))
        self._steps = 0
        return self._observe()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        choice = float(np.sum(action))
        assert not self._masked or self._mask[int(choice) - int(self.action_space.start)], "the action is masked"  # type: ignore[attr-defined]
        self._steps += 1
        seen = np.asarray(flatten(self.observation_space, self._obs), np.float64)
        reward = choice * float(seen @ np.arange(seen.size)) / 100
        obs, info = self._observe()
        return obs, reward, self._steps == 8, False, info

    def _observe(self) -> tuple[Any, dict[str, Any]]:
        self._obs = self.observation_space.sample()
        info: dict[str, Any] = {}
        if self._masked:
            self._mask = self.np_random.integers(0, 2, 4).astype(np.int8)
            self._mask[self.np_random.integers(4)] = 1
            if self._masked == "obs":
                self._obs["action_mask"] = self._mask
            else:
                info["action_mask"] = self._mask
        if isinstance(self._obs, dict) and "context" in self._obs:
            self._obs["context"] = np.asarray(self._context, np.float32)
        return self._obs, info
