"""A small world with Isaac Lab's contract and its traps, each behind a switch, whose every row can be written down.

Lane b plays episodes of `shortest` + b steps. Position x begins at start(seed, b, e) and grows by the action; the reward is
half of x after the step. Episodes with an even number are cut short by the clock, the others end of themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor


def start(seed: int, lane: int, episode: int) -> int:
    return seed % 4 + 100 * (lane + 1) + 16 * episode


@dataclass(frozen=True)
class Traps:
    """What a world may do to whoever reads it."""

    in_place: bool = True  # buffers of the step before are overwritten
    views: bool = False  # observations are views of the state that the next step changes
    has_final_obs: bool = True  # final observations are given
    stale: bool = True  # and those of an earlier step stay in extras
    both_flags: bool = False  # an end of itself raises the clock's flag too
    first_reset_differs: bool = True
    bounds: tuple[float, float] = (-np.inf, np.inf)
    nested: bool = False  # the critic's group is a dict of its own
    policy_group: str = "policy"
    shortest: int = 3  # steps of an episode in lane 0
    measures: bool = True


@dataclass
class Settings:
    compute_final_obs: bool


@dataclass
class Buffers:
    """What a step returns."""

    policy: Tensor  # [B, 2] x and t
    critic: Tensor  # [B, 3] x, t and the number of the episode
    reward: Tensor
    terminated: Tensor
    truncated: Tensor

    def clone(self) -> Buffers:
        return Buffers(*(tensor.clone() for tensor in vars(self).values()))


@dataclass
class Journal:
    """What a test wants to know of a world."""

    seeds: list[int | None] = field(default_factory=list)
    actions: list[Tensor] = field(default_factory=list)
    closed: int = 0


class IsaacLike(gymnasium.Env[Any, Any]):
    """The world. It waits for no device unless `stale` makes it look whether an episode has ended."""

    def __init__(self, lanes: int = 4, traps: Traps | None = None, device: str = "cpu") -> None:
        self.traps, self.num_envs, self.device = traps or Traps(), lanes, torch.device(device)
        self.metadata = {"render_modes": [], "capturable": True}
        self.cfg, self.generator, self.journal = Settings(self.traps.has_final_obs), torch.Generator(), Journal()
        self._lane = torch.arange(lanes, device=device)
        self._seed = 0
        self._x, self._t, self._episode, reward = (torch.zeros(lanes, device=device) for _ in range(4))
        flags = torch.zeros(lanes, dtype=torch.bool, device=device)
        two, three = (torch.zeros(lanes, size, device=device) for size in (2, 3))
        self._out = Buffers(two, three, reward, flags, flags.clone())
        self.extras: dict[str, Any] = {"measures": self._measures()} if self.traps.measures else {}
        boxes = {name: spaces.Box(-np.inf, np.inf, (size,)) for name, size in (("policy", 2), ("critic", 3))}
        critic = spaces.Dict({"deep": boxes["critic"]}) if self.traps.nested else boxes["critic"]
        self.single_observation_space = spaces.Dict({"critic": critic, self.traps.policy_group: boxes["policy"]})
        self.observation_space = spaces.Box(-np.inf, np.inf, (lanes, 2))  # as Isaac Lab: the policy's part only
        self.single_action_space = spaces.Box(*self.traps.bounds, (1,))
        self.action_space = spaces.Box(*self.traps.bounds, (lanes, 1))

    def state_tensors(self) -> list[Tensor]:
        return [self._x, self._t, self._episode]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        first = not self.journal.seeds
        self.journal.seeds.append(seed)
        self._seed = seed or 0
        self._episode.zero_()
        self._t.zero_()
        self._x.copy_(self._starts() + (0.5 if first and self.traps.first_reset_differs else 0.0))
        self._observe(self._out)
        return self._shown(self._out), self.extras

    def step(self, action: Tensor) -> Any:
        assert action.shape == (self.num_envs, 1)
        assert action.dtype == torch.float32
        assert not action.requires_grad
        self.journal.actions.append(action.clone())
        if not self.traps.in_place:
            self._out = self._out.clone()
        out = self._out
        self._x += action[:, 0]
        self._t += 1
        action.fill_(torch.nan)  # it is the world's own now
        ended, odd = self._t == self._lane + self.traps.shortest, self._episode % 2 == 1
        out.terminated.copy_(ended & odd)
        out.truncated.copy_(ended if self.traps.both_flags else ended & ~odd)
        out.reward.copy_(self._x / 2)
        if self.traps.measures:
            self.extras["measures"] = self._measures()
        if self.traps.has_final_obs and (not self.traps.stale or bool(ended.any())):
            self._observe(out)
            self.extras["final_obs"] = self._shown(out.clone())
        self._episode += ended
        self._t.masked_fill_(ended, 0)
        self._x.copy_(torch.where(ended, self._starts(), self._x))
        self._observe(out)
        return self._shown(out), out.reward, out.terminated, out.truncated, self.extras

    def close(self) -> None:
        self.journal.closed += 1

    def _starts(self) -> Tensor:
        return self._seed % 4 + 100.0 * (self._lane + 1) + 16 * self._episode

    def _measures(self) -> dict[str, Tensor]:
        return {"position": self._x.clone(), "steps": self._t.clone()}

    def _observe(self, out: Buffers) -> None:
        for column, values in enumerate((self._x, self._t, self._episode)):
            out.critic[:, column] = values
        out.policy.copy_(out.critic[:, :2])

    def _shown(self, out: Buffers) -> dict[str, Any]:
        policy = out.critic[:, :2] if self.traps.views else out.policy
        return {self.traps.policy_group: policy, "critic": {"deep": out.critic} if self.traps.nested else out.critic}
