"""Mode ray keeps the contract of the local modes, with actors of a real cluster."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from freewheel.policies.spec import PolicySpec
from freewheel.rollout.factory import RunnerFactory
from freewheel.testing.conformance import check_collector
from freewheel_ray.mode import RayConfig
from tests.support.collectors import Spec, Weights, stop_and_continue, train_and_check

# The learner waits for every step, even on a slow machine.
USUAL = {"workers": 2, "envs_per_worker": 2, "num_envs": 4, "cpus_per_worker": 0.5, "patience": 1e6}


def fragments(**options: object) -> RayConfig:
    return RayConfig(**USUAL | {"unit": "fragments", "max_lag": 2} | options)  # type: ignore[arg-type]


def episodes(**options: object) -> RayConfig:
    return RayConfig(**USUAL | {"unit": "episodes"} | options)  # type: ignore[arg-type]


MODES = {
    "fragments": fragments(),
    "fragments, lag 0": fragments(max_lag=0),
    "fragments, odd": fragments(collection_batch_size=3),
    "episodes": episodes(),
    "episodes, in fragments": episodes(collection_batch_size=2),
    "episodes, lag 1": episodes(max_lag=1),
}


@pytest.mark.parametrize("mode", ["fragments", "episodes"])
def test_it_satisfies_the_contract_of_a_collector(
    factory: RunnerFactory, snapshot: Weights, spec: Spec, mode: str
) -> None:
    check_collector(lambda: MODES[mode].build(factory, spec(7, lanes=4)), snapshot, turns=30, every=1)


@pytest.mark.parametrize("mode", MODES)
def test_every_row_is_correct_and_every_update_has_its_rows(
    factory: RunnerFactory, policy: PolicySpec, spec: Spec, mode: str
) -> None:
    collector = train_and_check(MODES[mode], factory, policy, spec(7, lanes=4))
    assert collector.rows().dropped == {}
    assert collector.summary()["worker_restarts"] == collector.summary()["fragments_lost"] == 0


@pytest.mark.parametrize("mode", [fragments, episodes])
def test_a_collector_continues(
    mode: Callable[..., RayConfig], factory: RunnerFactory, snapshot: Weights, spec: Spec
) -> None:
    config = mode(envs_per_worker=1, num_envs=2)
    stop_and_continue(config, factory, spec(7, lanes=2), snapshot, own_episodes=mode is fragments)
