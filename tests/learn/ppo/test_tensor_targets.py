"""Targets on tensors are those on arrays, whatever ended where and whoever acted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from freewheel.core import Transitions
from freewheel.learn.ppo.targets import Discount, continues, estimate, temporal_difference
from freewheel.learn.ppo.tensor_targets import targets
from freewheel.learn.settings import PPOConfig

T, B = 7, 5


@pytest.mark.parametrize("kind", ["corrected", "plain"])
def test_they_are_those_on_arrays(kind: str) -> None:
    rng = np.random.default_rng(3)
    reward, value, next_value = (rng.normal(size=(T, B)).astype(np.float32) for _ in range(3))
    ratio = rng.uniform(0.2, 4.0, (T, B)).astype(np.float32)
    terminated, truncated = (rng.random((T, B)) < 0.2 for _ in range(2))
    config = PPOConfig(
        gamma=0.9, gae_lambda=0.8, rho_bar=2.0, c_bar=1.5, targets="plain" if kind == "plain" else "corrected"
    )
    delta = temporal_difference(reward, terminated, value, next_value, 0.9)
    goes_on = continues(terminated, truncated, np.ones_like(terminated))
    expected = estimate(delta, value, goes_on, None if kind == "plain" else ratio, Discount(0.9, 0.8, 2.0, 1.5))
    tensor, unread = torch.from_numpy, torch.zeros(T, B)
    data = Transitions(
        unread, unread, unread, tensor(reward), tensor(terminated), tensor(truncated), unread, valid=unread
    )
    found = targets(data, tensor(value), tensor(next_value), tensor(ratio), config)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-5, atol=1e-6)
