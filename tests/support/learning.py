"""Rows to learn from, without a world: consistent episodes, chunks of them by any author, and a spy on PPO's gradients."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from freewheel.core import WORKER_TIME, Chunk, NDArray, Origin, Snapshot, Transitions
from freewheel.learn.ppo.learner import PPO
from freewheel.learn.ppo.numpy_engine import NumpyEngine
from freewheel.learn.ppo.targets import KL, LOSSES, Coefficients, Minibatch
from freewheel.policies.numpy_actor import NumpyActor
from freewheel.policies.spec import PolicySpec


class Spy:
    """Replaces the gradient of a learner's numpy engine: records every minibatch, and returns what the test wants."""

    def __init__(self, learner: PPO) -> None:
        assert isinstance(learner.engine, NumpyEngine)
        self._grad = learner.engine.grad
        self.batches: list[Minibatch] = []
        self.coefficients: list[Coefficients] = []
        self.slope = 0.0  # every element of the gradient
        self.kl: list[float] = []  # of the next minibatches; then 0
        learner.engine.gradient = self.gradient  # type: ignore[method-assign]

    def gradient(self, batch: Minibatch, coefficients: Coefficients, total: int | None = None) -> tuple[float, ...]:
        assert total in (None, len(batch.action))
        self.batches.append(batch)
        self.coefficients.append(coefficients)
        self._grad.fill_(self.slope)
        losses = [0.0] * len(LOSSES)
        losses[KL] = self.kl.pop(0) if self.kl else 0.0
        return tuple(losses)


def to_tensors(chunk: Chunk) -> Chunk[Any]:
    """The same chunk on tensors, as a batched simulator brings it."""
    data = Transitions(*(torch.from_numpy(getattr(chunk.data, part.name).copy()) for part in fields(Transitions)))
    given: Any = chunk
    return replace(given, data=data, state=torch.from_numpy(chunk.state))


def sign(data: Transitions, steps: slice = slice(None), *, version: int = 0, lane0: int = 0, **origin: int) -> Chunk:
    """A chunk of these rows, or of those of these steps; origin: worker, incarnation and sequence, else 0."""
    part = Transitions(*(getattr(data, part.name)[steps] for part in fields(Transitions)))
    author = Origin(**{"worker": 0, "incarnation": 0, "sequence": 0} | origin, lane0=lane0)
    state, time = np.zeros((part.valid.shape[1], 0)), np.zeros(len(WORKER_TIME), int)
    return Chunk(part, version, author, (), state, time, int(part.valid.sum()))


def play(
    spec: PolicySpec, snapshot: Snapshot, shape: tuple[int, int], seed: int = 0, *, gaps: bool = False
) -> Transitions:
    """Rows [T, B] that the policy of this snapshot chose in a random world, with ends of both kinds and perhaps gaps."""
    rng, actor = np.random.default_rng(seed), NumpyActor(spec)
    actor.load(snapshot)
    terminated, truncated = rng.random((2, *shape)) < 0.1
    successor, fresh = observations(spec, shape, rng), observations(spec, shape, rng)
    obs = fresh.copy()
    obs[1:] = np.where((terminated | truncated)[:-1, :, None], fresh[1:], successor[:-1])
    decision = actor.act(obs.reshape(-1, spec.obs_size), rng)
    return Transitions(
        obs=obs,
        action=decision.action.reshape(*shape, *decision.action.shape[1:]),
        log_prob=decision.log_prob.reshape(shape),
        reward=rng.normal(size=shape).astype(np.float32),
        terminated=terminated,
        truncated=truncated & ~terminated,
        next_obs=successor,
        valid=rng.random(shape) < 0.85 if gaps else np.ones(shape, np.bool_),
    )


def observations(spec: PolicySpec, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray:
    """[..., D], with masks that allow at least one action."""
    if spec.obs_dtype == "uint8":
        obs: NDArray = rng.integers(0, 256, (*shape, spec.obs_size))
    else:
        obs = rng.normal(size=(*shape, spec.obs_size))
    if spec.mask is not None:
        allowed = rng.random((*shape, spec.action_size)) < 0.7
        allowed[..., 0] |= ~allowed.any(axis=-1)
        obs[..., slice(*spec.mask)] = allowed
    return obs.astype(spec.obs_dtype)
