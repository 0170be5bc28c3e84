"""A deterministic head: tanh of the network's outputs; acting adds Gaussian noise to explore."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from freewheel.core import ActionSpec, NDArray
from freewheel.policies.spec import Head

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from freewheel.policies.spec import FlatParams, PolicySpec

EXPLORATION = 0.1  # standard deviation of the noise, where actions lie in -1 .. 1


class DeterministicHead(Head):
    """Its actions have no density: log-probabilities are reported as 0, and only off-policy algorithms can use it."""

    name = "deterministic"

    def misfit(self, action: ActionSpec) -> str:
        bounded = action.kind == "box" and all(np.isfinite([*action.low, *action.high]))
        return "" if bounded else "it needs box actions with finite bounds"

    def outputs(self, action_size: int) -> int:
        return action_size

    def actor(self, spec: PolicySpec, params: FlatParams) -> DeterministicActor:
        return DeterministicActor()

    def distribution(self, outputs: Tensor, mask: Tensor | None, parameters: Mapping[str, Tensor]) -> Deterministic:
        return Deterministic(outputs)


class DeterministicActor:
    """In numpy, for workers."""

    def choose(self, outputs: NDArray, obs: NDArray, rng: np.random.Generator, greedy: bool) -> tuple[NDArray, NDArray]:
        action = np.tanh(outputs)
        if not greedy:
            action += np.float32(EXPLORATION) * rng.standard_normal(action.shape, dtype=np.float32)
        return np.clip(action, -1, 1), np.zeros(len(action), np.float32)


class Deterministic:
    """In torch, for the learner and for batched simulators."""

    def __init__(self, outputs: Tensor) -> None:
        self.action = outputs.tanh()

    def log_prob(self, action: Tensor) -> Tensor:
        return self.action.new_zeros(len(action))

    def entropy(self) -> Tensor:
        return self.action.new_zeros(len(self.action))

    def sample(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        noise = self.action.new_empty(self.action.shape).normal_(0, EXPLORATION, generator=generator)
        return (self.action + noise).clamp(-1, 1), self.entropy()

    def mode(self) -> Tensor:
        return self.action


HEAD = DeterministicHead()
