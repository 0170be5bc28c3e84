"""Critics: each is a network of its own, the smallest target counts, and of many a subset that is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from freewheel.learn.sac.critics import Critics
from freewheel.policies.spec import PolicySpec

SPEC = PolicySpec(4, "float32", ((0, 3),), ((1, 4),), (), None, "squashed", 2, (12, 8), "tanh", 0.0, "")


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("activation", ["tanh", "relu", "silu"])
def test_critics_are_networks_of_their_own(norm: bool, activation: Any) -> None:
    critics = Critics(replace(SPEC, activation=activation), np.random.default_rng(1), "cpu", count=3, norm=norm)
    kind = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}[activation]
    x = torch.randn(20, 5, generator=torch.Generator().manual_seed(2))
    ours = critics(x)
    ours.square().sum().backward()
    for twin in range(3):
        parts, layers = list[nn.Module](), list[nn.Linear]()
        for weight, bias in _pairs(critics.parameters):
            linear = nn.Linear(*weight.shape[1:])
            linear.weight.data, linear.bias.data = weight[twin].T.detach(), bias[twin, 0].detach()
            between = nn.LayerNorm(weight.shape[2], elementwise_affine=False) if norm else nn.Identity()
            layers.append(linear)
            parts += [linear, between, kind()]
        theirs = nn.Sequential(*parts[:-2])(x).squeeze(-1)
        torch.testing.assert_close(ours[twin], theirs)
        theirs.square().sum().backward()
        for (weight, bias), linear in zip(_pairs(critics.parameters), layers, strict=True):
            assert weight.grad is not None
            assert bias.grad is not None
            torch.testing.assert_close(weight.grad[twin].T, linear.weight.grad)
            torch.testing.assert_close(bias.grad[twin, 0], linear.bias.grad)
    assert not torch.equal(ours[0], ours[1])


def _pairs(parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(parameters[::2], parameters[1::2], strict=True))


def test_critics_begin_as_their_own_targets_and_the_worse_twin_counts() -> None:
    critics = Critics(SPEC, np.random.default_rng(1), "cpu")
    x = torch.randn(50, 5, generator=torch.Generator().manual_seed(2))
    both = critics(x).detach()
    assert (both.argmin(0) == 0).any()
    assert (both.argmin(0) == 1).any()
    assert torch.equal(critics.lower_target(x), torch.minimum(*both))
    critics.vector.zero_()
    assert torch.equal(critics.lower_target(x), torch.minimum(*both)), "targets share the critics' memory"


def test_of_many_critics_a_new_subset_makes_each_target() -> None:
    critics = Critics(SPEC, np.random.default_rng(1), "cpu", count=4)
    x = torch.randn(50, 5, generator=torch.Generator().manual_seed(2))
    values = critics(x).detach()
    pairs = {(a, b): torch.minimum(values[a], values[b]) for a in range(4) for b in range(a)}
    drawn = {pair for _ in range(100) for pair, lower in pairs.items() if torch.equal(critics.lower_target(x), lower)}
    assert drawn == set(pairs)


def test_the_actor_follows_the_smallest_of_all_or_the_mean_of_many() -> None:
    values = torch.tensor([[1.0, 5.0], [2.0, 3.0], [6.0, 4.0]])
    for subset, wanted in ((3, [1.0, 3.0]), (2, [3.0, 4.0])):
        critics = Critics(SPEC, np.random.default_rng(1), "cpu", count=3, subset=subset)
        given = values.clone().requires_grad_()
        (given.amin(0) if subset == 3 else given.mean(0)).sum().backward()
        followed, slopes = critics.for_actor(values)
        assert followed.tolist() == pytest.approx(wanted)
        assert given.grad is not None
        torch.testing.assert_close(slopes, given.grad)
