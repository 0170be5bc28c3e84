"""PPO's objective on one minibatch, by autograd: the general path, for any module on any device."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from freewheel.core import NDArray
from freewheel.policies.nets import Distribution, Output, PolicyNet

Clip = TypeVar("Clip", float, Tensor)


class Minibatch(NamedTuple):
    """Rows to learn from, [N, ...]."""

    inputs: NDArray  # [N, D] observations as the network sees them
    action: NDArray
    reference: NDArray  # [N] log-probability that the ratio is taken against
    weight: NDArray | None  # [N] ρ of rows that an older version chose; None: all 1
    advantage: NDArray  # [N]
    value: NDArray  # [N] value target

    def take(self, rows: NDArray | slice) -> Minibatch:
        weight = None if self.weight is None else self.weight[rows]
        return Minibatch(
            self.inputs[rows], self.action[rows], self.reference[rows], weight, self.advantage[rows], self.value[rows]
        )


class Coefficients(NamedTuple):
    """Weights of the loss: policy + value × value loss - entropy × entropy."""

    clip: float
    value: float
    entropy: float


class Losses(NamedTuple):
    """What a minibatch showed."""

    policy: float
    value: float
    entropy: float
    kl: float  # of the policy now from the reference, estimated
    clipped: float  # share of rows beyond the clip


class Objective(Protocol):
    """Evaluates a PolicyNet and fills its flat gradient."""

    def evaluate(self, inputs: NDArray, action: NDArray) -> tuple[NDArray, NDArray]: ...  # values [N], log-probs [N]
    def values(self, inputs: NDArray) -> NDArray: ...
    def gradient(self, batch: Minibatch, weights: Coefficients) -> Losses: ...


class Terms(NamedTuple):
    """A minibatch as tensors, with what the network says about it."""

    output: Output
    law: Distribution
    action: Tensor
    reference: Tensor
    weight: Tensor | None
    advantage: Tensor
    value: Tensor


def surrogate(terms: Terms, clip: Clip) -> Tensor:
    """[5] in the order of Losses; the first three are what is minimised."""
    log_ratio = terms.law.log_prob(terms.action) - terms.reference
    ratio = log_ratio.exp()
    gain = torch.minimum(ratio * terms.advantage, ratio.clamp(1 - clip, 1 + clip) * terms.advantage)
    if terms.weight is not None:
        gain = gain * terms.weight
    value = (terms.output.value - terms.value).square().mean()
    with torch.no_grad():
        kl = ((ratio - 1) - log_ratio).mean()
        clipped = ((ratio - 1).abs() > clip).float().mean()
    return torch.stack([-gain.mean(), value, terms.law.entropy().mean(), kl, clipped])


class Autograd:
    """Implements Objective for every PolicyNet."""

    def __init__(self, net: PolicyNet) -> None:
        self.net = net
        self._device = net.vector.device

    @torch.no_grad()
    def evaluate(self, inputs: NDArray, action: NDArray) -> tuple[NDArray, NDArray]:
        x = self._tensor(inputs)
        output = self.net(x)
        return output.value.cpu().numpy(), self.net.law(x, output.head).log_prob(self._tensor(action)).cpu().numpy()

    @torch.no_grad()
    def values(self, inputs: NDArray) -> NDArray:
        values: NDArray = self.net(self._tensor(inputs)).value.cpu().numpy()
        return values

    def gradient(self, batch: Minibatch, weights: Coefficients) -> Losses:
        x = self._tensor(batch.inputs)
        output = self.net(x)
        weight = None if batch.weight is None else self._tensor(batch.weight)
        action, reference, advantage, value = map(
            self._tensor, (batch.action, batch.reference, batch.advantage, batch.value)
        )
        law = self.net.law(x, output.head)
        losses = surrogate(Terms(output, law, action, reference, weight, advantage, value), weights.clip)
        self.net.grad.zero_()
        (losses[0] + weights.value * losses[1] - weights.entropy * losses[2]).backward()
        return Losses(*losses.tolist())

    def _tensor(self, values: NDArray) -> Tensor:
        return torch.from_numpy(values).to(self._device)
