"""The policy in workers: a few numpy matrix products without torch, and the choice of the actor that runs a policy."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.random import Generator

from freewheel.core import Decision, NDArray, Snapshot
from freewheel.policies.spec import (
    ACTIVATIONS,
    HEADS,
    FlatParams,
    OneLaneForm,
    PolicySpec,
    actor_layout,
    layers,
    network_inputs,
    select,
)
from freewheel.registry import own_object
from freewheel.rollout.factory import MakeActor
from freewheel.rollout.restoring import DrawsInBlocks
from freewheel.seeding import Position


def make_actor(policy: PolicySpec) -> MakeActor:
    """A picklable factory of actors: numpy for our own networks; a user's module brings torch into the worker."""
    if not policy.module:
        return functools.partial(NumpyActor, policy)
    from freewheel.policies.nets import TorchActor, carried_actor

    if policy.module.startswith("__main__:"):
        return functools.partial(carried_actor, own_object("policy.module", policy.module, "Factory"), policy)
    return functools.partial(TorchActor, policy)


def make_tensor_actor(policy: PolicySpec, device: str, seed: int) -> MakeActor:
    """The same for batched simulators, whose arrays are tensors."""
    from freewheel.policies.nets import TensorActor

    return functools.partial(TensorActor, policy, device, seed)


class NumpyActor:
    """Acts for B lanes at once, without a memory. Implements core.Actor."""

    state_size = 0

    def __init__(self, spec: PolicySpec) -> None:
        self.spec = spec
        self.params = FlatParams(actor_layout(spec))
        *self._hidden, self._last = layers(self.params.views, "actor")
        self._activation = ACTIVATIONS[spec.activation]
        self._head = HEADS[spec.head].actor(spec, self.params)
        self._in_blocks = self._head if isinstance(self._head, DrawsInBlocks) else None
        self._one_lane = self._head if isinstance(self._head, OneLaneForm) else None
        self._plain = not spec.rescales and spec.actor_columns == ((0, spec.obs_size),)

    def load(self, snapshot: Snapshot) -> None:
        self.params.load(snapshot.params)

    def act(self, obs: NDArray, rng: Generator, *, state: NDArray | None = None, greedy: bool = False) -> Decision:
        state = np.zeros((len(obs), 0), np.float32) if state is None else state
        if self._one_lane is not None and len(obs) == 1:
            chosen, chance = self._one_lane.choose_one(self._inputs(obs[0]), obs[0], None if greedy else rng)
            return Decision(np.array([chosen]), np.array([chance], np.float32), state)
        x = self._inputs(obs)
        for weight, bias in self._hidden:
            x = x @ weight
            x += bias
            self._activation(x, out=x)
        out = x @ self._last[0]
        out += self._last[1]
        action, log_prob = self._head.choose(out, obs, rng, greedy)
        return Decision(action, log_prob, state)

    def act_one(self, obs: NDArray, rng: Generator) -> tuple[Any, float]:
        """The same as `act` for one lane's observation [D], with less work: an int or [A], and the log-probability."""
        if self._one_lane is not None:
            return self._one_lane.choose_one(self._inputs(obs), obs, rng)
        decision = self.act(obs[None], rng)
        return decision.action[0], decision.log_prob.item()

    def position(self, rng: Generator) -> Position:
        """Return this actor's position in the numbers of this generator."""
        head = self._in_blocks
        return Position(rng.bit_generator.state) if head is None else head.position(rng)

    def _inputs(self, obs: NDArray) -> NDArray:
        if self._plain:
            return obs
        inputs: NDArray = select(self.spec.actor_columns, network_inputs(self.spec, self.params.views, obs))
        return inputs
