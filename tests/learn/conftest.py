"""Rows to learn from, without a world: consistent episodes, and chunks of them by any author."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Protocol

import numpy as np
import pytest
import torch

from freewheel.core import WORKER_TIME, Chunk, NDArray, Origin, Snapshot, Transitions
from freewheel.learn.ppo.learner import PPO
from freewheel.learn.ppo.numpy_engine import NumpyEngine
from freewheel.learn.ppo.targets import KL, LOSSES, Coefficients, Minibatch
from freewheel.policies.numpy_actor import NumpyActor
from freewheel.policies.spec import PolicySpec


class Sign(Protocol):
    """Makes a chunk of these rows: those of steps `steps`, if given."""

    def __call__(
        self,
        data: Transitions,
        steps: slice = ...,
        *,
        version: int = ...,
        worker: int = ...,
        incarnation: int = ...,
        sequence: int = ...,
        lane0: int = ...,
    ) -> Chunk: ...


class Play(Protocol):
    """Rows [T, B] that the policy of this snapshot chose in a random world, with ends of both kinds and perhaps gaps."""

    def __call__(
        self, spec: PolicySpec, snapshot: Snapshot, shape: tuple[int, int], seed: int = ..., *, gaps: bool = ...
    ) -> Transitions: ...


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

    def gradient(self, batch: Minibatch, coefficients: Coefficients) -> tuple[float, ...]:
        self.batches.append(batch)
        self.coefficients.append(coefficients)
        self._grad.fill_(self.slope)
        losses = [0.0] * len(LOSSES)
        losses[KL] = self.kl.pop(0) if self.kl else 0.0
        return tuple(losses)


class ToTensors(Protocol):
    """The same chunk on tensors, as a batched simulator brings it."""

    def __call__(self, chunk: Chunk) -> Chunk[Any]: ...


@pytest.fixture(scope="session")
def to_tensors() -> ToTensors:
    def to_tensors(chunk: Chunk) -> Chunk[Any]:
        data = [torch.from_numpy(getattr(chunk.data, field.name).copy()) for field in fields(Transitions)]
        origin, state = chunk.origin, torch.from_numpy(chunk.state)
        return Chunk(Transitions(*data), chunk.version, origin, chunk.episodes, state, chunk.time, chunk.rows)

    return to_tensors


@pytest.fixture(scope="session")
def spy_on() -> type[Spy]:
    return Spy


@pytest.fixture(scope="session")
def sign() -> Sign:
    def sign(
        data: Transitions,
        steps: slice = slice(None),
        *,
        version: int = 0,
        worker: int = 0,
        incarnation: int = 0,
        sequence: int = 0,
        lane0: int = 0,
    ) -> Chunk:
        part = Transitions(*(getattr(data, field.name)[steps] for field in fields(Transitions)))
        origin, rows = Origin(worker, incarnation, sequence, lane0), int(part.valid.sum())
        return Chunk(
            part, version, origin, (), np.zeros((part.valid.shape[1], 0)), np.zeros(len(WORKER_TIME), int), rows
        )

    return sign


@pytest.fixture(scope="session")
def play() -> Play:
    def play(
        spec: PolicySpec, snapshot: Snapshot, shape: tuple[int, int], seed: int = 0, *, gaps: bool = False
    ) -> Transitions:
        rng, actor = np.random.default_rng(seed), NumpyActor(spec)
        actor.load(snapshot)
        terminated, truncated = rng.random((2, *shape)) < 0.1
        successor = _observations(spec, shape, rng)
        fresh = _observations(spec, shape, rng)
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

    return play


def _observations(spec: PolicySpec, shape: tuple[int, int], rng: np.random.Generator) -> NDArray:
    obs = rng.normal(size=(*shape, spec.obs_size))
    if spec.mask is not None:
        allowed = rng.random((*shape, spec.action_size)) < 0.7
        allowed[..., 0] |= ~allowed.any(axis=-1)
        obs[..., slice(*spec.mask)] = allowed
    return obs.astype(np.float32)
