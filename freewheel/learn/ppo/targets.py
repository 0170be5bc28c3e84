"""Advantages and value targets under lag: pure functions, in the dtype they are given.

With r = π(at update start)/μ, ρ = min(ρ̄, r), c = min(c̄, r) and Δ_t the clipped-importance correction of V(obs_t):

    δ_t = reward_t + γ (1 - terminated_t) V(next_obs_t) - V(obs_t)
    Δ_t = ρ_t δ_t + γ λ (1 - end_t) c_t Δ_{t+1}
    value target = V(obs_t) + Δ_t
    advantage    = δ_t + γ λ (1 - end_t) Δ_{t+1}

With r = 1 this is generalised advantage estimation, to the letter.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from freewheel.core import NDArray


class Targets(NamedTuple):
    """[T, B] each; rows that are not valid hold zeros."""

    advantage: NDArray
    value: NDArray


class Discount(NamedTuple):
    """How the future counts."""

    gamma: float
    lam: float
    rho_bar: float = 1.0
    c_bar: float = 1.0


def continues(terminated: NDArray, truncated: NDArray, valid: NDArray) -> NDArray:
    """[T, B] bool: whether the row after this one is the next row of the same episode."""
    goes_on = np.zeros_like(valid)
    goes_on[:-1] = valid[:-1] & valid[1:] & ~(terminated[:-1] | truncated[:-1])
    return goes_on


def estimate(
    delta: NDArray,  # [T, B] δ
    value: NDArray,  # [T, B] V(obs)
    goes_on: NDArray,  # [T, B] bool, from `continues`
    ratio: NDArray | None,  # [T, B] r; None where all rows are of the current version: r = 1
    discount: Discount,
) -> Targets:
    """Advantages and value targets of joined rows, by one backward sweep."""
    carry = (discount.gamma * discount.lam) * goes_on.astype(delta.dtype)  # [T, B]
    pulled, weighted = carry, delta
    if ratio is not None:
        weighted = np.minimum(discount.rho_bar, ratio) * delta
        pulled = carry * np.minimum(discount.c_bar, ratio)
    correction = np.empty_like(delta)  # Δ
    following = np.zeros_like(delta[0])  # Δ_{t+1}
    for t in range(len(delta) - 1, -1, -1):
        following = correction[t] = weighted[t] + pulled[t] * following
    advantage = delta.copy()
    advantage[:-1] += carry[:-1] * correction[1:]
    return Targets(advantage, value + correction)


def temporal_difference(
    reward: NDArray, terminated: NDArray, value: NDArray, next_value: NDArray, gamma: float
) -> NDArray:
    """δ [T, B]: through time limits the future counts, through true ends it does not."""
    return np.asarray(reward + gamma * np.where(terminated, 0, next_value) - value, value.dtype)
