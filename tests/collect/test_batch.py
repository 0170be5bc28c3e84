"""Mode batch: whole batches in order, lag exactly one, repeatable bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from freewheel.collect.batch import BatchConfig
from freewheel.core import BatchSpec
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.spec import LearnerSpec
from freewheel.loop import loop
from freewheel.metrics.meter import Meter
from freewheel.policies.spec import PolicySpec
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from tests.support.collectors import Spec, Weights


@pytest.mark.parametrize(("workers", "fragment"), [(1, None), (2, None), (4, 3)])
def test_batches_come_whole_in_order_and_one_version_behind(
    factory: RunnerFactory, snapshot: Weights, spec: Spec, workers: int, fragment: int | None
) -> None:
    config = BatchConfig(workers=workers, envs_per_worker=4 // workers, num_envs=4, collection_batch_size=fragment)
    with config.build(factory, spec(7, lanes=4)) as collector:
        for update in range(5):
            collector.publish(snapshot(update), 0)
            chunks = collector.collect(wait=True)
            assert sum(chunk.rows for chunk in chunks) == 28
            assert {chunk.version for chunk in chunks} == {max(0, update - 1)}
            lanes = [chunk.origin.lane0 for chunk in chunks]
            assert lanes == sorted(lanes)


def test_workers_are_one_batch_ahead_and_no_more(factory: RunnerFactory, snapshot: Weights, spec: Spec) -> None:
    with BatchConfig(workers=2, envs_per_worker=2, num_envs=4).build(factory, spec(7, lanes=4)) as collector:
        collector.publish(snapshot(0), 0)
        first, second = collector.collect(wait=True), collector.collect(wait=True)
        assert {chunk.version for chunk in (*first, *second)} == {0}
        assert collector.collect(wait=False) == []
        rows = collector.rows()
        assert (rows.produced, rows.queued, rows.open) == (56, 0, 0)


def trained(factory: RunnerFactory, policy: PolicySpec, spec: CollectSpec, config: BatchConfig, updates: int) -> bytes:
    learner = PPOConfig(epochs=2, minibatch=14).build(LearnerSpec(policy=policy, batch=BatchSpec(7, 4), seed=0))
    lags = []
    with config.build(factory, spec) as collector:
        for tick in loop(collector, learner, Meter(workers=2)):
            if tick.metrics is not None:
                lags.append((tick.metrics["lag_mean"], tick.metrics["lag_max"]))
            if tick.version == updates:
                break
    assert lags == [(0, 0)] + [(1, 1)] * (updates - 1)
    return b"".join(np.asarray(value).tobytes() for value in learner.snapshot().params.values())


def test_it_repeats_bit_for_bit(factory: RunnerFactory, policy: PolicySpec, spec: Spec) -> None:
    """With any fragments: the speed of a worker must not matter."""
    whole = BatchConfig(workers=2, envs_per_worker=2, num_envs=4)
    parts = BatchConfig(workers=2, envs_per_worker=2, num_envs=4, collection_batch_size=2)
    assert len({trained(factory, policy, spec(7, lanes=4), config, 8) for config in (whole, whole, parts)}) == 1
