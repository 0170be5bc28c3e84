"""Twin critics as one batched module: two Q-functions, every layer one batched matrix product."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from freewheel.policies.nets import ACTIVATIONS
from freewheel.policies.spec import PolicySpec

TWINS = 2


class TwinCritics:
    """Q(x, a) twice. All weights are views of one flat `vector`, so a target follows by one operation."""

    def __init__(self, spec: PolicySpec, rng: np.random.Generator, device: str, *, norm: bool) -> None:
        inputs = sum(stop - start for start, stop in spec.critic_columns) + spec.action_size
        sizes = (inputs, *spec.hidden, 1)
        self._shapes = [
            shape
            for fan_in, fan_out in itertools.pairwise(sizes)
            for shape in ((TWINS, fan_in, fan_out), (TWINS, 1, fan_out))
        ]
        start = [_uniform(shape, sizes[i // 2], rng) for i, shape in enumerate(self._shapes)]
        self.vector = torch.from_numpy(np.concatenate([part.ravel() for part in start])).to(device)
        self.parameters = [nn.Parameter(view) for view in self.views(self.vector)]
        self.frozen = [parameter.detach() for parameter in self.parameters]
        self.target = self.vector.clone()
        self._target_views = self.views(self.target)
        self._activation, self._norm = ACTIVATIONS[spec.activation], norm

    def views(self, vector: Tensor) -> list[Tensor]:
        """Weights and biases, in order, as views of a flat vector."""
        parts = vector.split([math.prod(shape) for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def __call__(self, x: Tensor, weights: Sequence[Tensor] | None = None) -> Tensor:
        """x [N, D + A] -> [2, N]; with `frozen` weights, gradients flow to x alone."""
        weights = self.parameters if weights is None else weights
        x = x.expand(TWINS, *x.shape)
        *hidden, last, bias = weights
        for weight, shift in zip(hidden[::2], hidden[1::2], strict=True):
            x = torch.baddbmm(shift, x, weight)
            if self._norm:
                x = functional.layer_norm(x, x.shape[-1:])
            x = self._activation(x)
        if x.is_cuda:
            return torch.baddbmm(bias, x, last).squeeze(-1)
        # a matrix product with one column is slow on a CPU
        return (x * last.transpose(1, 2)).sum(-1) + bias.squeeze(-1)

    def lower_target(self, x: Tensor) -> Tensor:
        """The smaller of the target critics' values, [N]."""
        return self(x, self._target_views).amin(0)

    def follow(self, tau: float) -> None:
        self.target.lerp_(self.vector, tau)


def _uniform(
    shape: tuple[int, ...], fan_in: int, rng: np.random.Generator
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    bound = 1 / math.sqrt(fan_in)
    return rng.uniform(-bound, bound, shape).astype(np.float32)
