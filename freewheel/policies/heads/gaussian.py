"""The gaussian head: independent columns whose deviation is a parameter and does not depend on the observation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from freewheel.core import ActionSpec, NDArray
from freewheel.policies.spec import HALF_LOG_2PI, Head, Views

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from freewheel.policies.spec import FlatParams, PolicySpec

LOG_STD = "actor.log_std"


class GaussianHead(Head):
    name = "gaussian"
    greedy = "mean"
    analytic = True

    def misfit(self, action: ActionSpec) -> str:
        return "" if action.kind == "box" else "it needs box actions; use auto"

    def parameters(self, spec: PolicySpec) -> dict[str, tuple[tuple[int, ...], float]]:
        return {LOG_STD: ((spec.action_size,), spec.log_std)}

    def actor(self, spec: PolicySpec, params: FlatParams) -> GaussianActor:
        return GaussianActor(params.views[LOG_STD])

    def distribution(self, outputs: Tensor, mask: Tensor | None, parameters: Mapping[str, Tensor]) -> Gaussian:
        return Gaussian(outputs, parameters[LOG_STD])

    def slopes(self, spec: PolicySpec, weights: Views, grads: Views) -> GaussianSlopes:
        return GaussianSlopes(weights[LOG_STD], grads[LOG_STD])


class GaussianActor:
    """Implements NumpyForm."""

    def __init__(self, log_std: NDArray) -> None:
        self._log_std = log_std

    def choose(self, outputs: NDArray, obs: NDArray, rng: np.random.Generator, greedy: bool) -> tuple[NDArray, NDArray]:
        constant = -self._log_std.sum() - HALF_LOG_2PI * outputs.shape[1]
        if greedy:
            return outputs, np.full(len(outputs), constant, np.float32)
        noise = rng.standard_normal(outputs.shape, dtype=np.float32)
        return outputs + np.exp(self._log_std) * noise, -0.5 * np.square(noise).sum(axis=1) + constant


class Gaussian:
    """Implements Distribution."""

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        self.mean, self.log_std = mean, log_std

    def log_prob(self, action: Tensor) -> Tensor:
        noise = (action - self.mean) * (-self.log_std).exp()
        return -0.5 * noise.square().sum(-1) - self.log_std.sum() - HALF_LOG_2PI * self.mean.shape[-1]

    def entropy(self) -> Tensor:
        return (self.log_std + 0.5 + HALF_LOG_2PI).sum().expand(len(self.mean))

    def sample(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        noise = self.mean.new_empty(self.mean.shape).normal_(generator=generator)
        action = self.mean.addcmul(self.log_std.exp(), noise)
        return action, self.log_prob(action)

    def mode(self) -> Tensor:
        return self.mean


class GaussianSlopes:
    """Implements Slopes."""

    def __init__(self, log_std: NDArray, grad: NDArray) -> None:
        self._log_std, self._grad = log_std, grad

    def log_prob(self, outputs: NDArray, inputs: NDArray, action: NDArray) -> NDArray:
        self._precision = np.exp(-self._log_std)
        self._noise = (action - outputs) * self._precision
        constant = self._log_std.sum() + HALF_LOG_2PI * outputs.shape[1]
        return np.asarray(-0.5 * np.square(self._noise).sum(axis=1) - constant)

    def entropy(self) -> NDArray:
        return np.full(len(self._noise), (self._log_std + 0.5 + HALF_LOG_2PI).sum(), np.float32)

    def slope(self, by_log_prob: NDArray, by_entropy: float) -> NDArray:
        np.dot(by_log_prob, np.square(self._noise) - 1, out=self._grad)
        self._grad += by_entropy * len(by_log_prob)
        self._noise *= self._precision
        return self._noise * by_log_prob[:, None]


HEAD = GaussianHead()
