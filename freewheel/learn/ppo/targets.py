"""Advantages and value targets under lag: pure functions of numpy arrays or of tensors (here Any), which keep their dtype.

With r = π(at update start)/μ, ρ = min(ρ̄, r), c = min(c̄, r) and Δ_t the clipped-importance correction of V(obs_t):

    δ_t = reward_t + γ (1 - terminated_t) V(next_obs_t) - V(obs_t)
    Δ_t = ρ_t δ_t + γ λ (1 - end_t) c_t Δ_{t+1}
    value target = V(obs_t) + Δ_t
    advantage    = δ_t + γ λ (1 - end_t) Δ_{t+1}

With r = 1 this is exactly generalised advantage estimation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from freewheel.policies.spec import namespace


class Targets(NamedTuple):
    """[T, B] each."""

    advantage: Any
    value: Any


class Discount(NamedTuple):
    """How the future counts."""

    gamma: float
    lam: float
    rho_bar: float = 1.0
    c_bar: float = 1.0


def continues(terminated: Any, truncated: Any, valid: Any) -> Any:
    """[T, B] bool: whether the row after this one is the next row of the same episode."""
    result = namespace(valid).zeros_like(valid)
    result[:-1] = valid[:-1] & valid[1:] & ~(terminated[:-1] | truncated[:-1])
    return result


def temporal_difference(reward: Any, terminated: Any, value: Any, next_value: Any, gamma: float) -> Any:
    """δ [T, B]: the future counts through time limits, not through true ends."""
    return reward + gamma * namespace(value).where(terminated, 0, next_value) - value


def estimate(
    delta: Any,  # [T, B] δ
    value: Any,  # [T, B] V(obs)
    goes_on: Any,  # [T, B] bool, from `continues`
    ratio: Any | None,  # [T, B] r; None: 1 everywhere
    discount: Discount,
) -> Targets:
    """Advantages and value targets of joined rows, by one backward sweep."""
    xp = namespace(delta)
    carry = (discount.gamma * discount.lam) * _cast(goes_on, delta)  # [T, B]
    pulled, weighted = carry, delta
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
