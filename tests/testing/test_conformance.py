"""check_runner and check_learner accept our numpy Runner and PPO, and see what breaks their contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from freewheel.core import Array, BatchSpec, Chunk, Snapshot
from freewheel.envs.gym import GymConfig
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.ppo.learner import PPO
from freewheel.learn.spec import LearnerSpec
from freewheel.policies.numpy_actor import make_actor
from freewheel.policies.spec import PolicyConfig, PolicySpec
from freewheel.rollout.factory import RunnerFactory
from freewheel.rollout.runner import Runner
from freewheel.testing.conformance import check_learner, check_runner

LANES = range(3)
WORLDS = ("Drifting", "Identity", "IdentityBox", "MutatesBuffer")


def recipe(world: str, *, normalize: bool = False) -> tuple[RunnerFactory, PolicySpec]:
    config = GymConfig(id=f"freewheel.testing.worlds:{world}")
    env = config.make(LANES)
    env.close()
    policy = PolicyConfig(hidden=(8,), normalize_obs=normalize).resolve(env.spec)
    return RunnerFactory(config.make, make_actor(policy), seed=5), policy


def learner(policy: PolicySpec, **options: object) -> PPO:
    config = replace(PPOConfig(epochs=2, minibatch=16), **options)  # type: ignore[arg-type]
    return PPO(config, LearnerSpec(policy=policy, batch=BatchSpec(42 // len(LANES), len(LANES)), seed=1))


def weights(policy: PolicySpec) -> Snapshot:
    return replace(learner(policy).snapshot(), version=4)


@pytest.mark.parametrize("world", WORLDS)
def test_the_numpy_runner_conforms(world: str) -> None:
    made, policy = recipe(world)
    check_runner(lambda: Runner(made, LANES), weights(policy))


class Forgetful(Runner):
    """Signs with the previous version."""

    def unroll(self, steps: int) -> Chunk:
        chunk = super().unroll(steps)
        return replace(chunk, version=chunk.version - 1)


class Leaping(Runner):
    """Loses a row between two chunks."""

    def unroll(self, steps: int) -> Chunk:
        chunk = super().unroll(steps + 1)
        fields = {name: getattr(chunk.data, name)[:-1] for name in chunk.data.__slots__}
        self.produced -= len(LANES)
        return replace(chunk, data=replace(chunk.data, **fields), rows=chunk.rows - len(LANES))


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [(Forgetful, "not signed with the version"), (Leaping, "does not follow from the row before")],
)
def test_a_runner_that_does_not_conform_is_caught(kind: type[Runner], complaint: str) -> None:
    made, policy = recipe("Drifting")
    with pytest.raises(AssertionError, match=complaint):
        check_runner(lambda: kind(made, LANES), weights(policy))


def acting(made: RunnerFactory) -> Callable[[Snapshot], Chunk]:
    """Collects chunks of 21 rows, two of which fill a batch, with the weights it is given."""
    runner = Runner(made, LANES)

    def collect(snapshot: Snapshot) -> Chunk:
        runner.load(snapshot)
        return runner.unroll(7)

    return collect


@pytest.mark.parametrize("gradient", ["analytic", "autograd"])
@pytest.mark.parametrize("world", ["Drifting", "IdentityBox"])
@pytest.mark.parametrize("scaled", [False, True])
def test_ppo_conforms(world: str, gradient: Literal["analytic", "autograd"], scaled: bool) -> None:
    made, policy = recipe(world, normalize=scaled)
    scale = "returns" if scaled else "none"
    check_learner(lambda: learner(policy, gradient=gradient, reward_scale=scale), acting(made))


class Amnesiac(PPO):
    """Restores everything but its optimiser."""

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        super().load_state_dict({**state, "adam.square": np.ones_like(np.asarray(state["adam.square"]))})


class Doubling(PPO):
    """Observes everything twice."""

    def observe(self, chunk: Chunk) -> None:
        super().observe(chunk)
        super().observe(chunk)


@pytest.mark.parametrize(("kind", "complaint"), [(Amnesiac, "behaves differently"), (Doubling, "does not account for")])
def test_a_learner_that_does_not_conform_is_caught(kind: type[PPO], complaint: str) -> None:
    made, policy = recipe("Drifting")
    task = LearnerSpec(policy=policy, batch=BatchSpec(42 // len(LANES), len(LANES)), seed=1)
    with pytest.raises(AssertionError, match=complaint):
        check_learner(lambda: kind(PPOConfig(epochs=2), task), acting(made))
