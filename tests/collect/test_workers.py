"""What continuous, batch and episodes share: the contract of a collector, over real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from freewheel.collect.batch import BatchConfig
from freewheel.collect.continuous import ContinuousConfig
from freewheel.collect.episodes import EpisodesConfig
from freewheel.collect.mode import WorkersConfig
from freewheel.collect.serial import SerialConfig
from freewheel.core import BatchSpec, Chunk, Collector, Snapshot
from freewheel.errors import SetupError, UsageError
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.spec import LearnerSpec
from freewheel.ledger import balance
from freewheel.loop import loop
from freewheel.metrics.meter import Meter
from freewheel.policies.spec import PolicySpec
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.testing.conformance import check_collector

Weights = Callable[[int], Snapshot]
MODES: dict[str, ContinuousConfig | BatchConfig | EpisodesConfig] = {
    "continuous": ContinuousConfig(workers=2, envs_per_worker=2, num_envs=4),
    "continuous, lag 0": ContinuousConfig(workers=2, envs_per_worker=2, num_envs=4, max_lag=0),
    "continuous, odd fragments": ContinuousConfig(workers=2, envs_per_worker=2, num_envs=4, collection_batch_size=3),
    "continuous, dropping": ContinuousConfig(workers=2, envs_per_worker=2, num_envs=4, overflow="drop-oldest"),
    "batch": BatchConfig(workers=2, envs_per_worker=2, num_envs=4),
    "batch, in fragments": BatchConfig(workers=2, envs_per_worker=2, num_envs=4, collection_batch_size=3),
    "episodes": EpisodesConfig(workers=4, num_envs=4),
    "episodes, in fragments": EpisodesConfig(workers=4, num_envs=4, collection_batch_size=2),
    "episodes, in waves": EpisodesConfig(workers=4, num_envs=4, wave=True),
}


@pytest.mark.parametrize("config", MODES.values(), ids=MODES.keys())
def test_it_satisfies_the_contract_of_a_collector(
    factory: RunnerFactory,
    snapshot: Weights,
    spec: Callable[..., CollectSpec],
    config: ContinuousConfig | BatchConfig | EpisodesConfig,
) -> None:
    check_collector(lambda: config.build(factory, spec(7, lanes=4)), snapshot, turns=30, every=1)


@pytest.mark.parametrize("config", MODES.values(), ids=MODES.keys())
def test_every_row_is_correct_and_every_update_has_its_rows(
    factory: RunnerFactory,
    policy: PolicySpec,
    spec: Callable[..., CollectSpec],
    config: ContinuousConfig | BatchConfig | EpisodesConfig,
) -> None:
    """In Drifting the right action grows by one at every step, so mixed or repeated rows are detected."""
    task = LearnerSpec(policy=policy, batch=BatchSpec(7, 4, max_lag=getattr(config, "max_lag", None)), seed=0)
    learner, meter = PPOConfig(epochs=1).build(task), Meter(workers=4)
    seen: set[tuple[int, ...]] = set()
    with config.build(factory, spec(7, lanes=4)) as collector:
        for tick in loop(collector, learner, meter, max_lag=task.batch.max_lag):
            for chunk in tick.chunks:
                check(chunk)
                origin = (chunk.origin.worker, chunk.origin.incarnation, chunk.origin.sequence)
                assert origin not in seen, "a chunk was delivered twice"
                seen.add(origin)
            rows = balance(collector.rows(), learner.rows())
            assert rows.trained == 28 * learner.version
            if tick.metrics is not None and task.batch.max_lag is not None:
                assert tick.metrics["lag_max"] <= task.batch.max_lag
            if learner.version == 12:
                break
    rows = balance(collector.rows(), learner.rows())
    assert rows.trained == 12 * 28
    assert set(rows.dropped) <= {"overflow"}


def check(chunk: Chunk[Any]) -> None:
    data, n = chunk.data, 4
    assert data.valid.all()
    shown, after = data.obs[..., :n].argmax(-1), data.next_obs[..., :n].argmax(-1)
    np.testing.assert_array_equal(data.reward, data.action == shown)
    np.testing.assert_array_equal(after, (shown + 1) % n)
    steps = np.rint(data.obs[..., n] * 5).astype(int)
    np.testing.assert_array_equal(np.rint(data.next_obs[..., n] * 5).astype(int), steps + 1)
    over = data.terminated | data.truncated
    np.testing.assert_array_equal(over, steps == 4)
    np.testing.assert_array_equal(steps[1:], np.where(over[:-1], 0, steps[:-1] + 1))


def test_a_queue_that_is_too_large_is_refused_before_anything_starts(
    factory: RunnerFactory, spec: Callable[..., CollectSpec]
) -> None:
    config = ContinuousConfig(
        workers=2, envs_per_worker=2, num_envs=4, max_queue_size=10**5, collection_batch_size=10**4
    )
    with pytest.raises(SetupError, match=r"a queue of 2 x 50000 fragments needs .* GB of memory"):
        config.build(factory, spec(10**4, lanes=4))


def test_a_factory_that_cannot_be_pickled_is_refused(factory: RunnerFactory, spec: Callable[..., CollectSpec]) -> None:
    class NotPicklable:
        def __reduce__(self) -> Any:
            raise TypeError("cannot pickle this")

        def __call__(self, lanes: range, *, processes: bool = False, fault_tolerant: bool = False) -> Any: ...

    with pytest.raises(SetupError, match="cannot be pickled for another process"):
        MODES["batch"].build(RunnerFactory(NotPicklable(), factory.actor, 0), spec(7, lanes=4))


@pytest.mark.parametrize("mode", [ContinuousConfig, BatchConfig, EpisodesConfig])
def test_sizes_must_be_positive(mode: type[Any]) -> None:
    with pytest.raises(UsageError, match="--collection-batch-size must be positive"):
        mode(collection_batch_size=0)


def test_every_mode_is_serial_or_has_workers() -> None:
    from freewheel.collect.mode import MODES as ALL

    for mode in ALL.values():
        assert issubclass(mode.config, WorkersConfig) != issubclass(mode.config, SerialConfig)


def test_leaving_before_the_first_publication(factory: RunnerFactory, spec: Callable[..., CollectSpec]) -> None:
    """Nothing is produced before the first publication, and the counts are available after the end."""
    collector: Collector = MODES["continuous"].build(factory, spec(7, lanes=4))
    with collector:
        assert collector.collect(wait=False) == []
    assert collector.rows().produced == 0
    assert collector.summary()["worker_restarts"] == 0
