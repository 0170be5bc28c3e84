"""The squashed head: tanh of a Gaussian whose mean and deviation depend on the observation; actions lie in (-1, 1)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from freewheel.core import ActionSpec, NDArray
from freewheel.policies.spec import HALF_LOG_2PI, Head

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from freewheel.policies.spec import FlatParams, PolicySpec

LOG_STD = (-5.0, 2.0)  # bounds of the log standard deviation
EDGE = 1.0 - 1e-6  # actions stay inside (-EDGE, EDGE), so that atanh of them is finite


class SquashedHead(Head):
    """Outputs: means, then log deviations."""

    name = "squashed"
    greedy = "tanh"
    reparameterised = True

    def misfit(self, action: ActionSpec) -> str:
        if action.kind != "box":
            return "it needs box actions; use auto"
        if all(math.isfinite(bound) for bound in (*action.low, *action.high)):
            return ""
        way = "gymnasium.wrappers.TransformAction(env, lambda a: a, gymnasium.spaces.Box(-1, 1, shape))"
        return f"it needs finite action bounds: wrap the env, e.g. {way}; batched simulators take --action-bounds"

    def outputs(self, action_size: int) -> int:
        return 2 * action_size

    def actor(self, spec: PolicySpec, params: FlatParams) -> SquashedActor:
        return SquashedActor()

    def distribution(self, outputs: Tensor, mask: Tensor | None, parameters: Mapping[str, Tensor]) -> Squashed:
        return Squashed(outputs)


class SquashedActor:
    """Implements NumpyForm."""

    def choose(self, outputs: NDArray, obs: NDArray, rng: np.random.Generator, greedy: bool) -> tuple[NDArray, NDArray]:
        mean, log_std = np.split(outputs.astype(np.float64), 2, axis=1)
        np.clip(log_std, *LOG_STD, out=log_std)
        raw = mean if greedy else mean + np.exp(log_std) * rng.standard_normal(mean.shape)
        action = np.clip(np.tanh(raw), -EDGE, EDGE).astype(np.float32)
        return action, squashed_log_prob(mean, log_std, action)


def squashed_log_prob(mean: NDArray, log_std: NDArray, action: NDArray) -> NDArray:
    """log-probability [N] of squashed actions [N, A], in float64 because atanh magnifies near the edges."""
    wide = action.astype(np.float64)
    noise = (np.arctanh(wide) - mean) * np.exp(-log_std)
    each = -0.5 * np.square(noise) - log_std - HALF_LOG_2PI - np.log1p(-np.square(wide))
    return np.asarray(each.sum(axis=1), np.float32)


class Squashed:
    """Implements Reparameterised."""

    def __init__(self, outputs: Tensor) -> None:
        self._outputs = outputs

    def log_prob(self, action: Tensor) -> Tensor:
        mean, log_std = self._outputs.double().chunk(2, dim=-1)
        log_std = log_std.clamp(*LOG_STD)
        wide = action.double().clamp(-EDGE, EDGE)
        noise = (wide.atanh() - mean) * (-log_std).exp()
        each = -0.5 * noise.square() - log_std - HALF_LOG_2PI - (-wide.square()).log1p()
        return each.sum(-1).float()

    def entropy(self) -> Tensor:
        """Return the entropy of the Gaussian before tanh, a usual substitute: the true entropy has no closed form."""
        log_std = self._outputs.double().chunk(2, dim=-1)[1].clamp(*LOG_STD)
        return (log_std + 0.5 + HALF_LOG_2PI).sum(-1).float()

    def sample(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        action, log_prob = self.rsample(generator)
        return action.clamp(-EDGE, EDGE), log_prob

    def rsample(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        mean = self._outputs[..., : self._outputs.shape[-1] // 2]
        noise = mean.new_empty(mean.shape).normal_(generator=generator)
        return squash()(self._outputs, noise)

    def mode(self) -> Tensor:
        return self._outputs.chunk(2, dim=-1)[0].tanh().clamp(-EDGE, EDGE)


@functools.cache
def squash() -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(outputs, noise) -> (action, log-probability), with a gradient of fewer operations than autograd would find.

    With a = tanh(x), x = mean + σ noise:  ∂a/∂x = 1 - a²,  ∂ log p/∂x = 2a,  ∂ log p/∂ log σ = 2a σ noise - 1.
    """
    import torch
    from torch.nn import functional

    class Squash(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, outputs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
            mean, log_std = outputs.chunk(2, dim=-1)
            bounded = log_std.clamp(*LOG_STD)
            kick = bounded.exp() * noise
            raw = mean + kick
            action = torch.tanh(raw)
            # log(1 - tanh²) = 2 (log 2 - x - softplus(-2x)), which does not lose digits where tanh is 1
            each = 2 * (raw + functional.softplus(-2 * raw)) - bounded
            constant = (2 * math.log(2) + HALF_LOG_2PI) * noise.shape[-1]
            ctx.save_for_backward(action, kick, log_std == bounded)
            return action, torch.addcmul(each, noise, noise, value=-0.5).sum(-1) - constant

        @staticmethod
        def backward(ctx: Any, by_action: Tensor, by_log_prob: Tensor) -> tuple[Tensor, None]:
            action, kick, inside = ctx.saved_tensors
            by_log_prob = by_log_prob.unsqueeze(-1)
            by_raw = torch.addcmul(by_action, action, 2 * by_log_prob - by_action * action)
            by_log_std = (by_raw * kick - by_log_prob) * inside
            return torch.cat([by_raw, by_log_std], dim=-1), None

    apply: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = Squash.apply
    return apply


HEAD = SquashedHead()
