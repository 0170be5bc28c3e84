"""A collector continues where another one stopped: no episode twice, no row lost, the right version."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from freewheel.collect.batch import BatchConfig
from freewheel.collect.continuous import ContinuousConfig
from freewheel.collect.episodes import EpisodesConfig
from freewheel.collect.lockstep import LockstepConfig
from freewheel.collect.sequential import SequentialConfig
from freewheel.core import Collector, Episode, RowCounts, Snapshot
from freewheel.ledger import balance
from freewheel.rollout.factory import CollectSpec, RunnerFactory

Weights = Callable[[int], Snapshot]
LANES, STEPS, UPDATES = 2, 7, 4
MODES: dict[str, Callable[[RunnerFactory, CollectSpec], Collector]] = {
    "sequential": SequentialConfig(LANES).build,
    "lockstep": LockstepConfig(LANES, "inline").build,
    "batch": BatchConfig(workers=2, envs_per_worker=1, num_envs=LANES).build,
    "continuous": ContinuousConfig(workers=2, envs_per_worker=1, num_envs=LANES).build,
    "episodes": EpisodesConfig(workers=2, num_envs=LANES).build,
}


class Run:
    """A learner that only counts: an update takes S rows."""

    def __init__(self, version: int = 0, trained: int = 0) -> None:
        self.version, self.trained, self.held = version, trained, 0
        self.episodes: list[Episode] = []
        self.versions: list[int] = []

    def go(self, collector: Collector, snapshot: Weights, updates: int) -> None:
        collector.publish(snapshot(self.version), self.trained)
        target = self.version + updates
        while self.version < target:
            for chunk in collector.collect(wait=True):
                self.held += chunk.rows
                self.episodes += chunk.episodes
                self.versions.append(chunk.version)
            while self.held >= LANES * STEPS and self.version < target:
                self.held -= LANES * STEPS
                self.trained += LANES * STEPS
                self.version += 1
                collector.publish(snapshot(self.version), self.trained)
            balance(collector.rows(), RowCounts(trained=self.trained, queued=self.held))


@pytest.mark.parametrize("mode", MODES)
def test_a_collector_continues(
    mode: str, factory: RunnerFactory, snapshot: Weights, spec: Callable[..., CollectSpec]
) -> None:
    first = Run()
    with MODES[mode](factory, spec(STEPS, lanes=LANES)) as collector:
        first.go(collector, snapshot, UPDATES)
    state = collector.state_dict()
    later = Run(first.version, first.trained)
    again = MODES[mode](factory, spec(STEPS, lanes=LANES))
    again.load_state_dict(state)
    later.held = first.held  # rows that the learner had not used
    delivered = RowCounts(trained=first.trained, queued=first.held)
    assert balance(again.rows(), delivered).queued == first.held, "what was not delivered does not count"
    with again as collector:
        later.go(collector, snapshot, UPDATES)
    played = [(episode.lane, episode.number) for episode in (*first.episodes, *later.episodes)]
    assert len(set(played)) == len(played), "an episode was played twice"
    assert {episode.seed for episode in first.episodes}.isdisjoint(episode.seed for episode in later.episodes)
    if mode != "episodes":  # whose workers take what comes next
        for lane in range(LANES):
            numbers = [number for own, number in played if own == lane]
            assert numbers == list(range(len(numbers))), "what was under way went on"
    assert min(later.versions) >= first.version - 1
