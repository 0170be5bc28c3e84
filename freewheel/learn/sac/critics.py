"""Critics: several Q(observation, action) networks in batched products, and the targets that follow them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from freewheel.core import NDArray
from freewheel.policies.nets import ACTIVATIONS
from freewheel.policies.spec import PolicySpec


class Critics:
    """C = `count` networks. With discrete actions, each gives a value for every one of the K actions. All weights are
    views of one flat `vector`, so a target follows by one operation."""

    def __init__(
        self,
        spec: PolicySpec,
        rng: np.random.Generator,
        device: str,
        *,
        count: int = 2,
        subset: int = 2,
        norm: bool = False,
    ) -> None:
        self.count, self.subset, self._norm = count, subset, norm
        inputs = sum(stop - start for start, stop in spec.critic_columns)
        self._by_action = spec.discrete
        ends = (inputs, spec.action_size) if self._by_action else (inputs + spec.action_size, 1)
        self._shapes, start = list[tuple[int, int, int]](), list[NDArray]()
        for fan_in, fan_out in itertools.pairwise((ends[0], *spec.hidden, ends[1])):
            for rows in (fan_in, 1):  # weights, biases
                self._shapes.append((self.count, rows, fan_out))
                start.append(rng.uniform(-1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in), self._shapes[-1]).ravel())
        self.vector = torch.from_numpy(np.concatenate(start).astype(np.float32)).to(device)
        self.parameters = [nn.Parameter(view) for view in self.views(self.vector)]
        self.frozen = [parameter.detach() for parameter in self.parameters]
        self.target = self.vector.clone()
        self._target_views = self.views(self.target)
        self._activation = ACTIVATIONS[spec.activation]
        self.generator = torch.Generator(device).manual_seed(int(rng.integers(2**63)))  # draws subsets

    def views(self, vector: Tensor) -> list[Tensor]:
        """Return weights and biases, in order, as views of a flat vector."""
        parts = vector.split([math.prod(shape) for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def __call__(self, x: Tensor, weights: Sequence[Tensor] | None = None) -> Tensor:
        """x [N, D + A] -> [C, N], or for discrete actions [N, D] -> [C, N, K]. `frozen` weights get no gradient."""
        weights = self.parameters if weights is None else weights
        x = x.expand(self.count, *x.shape)
        *hidden, last, bias = weights
        for weight, shift in zip(hidden[::2], hidden[1::2], strict=True):
            x = torch.baddbmm(shift, x, weight)
            if self._norm:
                x = functional.layer_norm(x, x.shape[-1:])
            x = self._activation(x)
        if self._by_action:
            return torch.baddbmm(bias, x, last)
        if x.is_cuda:
            return torch.baddbmm(bias, x, last).squeeze(-1)
        # a matrix product with one column is slow on a CPU
        return (x * last.transpose(1, 2)).sum(-1) + bias.squeeze(-1)

    def lower_target(self, x: Tensor) -> Tensor:
        """Return the smallest value [N] of the target critics, or of a random subset of them."""
        values = self(x, self._target_views)
        if self.subset < self.count:
            order = torch.rand(self.count, generator=self.generator, device=values.device).argsort()
            values = values.index_select(0, order[: self.subset])
        return values.amin(0)

    def for_actor(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the value [N] that the actor increases, and its slopes [C, N] by `values` [C, N]. It is the smallest
        value if all critics make the target, else the mean, because the smallest of many is far too low."""
        if self.subset < self.count:
            return values.mean(0), torch.full_like(values, 1 / self.count)
        lower = values.amin(0)
        return lower, (values == lower).to(values.dtype)

    def follow(self, tau: float) -> None:
        self.target.lerp_(self.vector, tau)
