"""The squashed head near its edges, and its gradient."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.policies.heads.squashed import EDGE, LOG_STD, Squashed, SquashedActor, squash, squashed_log_prob


def plainly(outputs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Squashing as a textbook has it."""
    mean, log_std = outputs.chunk(2, dim=-1)
    std = log_std.clamp(*LOG_STD).exp()
    raw = mean + std * noise
    action = torch.tanh(raw)
    log_prob = torch.distributions.Normal(mean, std).log_prob(raw) - torch.log(1 - action.square())
    return action, log_prob.sum(-1)


def outputs_and_noise(count: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    outputs = torch.rand(count, 6, generator=rng, dtype=torch.float64) * 2 - 1
    noise = torch.rand(count, 3, generator=rng, dtype=torch.float64) * 2 - 1
    outputs[0, 3], outputs[1, 4], outputs[2, 5] = -7.0, 3.0, 2.5  # beyond the bounds of the log deviation
    noise[:3] *= 0.1  # so that the textbook loses no digits there
    return outputs.requires_grad_(), noise


def test_squashing_and_its_slopes_are_the_textbooks() -> None:
    (ours, noise), (theirs, _) = outputs_and_noise(), outputs_and_noise()
    rng = torch.Generator().manual_seed(5)
    by_action = torch.randn(40, 3, generator=rng, dtype=torch.float64)
    by_log_prob = torch.randn(40, generator=rng, dtype=torch.float64)
    for found, expected in zip(squash()(ours, noise), plainly(theirs, noise), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for outputs, function in ((ours, squash()), (theirs, plainly)):
        torch.autograd.backward(function(outputs, noise), [by_action, by_log_prob])
    assert ours.grad is not None
    assert theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9)
    assert ours.grad[0, 3] == ours.grad[1, 4] == ours.grad[2, 5] == 0
    assert torch.count_nonzero(ours.grad) == ours.grad.numel() - 3


def test_its_slopes_are_those_of_differences() -> None:
    outputs, noise = outputs_and_noise(6, seed=2)
    assert torch.autograd.gradcheck(lambda values: squash()(values, noise), (outputs,))


def test_digits_are_not_lost_far_out() -> None:
    """At x = 30, 1 - tanh² is 0 in float32; log(1 - tanh²) is log 4 - 60."""
    outputs = torch.tensor([[30.0, -30.0, 0.0, 0.0]], requires_grad=True)
    _, log_prob = squash()(outputs, torch.zeros(1, 2))
    assert float(log_prob.detach()) == pytest.approx(2 * (-0.5 * math.log(2 * math.pi) - math.log(4) + 60), rel=1e-6)
    log_prob.sum().backward()
    assert outputs.grad is not None
    assert outputs.grad.tolist() == [[2.0, -2.0, -1.0, -1.0]]


def test_actions_stay_inside_the_edge_and_deviations_inside_their_bounds() -> None:
    outputs = np.tile(np.array([40.0, -40.0, 9.0, -9.0], np.float32), (1_000, 1))
    acting = SquashedActor().choose(outputs, outputs, np.random.default_rng(0), False)
    drawn = Squashed(torch.from_numpy(outputs)).sample(torch.Generator().manual_seed(0))
    for action, log_prob in (acting, tuple(part.numpy() for part in drawn)):
        assert np.abs(action).max() <= np.float32(EDGE)
        assert np.isfinite(np.arctanh(action)).all()
        assert np.isfinite(log_prob).all()
    constant = 2 * 0.5 * math.log(2 * math.pi * math.e)
    assert float(Squashed(torch.from_numpy(outputs)).entropy()[0]) == pytest.approx(constant + sum(LOG_STD))


def test_the_density_integrates_to_one() -> None:
    for mean, log_std in ((0.0, 0.0), (0.7, -1.0), (-1.0, LOG_STD[0] + 3)):
        raw = np.linspace(-7, 7, 20_001)  # even before tanh, where the density is a bell
        action = np.tanh(raw)[:, None]
        density = np.exp(squashed_log_prob(np.full_like(action, mean), np.full_like(action, log_std), action))
        area = np.sum((density[1:] + density[:-1]) / 2 * np.diff(action[:, 0]))
        assert area == pytest.approx(1, abs=2e-4)
