"""What members of the ensemble predict, what is drawn from it, and how far two of them disagree."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class EnsembleOutput(NamedTuple):
    """What E networks predict from N inputs each, in units of normalised targets."""

    mean: Tensor  # [E, N, K]
    logvar: Tensor  # [E, N, K]
    logit: Tensor  # [E, N, 1] of termination; [E, N, 0] where it is not learned


class Prediction(NamedTuple):
    """A draw from the model; None where a function of the task decides."""

    reward: Tensor | None  # [N]
    next_obs: Tensor  # [N, P] its predicted columns
    termination: Tensor | None  # [N] its probability
    disagreement: Tensor | None = None  # [N] of two members, where it was asked for


def divergence(one: EnsembleOutput, other: EnsembleOutput, weight: Tensor) -> Tensor:
    """The geometric Jensen-Shannon divergence of two Gaussians, [...]: the mean of their KL divergences from the normalised
    geometric mean of both. It is large where means differ by more than the noise that both expect, or variances differ.
    weight [K]: 0 for targets that do not count."""
    first, second = torch.exp(-one.logvar), torch.exp(-other.logvar)
    precision, spread = 0.5 * (first + second), 0.5 * (1 / first + 1 / second)
    apart = 0.125 * (one.mean - other.mean).square() * (first.square() + second.square()) / precision
    each = spread * precision - 1 - torch.log(precision) - 0.5 * (one.logvar + other.logvar) + apart
    return 0.5 * (each * weight).sum(-1)
