"""Mode ray: the same promises as the local modes, over actors of a real cluster."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from freewheel.collect.ray_actors import RayConfig
from freewheel.core import BatchSpec, RowCounts, Snapshot
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.spec import LearnerSpec
from freewheel.ledger import balance
from freewheel.loop import loop
from freewheel.metrics.meter import Meter
from freewheel.policies.spec import PolicySpec
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.testing.conformance import check_collector
from tests.collect.test_resume import UPDATES, Run
from tests.collect.test_workers import check
from tests.support.places import LONG

Weights = Callable[[int], Snapshot]
S = 28
USUAL = {
    "workers": 2,
    "envs_per_worker": 2,
    "num_envs": 4,
    "cpus_per_worker": 0.5,
    "patience": 1e6,
}  # a busy machine is slow


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


@pytest.mark.parametrize("config", [*MODES.values()][:: 1 if LONG else 3], ids=[*MODES][:: 1 if LONG else 3])
def test_it_satisfies_the_contract_of_a_collector(
    factory: RunnerFactory, snapshot: Weights, spec: Callable[..., CollectSpec], config: RayConfig
) -> None:
    check_collector(lambda: config.build(factory, spec(7, lanes=4)), snapshot, turns=30, every=1)


@pytest.mark.parametrize("config", MODES.values(), ids=MODES.keys())
def test_every_row_is_correct_and_every_update_has_its_rows(
    factory: RunnerFactory, policy: PolicySpec, spec: Callable[..., CollectSpec], config: RayConfig
) -> None:
    """In Drifting the right action grows by one at every step, so mixed or repeated rows are detected."""
    task = LearnerSpec(policy=policy, batch=BatchSpec(7, 4, max_lag=config.max_lag), seed=0)
    learner, meter = PPOConfig(epochs=1).build(task), Meter(workers=2)
    seen: set[tuple[int, ...]] = set()
    with config.build(factory, spec(7, lanes=4)) as collector:
        for tick in loop(collector, learner, meter, max_lag=task.batch.max_lag):
            for chunk in tick.chunks:
                check(chunk)
                origin = (chunk.origin.worker, chunk.origin.incarnation, chunk.origin.sequence)
                assert origin not in seen, "a chunk was delivered twice"
                seen.add(origin)
            rows = balance(collector.rows(), learner.rows())
            assert rows.trained == S * learner.version
            if tick.metrics is not None and task.batch.max_lag is not None:
                assert tick.metrics["lag_max"] <= task.batch.max_lag
            if learner.version == 12:
                break
    rows = balance(collector.rows(), learner.rows())
    assert (rows.trained, dict(collector.rows().dropped)) == (12 * S, {})
    assert collector.summary()["worker_restarts"] == collector.summary()["fragments_lost"] == 0


@pytest.mark.parametrize("unit", ["fragments", "episodes"])
def test_a_collector_continues(
    unit: str, factory: RunnerFactory, snapshot: Weights, spec: Callable[..., CollectSpec]
) -> None:
    config = (fragments if unit == "fragments" else episodes)(envs_per_worker=1, num_envs=2)
    first = Run()
    with config.build(factory, spec(7, lanes=2)) as collector:
        first.go(collector, snapshot, UPDATES)
    state = collector.state_dict()
    later = Run(first.version, first.trained)
    again = config.build(factory, spec(7, lanes=2))
    again.load_state_dict(state)
    later.held = first.held  # rows that the learner had not used
    delivered = RowCounts(trained=first.trained, queued=first.held)
    assert balance(again.rows(), delivered).queued == first.held, "what was not delivered does not count"
    with again as collector:
        later.go(collector, snapshot, UPDATES)
    played = [(episode.lane, episode.number) for episode in (*first.episodes, *later.episodes)]
    assert len(set(played)) == len(played), "an episode was played twice"
    if unit == "fragments":
        for lane in range(2):
            numbers = [number for own, number in played if own == lane]
            assert numbers == list(range(len(numbers))), "what was under way went on"
    assert min(later.versions) >= first.version - 1
