"""What collectors of every mode are put through: rows that can be checked, and a stop after which another one continues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from freewheel.collect.mode import ModeConfig
from freewheel.core import BatchSpec, Chunk, Collector, Episode, RowCounts, Snapshot
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.spec import LearnerSpec
from freewheel.ledger import balance
from freewheel.loop import loop
from freewheel.metrics.meter import Meter
from freewheel.policies.spec import PolicySpec
from freewheel.rollout.factory import CollectSpec, RunnerFactory

Weights = Callable[[int], Snapshot]
Spec = Callable[..., CollectSpec]
UPDATES = 12


def check_row_by_row(chunk: Chunk[Any]) -> None:
    """In Drifting the right action grows by one at every step, so mixed or repeated rows are detected."""
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


def train_and_check(config: ModeConfig, factory: RunnerFactory, policy: PolicySpec, spec: CollectSpec) -> Collector:
    """Every row is correct and comes once, every update has its rows, and the lag is bounded; the collector, which has ended."""
    batch = spec.batch
    max_lag: int | None = getattr(config, "max_lag", None)
    task = LearnerSpec(policy=policy, batch=BatchSpec(batch.steps, batch.lanes, max_lag=max_lag), seed=0)
    learner, meter = PPOConfig(epochs=1).build(task), Meter(workers=4)
    seen: set[tuple[int, ...]] = set()
    with config.build(factory, spec) as collector:
        for tick in loop(collector, learner, meter, max_lag=max_lag):
            for chunk in tick.chunks:
                check_row_by_row(chunk)
                origin = (chunk.origin.worker, chunk.origin.incarnation, chunk.origin.sequence)
                assert origin not in seen, "a chunk was delivered twice"
                seen.add(origin)
            assert balance(collector.rows(), learner.rows()).trained == batch.rows * learner.version
            if tick.metrics is not None and max_lag is not None:
                assert tick.metrics["lag_max"] <= max_lag
            if learner.version == UPDATES:
                break
    assert balance(collector.rows(), learner.rows()).trained == UPDATES * batch.rows
    return collector


class CountingLearner:
    """It only counts: an update takes S rows."""

    def __init__(self, rows: int, version: int = 0, trained: int = 0, held: int = 0) -> None:
        self.batch_rows = rows
        self.version, self.trained, self.held = version, trained, held
        self.episodes: list[Episode] = []
        self.versions: list[int] = []

    def rows(self) -> RowCounts:
        return RowCounts(trained=self.trained, queued=self.held)

    def go(self, collector: Collector, snapshot: Weights, updates: int) -> None:
        collector.publish(snapshot(self.version), self.trained)
        target = self.version + updates
        while self.version < target:
            for chunk in collector.collect(wait=True):
                self.held += chunk.rows
                self.episodes += chunk.episodes
                self.versions.append(chunk.version)
            while self.held >= self.batch_rows and self.version < target:
                self.held -= self.batch_rows
                self.trained += self.batch_rows
                self.version += 1
                collector.publish(snapshot(self.version), self.trained)
            balance(collector.rows(), self.rows())


def stop_and_continue(
    config: ModeConfig, factory: RunnerFactory, spec: CollectSpec, snapshot: Weights, *, own_episodes: bool
) -> None:
    """Another collector goes on: no episode twice, no row lost, the right version; lanes go on where they have episodes of
    their own."""
    first = CountingLearner(spec.batch.rows)
    with config.build(factory, spec) as collector:
        first.go(collector, snapshot, updates=4)
    again = config.build(factory, spec)
    again.load_state_dict(collector.state_dict())
    later = CountingLearner(spec.batch.rows, first.version, first.trained, first.held)
    assert balance(again.rows(), later.rows()).queued == first.held, "what was not delivered does not count"
    with again as collector:
        later.go(collector, snapshot, updates=4)
    played = [(episode.lane, episode.number) for episode in (*first.episodes, *later.episodes)]
    assert len(set(played)) == len(played), "an episode was played twice"
    assert {episode.seed for episode in first.episodes}.isdisjoint(episode.seed for episode in later.episodes)
    for lane in range(spec.batch.lanes) if own_episodes else ():
        numbers = [number for own, number in played if own == lane]
        assert numbers == list(range(len(numbers))), "what was under way went on"
    assert min(later.versions) >= first.version - 1
