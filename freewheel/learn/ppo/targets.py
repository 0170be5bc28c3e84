"""Advantages and value targets under lag: pure functions of numpy arrays or tensors, in the dtype they are given.

With r = π(at update start)/μ, ρ = min(ρ̄, r), c = min(c̄, r) and Δ_t the clipped-importance correction of V(obs_t):

    δ_t = reward_t + γ (1 - terminated_t) V(next_obs_t) - V(obs_t)
    Δ_t = ρ_t δ_t + γ λ (1 - end_t) c_t Δ_{t+1}
    value target = V(obs_t) + Δ_t
    advantage    = δ_t + γ λ (1 - end_t) Δ_{t+1}

With r = 1 this is exactly generalised advantage estimation.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple

import numpy as np

from freewheel.core import A
from freewheel.policies.spec import namespace


class Targets(NamedTuple, Generic[A]):
    """[T, B] each."""

    advantage: A
    value: A


class Discount(NamedTuple):
    """How the future counts."""

    gamma: float
    lam: float
    rho_bar: float = 1.0
    c_bar: float = 1.0


def continues(terminated: A, truncated: A, valid: A) -> A:
    """[T, B] bool: whether the row after this one is the next row of the same episode."""
    same: Any = namespace(valid).zeros_like(valid)
    same[:-1] = valid[:-1] & valid[1:] & ~(terminated[:-1] | truncated[:-1])
    result: A = same
    return result


def temporal_difference(reward: A, terminated: A, value: A, next_value: A, gamma: float) -> A:
    """δ [T, B]: the future counts through time limits, not through true ends."""
    delta: A = reward + gamma * namespace(value).where(terminated, 0, next_value) - value
    return delta


def estimate(
    delta: A,  # [T, B] δ
    value: A,  # [T, B] V(obs)
    goes_on: A,  # [T, B] bool, from `continues`
    ratio: A | None,  # [T, B] r; None: 1 everywhere
    discount: Discount,
) -> Targets[A]:
    """Advantages and value targets of joined rows, by one backward sweep."""
    xp: Any = namespace(delta)
    carry = (discount.gamma * discount.lam) * _cast(goes_on, delta)  # [T, B]
    pulled: Any = carry
    weighted: Any = delta
    if ratio is not None:
        weighted = ratio.clip(max=discount.rho_bar) * delta
        pulled = carry * ratio.clip(max=discount.c_bar)
    correction = xp.empty_like(delta)  # Δ
    following = xp.zeros_like(delta[0])  # Δ_{t+1}
    for t in range(len(delta) - 1, -1, -1):
        following = correction[t] = weighted[t] + pulled[t] * following
    advantage = xp.concatenate([delta[:-1] + carry[:-1] * correction[1:], delta[-1:]])
    return Targets(advantage, value + correction)


def _cast(flags: Any, like: Any) -> Any:
    return flags.astype(like.dtype) if isinstance(flags, np.ndarray) else flags.to(like.dtype)
