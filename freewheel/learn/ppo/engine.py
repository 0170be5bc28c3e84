"""What both engines of PPO share: their Protocol, and the rows with their targets that they learn from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, Protocol

from freewheel.core import A, Array
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.ppo.rollout_buffer import RolloutBatch
from freewheel.learn.ppo.targets import Discount, continues, estimate, temporal_difference
from freewheel.policies.nets import PolicyNet
from freewheel.policies.spec import namespace

#: What a minibatch shows, in the order of every array of losses. The first three make the loss.
LOSSES = ("loss/policy", "loss/value", "policy/entropy", "policy/kl", "policy/clipped")
KL = LOSSES.index("policy/kl")


class Coefficients(NamedTuple):
    """Of this update, after schedules."""

    lr: float
    clip: float
    entropy: float
    reward_factor: Any = None  # a scalar of the rows' kind; None: rewards as they are


class Engine(Protocol):
    """Owns weights and optimiser, and computes all gradient steps of an update."""

    @property
    def net(self) -> PolicyNet: ...
    @property
    def fallback(self) -> str: ...  # why there is no CUDA graph where one was requested
    def improve(
        self, batch: RolloutBatch[Any], lagging: bool, coefficients: Coefficients
    ) -> dict[str, float] | None: ...  # metrics; None: a number was not finite, and weights and optimiser are as before
    def normalise(self, mean: Array, scale: Array) -> None: ...  # observation statistics of the next version
    def weights(self) -> dict[str, Array]: ...  # a copy
    def state_dict(self) -> dict[str, Array]: ...
    def load_state_dict(self, state: Mapping[str, Array]) -> None: ...


class Network(Protocol):
    """What `prepare` computes with, on numpy arrays or on tensors."""

    def inputs(self, obs: Any) -> Any: ...  # [N, D] as the network reads them
    def evaluate(self, inputs: Any, action: Any) -> tuple[Any, Any]: ...  # values [N], log-probabilities [N]
    def values(self, inputs: Any) -> Any: ...  # [N]
    def next_values(self, batch: RolloutBatch[Any], value: Any, goes_on: Any) -> Any: ...  # V(next_obs) [T, L]


class Minibatch(NamedTuple, Generic[A]):
    """Rows to learn from, [N, ...]."""

    inputs: A  # [N, D] observations as the network reads them
    action: A
    reference: A  # [N] log-probability that the ratio is taken against
    weight: A | None  # [N] ρ of rows that an older version chose; None: all 1
    advantage: A  # [N]
    value: A  # [N] value target

    def take(self, rows: Any) -> Minibatch[A]:
        weight = None if self.weight is None else self.weight[rows]
        return Minibatch(
            self.inputs[rows], self.action[rows], self.reference[rows], weight, self.advantage[rows], self.value[rows]
        )


class Prepared(NamedTuple, Generic[A]):
    """All rows of an update with their targets, and what they show; the two shares are scalars of the rows' kind."""

    rows: Minibatch[A]
    effective_samples: Any  # share of the rows that importance weights leave
    explained_variance: Any  # of the value targets, by the critic


def prepare(
    network: Network, batch: RolloutBatch[A], config: PPOConfig, *, recompute: bool, reward_factor: Any
) -> Prepared[A]:
    """recompute: the policy that chose the rows is not known to be the one about to be improved."""
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
        reward = reward * reward_factor
    goes_on = continues(data.terminated, data.truncated, data.valid)
    grid = batch.spread(value)
    delta = temporal_difference(reward, data.terminated, grid, network.next_values(batch, grid, goes_on), config.gamma)
    discount = Discount(config.gamma, config.gae_lambda, config.rho_bar, config.c_bar)
    corrected = None if ratio is None or config.targets == "plain" else batch.spread(ratio)
    targets = estimate(delta, grid, goes_on, corrected, discount)
    advantage, goal = flat(targets.advantage), flat(targets.value)
    explained = 1.0 - xp.var(goal - value, correction=0) / (xp.var(goal, correction=0) + 1e-8)
    return Prepared(Minibatch(inputs, action, reference, weight, advantage, goal), effective, explained)
