"""The rows that PPO's engines learn from, as arrays or tensors. Advantages and value targets allow for lag.

With r = π(at update start)/μ, ρ = min(ρ̄, r), c = min(c̄, r) and Δ_t the clipped-importance correction of V(obs_t):

    δ_t = reward_t + γ (1 - terminated_t) V(next_obs_t) - V(obs_t)
    Δ_t = ρ_t δ_t + γ λ (1 - end_t) c_t Δ_{t+1}
    value target = V(obs_t) + Δ_t
    advantage    = δ_t + γ λ (1 - end_t) Δ_{t+1}

With r = 1 this is exactly generalised advantage estimation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol

import numpy as np

from freewheel.core import A
from freewheel.learn.finite import ADVANTAGE, GRADIENT, LOG_PROB, STATISTICS, TARGET, WEIGHTS
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.ppo.rollout_buffer import RolloutBatch
from freewheel.learn.spec import ALONE, Peers
from freewheel.policies.spec import namespace

#: The numbers that a minibatch yields, in the order of every array of losses. The first three make the loss.
LOSSES = ("loss/policy", "loss/value", "policy/entropy", "policy/kl", "policy/clipped")
KL = LOSSES.index("policy/kl")
REWARD_CLIP = 10.0  # rewards that are scaled by the deviation of the return stay within ± REWARD_CLIP


class Coefficients(NamedTuple):
    """The coefficients of one update, after schedules."""

    lr: float
    clip: float
    entropy: float
    reward_factor: Any = None  # a scalar of the rows' kind; None: rewards as they are


class Everybody(NamedTuple):
    """Facts about the rows of an update over all learners that train together."""

    rows: Sequence[int]  # of each learner, by rank
    lagging: bool  # an older policy than the one to be improved chose some of them


class Minibatch(NamedTuple, Generic[A]):
    """The rows [N, ...] of a gradient step."""

    inputs: A  # [N, D] observations as the network reads them
    action: A
    reference: A  # [N] log-probability that the ratio is taken against
    weight: A | None  # [N] ρ of rows that an older version chose; None: all 1
    advantage: A  # [N]
    value: A  # [N] value target

    def take(self, rows: Any) -> Minibatch[A]:
        parts: Any = (None if part is None else part[rows] for part in self)
        return Minibatch(*parts)


def inspected(rows: Minibatch[A]) -> dict[str, Any]:
    """Return the parts of the rows that may not be finite, by name, in the order in which one leads to the next."""
    return {STATISTICS: rows.inputs, LOG_PROB: rows.reference, TARGET: rows.value, ADVANTAGE: rows.advantage}


#: All names of numbers that an update may find not finite, in the same order.
BREAKABLE = (STATISTICS, LOG_PROB, TARGET, ADVANTAGE, *LOSSES, GRADIENT, WEIGHTS)


class Network(Protocol):
    """The network that `prepare` computes with, on numpy arrays or on tensors."""

    def inputs(self, obs: Any) -> Any: ...  # [N, D] as the network reads them
    def evaluate(self, inputs: Any, action: Any) -> tuple[Any, Any]: ...  # values [N], log-probabilities [N]
    def values(self, inputs: Any) -> Any: ...  # [N]
    def next_values(self, batch: RolloutBatch[Any], value: Any, goes_on: Any) -> Any: ...  # V(next_obs) [T, L]


def prepare(
    network: Network,
    batch: RolloutBatch[A],
    config: PPOConfig,
    *,
    recompute: bool,
    reward_factor: Any,
    peers: Peers = ALONE,
) -> tuple[Minibatch[A], Any, Any]:
    """Return all rows with their targets, the share of effective samples under importance weights, and the explained
    variance of the targets. Both numbers are over the rows of all learners.

    recompute: the policy that chose the rows may differ from the one to be improved.
    """
    data, flat = batch.data, batch.flatten
    xp = namespace(data.reward)
    inputs, action, behaviour = network.inputs(flat(data.obs)), flat(data.action), flat(data.log_prob)
    reference, weight, ratio, effective = behaviour, None, None, 1.0
    if recompute:
        value, start = network.evaluate(inputs, action)
        ratio = xp.exp(start - behaviour)
        effective = ratio.sum() ** 2 / (xp.square(ratio).sum() * len(ratio))
        if config.surrogate == "decoupled":
            reference, weight = start, ratio.clip(max=config.rho_bar)
    else:
        value = network.values(inputs)
    reward = batch.spread(flat(data.reward))  # gaps may hold anything
    if reward_factor is not None:
        reward = (reward * reward_factor).clip(-REWARD_CLIP, REWARD_CLIP)
    goes_on = continues(data.terminated, data.truncated, data.valid)
    grid = batch.spread(value)
    delta = temporal_difference(reward, data.terminated, grid, network.next_values(batch, grid, goes_on), config.gamma)
    corrected = None if ratio is None or config.targets == "plain" else batch.spread(ratio)
    advantage, goal = map(flat, estimate(delta, grid, goes_on, corrected, config))
    if peers.count > 1:
        effective, explained = _over_all(peers, ratio, goal, value)
    else:
        explained = 1.0 - xp.var(goal - value, correction=0) / (xp.var(goal, correction=0) + 1e-8)
    return Minibatch(inputs, action, reference, weight, advantage, goal), effective, explained


def _over_all(peers: Peers, ratio: Any | None, goal: Any, value: Any) -> tuple[Any, Any]:
    """Return the share of effective samples and the explained variance, by one sum over all learners."""
    xp = namespace(goal)
    parts = [xp.asarray(part, dtype=xp.float64) for part in (goal - value, goal, goal if ratio is None else ratio)]
    rows = xp.ones_like(parts[0]).sum()
    sums = xp.stack([rows, *(number for part in parts for number in (part.sum(), xp.square(part).sum()))])
    peers.sum(sums)
    means = sums[1:] / sums[0]
    left, spread = (square - mean * mean for mean, square in (means[:2], means[2:4]))
    effective = 1.0 if ratio is None else means[4] * means[4] / means[5]
    return effective, 1.0 - left / (spread + 1e-8)


def continues(terminated: Any, truncated: Any, valid: Any) -> Any:
    """Return [T, B] bool: whether the row after each one is the next row of the same episode."""
    result = namespace(valid).zeros_like(valid)
    result[:-1] = valid[:-1] & valid[1:] & ~(terminated[:-1] | truncated[:-1])
    return result


def temporal_difference(reward: Any, terminated: Any, value: Any, next_value: Any, gamma: float) -> Any:
    """Return δ [T, B]. The future counts after a time limit, but not after a termination."""
    return reward + gamma * namespace(value).where(terminated, 0, next_value) - value


def estimate(delta: Any, value: Any, goes_on: Any, ratio: Any | None, config: PPOConfig) -> tuple[Any, Any]:
    """Return advantages and value targets [T, B] of joined rows, by one backward sweep, in the dtype of δ.

    All arguments are [T, B]: δ, V(obs), the result of `continues`, and the ratio r (None: 1 everywhere).
    """
    xp = namespace(delta)
    floats = goes_on.astype(delta.dtype) if isinstance(goes_on, np.ndarray) else goes_on.to(delta.dtype)
    carry = (config.gamma * config.gae_lambda) * floats
    pulled, weighted = carry, delta
    if ratio is not None:
        weighted = ratio.clip(max=config.rho_bar) * delta
        pulled = carry * ratio.clip(max=config.c_bar)
    correction = xp.empty_like(delta)  # Δ
    following = xp.zeros_like(delta[0])  # Δ_{t+1}
    for t in range(len(delta) - 1, -1, -1):
        following = correction[t] = weighted[t] + pulled[t] * following
    advantage = xp.concatenate([delta[:-1] + carry[:-1] * correction[1:], delta[-1:]])
    return advantage, value + correction
