"""batch: whole batches in order, lag exactly one, the same bits every time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from freewheel.collect.batch import Batch, BatchConfig, Releases
from freewheel.core import BatchSpec, Snapshot
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.spec import LearnerSpec
from freewheel.loop import loop
from freewheel.meter import Meter
from freewheel.policies.spec import PolicySpec
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.transport.shm.channel import Tally

Weights = Callable[[int], Snapshot]


@pytest.mark.parametrize(("workers", "fragment"), [(1, None), (2, None), (4, 3)])
def test_batches_come_whole_in_order_and_one_version_behind(
    recipe: RunnerFactory, snapshot: Weights, job: Callable[..., CollectSpec], workers: int, fragment: int | None
) -> None:
    config = BatchConfig(workers=workers, envs_per_worker=4 // workers, num_envs=4, collection_batch_size=fragment)
    with config.build(recipe, job(7, lanes=4)) as collector:
        for update in range(5):
            collector.publish(snapshot(update), 0)
            chunks = collector.collect(wait=True)
            assert sum(chunk.rows for chunk in chunks) == 28
            assert {chunk.version for chunk in chunks} == {max(0, update - 1)}
            lanes = [chunk.origin.lane0 for chunk in chunks]
            assert lanes == sorted(lanes)


def test_workers_are_one_batch_ahead_and_no_more(
    recipe: RunnerFactory, snapshot: Weights, job: Callable[..., CollectSpec]
) -> None:
    with BatchConfig(workers=2, envs_per_worker=2, num_envs=4).build(recipe, job(7, lanes=4)) as collector:
        collector.publish(snapshot(0), 0)
        assert isinstance(collector, Batch)
        first, second = collector.collect(wait=True), collector.collect(wait=True)
        assert {chunk.version for chunk in (*first, *second)} == {0}
        assert collector.collect(wait=False) == []
        rows = collector.rows()
        assert (rows.produced, rows.queued, rows.open) == (56, 0, 0)


def weights_after(
    recipe: RunnerFactory, policy: PolicySpec, job: CollectSpec, config: BatchConfig, updates: int
) -> bytes:
    task = LearnerSpec(policy=policy, batch=BatchSpec(7, 4), seed=0)
    learner = PPOConfig(epochs=2, minibatch=14).build(task)
    lags = []
    with config.build(recipe, job) as collector:
        for tick in loop(collector, learner, Meter(workers=2)):
            if tick.metrics is not None:
                lags.append((tick.metrics["lag_mean"], tick.metrics["lag_max"]))
            if tick.version == updates:
                break
    assert lags == [(0, 0)] + [(1, 1)] * (updates - 1)
    return b"".join(np.asarray(value).tobytes() for value in learner.snapshot().params.values())


def test_it_is_repeatable_bit_for_bit(
    recipe: RunnerFactory, policy: PolicySpec, job: Callable[..., CollectSpec]
) -> None:
    """Also when it travels in other fragments: who is faster must not show."""
    whole = BatchConfig(workers=2, envs_per_worker=2, num_envs=4)
    parts = BatchConfig(workers=2, envs_per_worker=2, num_envs=4, collection_batch_size=2)
    runs = {weights_after(recipe, policy, job(7, lanes=4), config, 8) for config in (whole, whole, parts)}
    assert len(runs) == 1


def test_the_place_of_a_worker_that_is_gone_is_filled_by_the_others(job: Callable[..., CollectSpec]) -> None:
    """Three workers of two lanes, seven steps: 14 rows each a batch."""
    releases = Releases(3, 2, job(7, lanes=6), 7)
    try:
        releases.post(0)
        target = releases._memory["target"]
        assert target.tolist() == [28, 28, 28]
        releases.settle(1, Tally(produced=13, failed=1, ended=False), for_good=True)
        assert releases.broken
        assert target.tolist() == [36, 12, 36]
        releases.post(1)
        assert target.sum() == 3 * 42
        assert target[1] == 12
        grant = releases.take(0, Tally(produced=20, failed=0, ended=True))
        assert grant is not None
        assert (grant.version, grant.exact) == (1, False), "nobody waits for a certain version any more"
    finally:
        releases.close()


def test_rows_that_failures_took_are_made_up_for(job: Callable[..., CollectSpec]) -> None:
    releases = Releases(1, 2, job(7, lanes=2), 7)
    try:
        releases.post(0)
        grant = releases.take(0, Tally(produced=14, failed=3, ended=True))
        assert grant is not None
        assert (grant.steps, grant.version, grant.exact) == (2, 0, True), (
            "three rows short of batch 0: two steps of two lanes"
        )
        assert releases.take(0, Tally(produced=31, failed=3, ended=True)) is None
    finally:
        releases.close()
