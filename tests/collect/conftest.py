"""An environment whose rows can be checked, and weights for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from freewheel.core import BatchSpec, Snapshot
from freewheel.envs.gym import GymConfig
from freewheel.policies.numpy_actor import make_actor
from freewheel.policies.spec import FlatParams, PolicyConfig, PolicySpec, actor_layout, full_layout, initialise
from freewheel.rollout.factory import CollectSpec, RunnerFactory, Timeouts, WorkerSpec
from freewheel.seeding import generator

WORLD = GymConfig(id="tests.support.worlds:Drifting", args={"n": 4, "length": 5})


@pytest.fixture(scope="session")
def policy() -> PolicySpec:
    env = WORLD.make(range(1))
    env.close()
    return PolicyConfig(hidden=(8,)).resolve(env.spec)


@pytest.fixture
def factory(policy: PolicySpec) -> RunnerFactory:
    return RunnerFactory(WORLD.make, make_actor(policy), seed=3)


@pytest.fixture
def spec(policy: PolicySpec) -> Callable[..., CollectSpec]:
    """The spec of an update of `steps` steps of `lanes` lanes."""

    def make(steps: int, lanes: int = 1, limits: Timeouts | None = None) -> CollectSpec:
        env = WORLD.make(range(1))
        env.close()
        return CollectSpec(
            env=replace(env.spec, lanes=lanes),
            batch=BatchSpec(steps, lanes),
            weights=actor_layout(policy),
            workers=WorkerSpec(timeouts=limits or Timeouts()),
        )

    return make


@pytest.fixture
def snapshot(policy: PolicySpec) -> Callable[[int], Snapshot]:
    """The weights of a version."""

    def weights(version: int) -> Snapshot:
        params = FlatParams(full_layout(policy))
        initialise(policy, params, generator(version))
        return Snapshot(version, params.views)

    return weights
