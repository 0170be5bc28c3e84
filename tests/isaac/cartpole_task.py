"""Isaac-Cartpole-Direct as functions of its observation: what a model of it does not have to learn."""

from __future__ import annotations

import math

import torch
from torch import Tensor

STEP = 1 / 60  # seconds, which rewards are multiplied by
EDGE = 3.0  # metres: a cart that is farther out is lost


def termination(_obs: Tensor, _action: Tensor, next_obs: Tensor) -> Tensor:
    """Columns: position of the cart, angle of the pole, and their velocities."""
    return next_obs[:, 0].abs() > EDGE


def reward(obs: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:
    lost = termination(obs, action, next_obs)
    _, angle, cart, pole = next_obs.unbind(-1)
    angle = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
    return (torch.where(lost, -2.0, 1.0) - angle.square() - 0.01 * cart.abs() - 0.005 * pole.abs()) * STEP
