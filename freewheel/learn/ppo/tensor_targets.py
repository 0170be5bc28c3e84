"""Advantages and value targets on tensors [T, B], as learn/targets.py has them on arrays, without a wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.core import Transitions
from freewheel.learn.settings import PPOConfig


def targets(
    data: Transitions[Tensor], value: Tensor, next_value: Tensor, ratio: Tensor, config: PPOConfig
) -> tuple[Tensor, Tensor]:
    """Advantages and value targets; ratio: how much likelier the present policy is to act so than the one that did."""
    delta = data.reward + config.gamma * (~data.terminated) * next_value - value
    goes_on = (~(data.terminated | data.truncated)).float() * (config.gamma * config.gae_lambda)
    rho, c = ratio.clamp(max=config.rho_bar), ratio.clamp(max=config.c_bar)
    if config.targets == "plain":
        rho, c = torch.ones_like(rho), torch.ones_like(c)
    advantage, correction = torch.empty_like(delta), torch.zeros_like(delta[0])
    target = torch.empty_like(delta)
    for t in range(len(delta) - 1, -1, -1):
        advantage[t] = delta[t] + goes_on[t] * correction
        correction = rho[t] * delta[t] + goes_on[t] * c[t] * correction
        target[t] = value[t] + correction
    return advantage, target
