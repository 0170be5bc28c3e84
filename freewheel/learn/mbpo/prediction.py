"""Predictions of the ensemble's members, draws from them, and the disagreement of two members."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class EnsembleOutput(NamedTuple):
    """The predictions of E networks from N inputs each, in units of normalised targets."""

    mean: Tensor  # [E, N, K]
    logvar: Tensor  # [E, N, K]
    logit: Tensor  # [E, N, 1] of the termination; [E, N, 0] if it is not learned


class Prediction(NamedTuple):
    """A draw from the model. A part is None if a function of the task computes it."""

    reward: Tensor | None  # [N]
    next_obs: Tensor  # [N, P] predicted columns
    termination: Tensor | None  # [N] probability
    disagreement: Tensor | None = None  # [N] of two members, if requested


def divergence(one: EnsembleOutput, other: EnsembleOutput, weight: Tensor) -> Tensor:
    """Return the geometric Jensen-Shannon divergence [...] of two Gaussians: the mean of their KL divergences from
    their normalised geometric mean. It is large if the means differ by more than the noise that both expect, or if the
    variances differ. weight [K]: 0 for targets that do not count."""
    first, second = torch.exp(-one.logvar), torch.exp(-other.logvar)
    precision, spread = 0.5 * (first + second), 0.5 * (1 / first + 1 / second)
    apart = 0.125 * (one.mean - other.mean).square() * (first.square() + second.square()) / precision
    each = spread * precision - 1 - torch.log(precision) - 0.5 * (one.logvar + other.logvar) + apart
    return 0.5 * (each * weight).sum(-1)
