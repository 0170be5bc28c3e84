"""Mode sequential: all lanes in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from freewheel.collect.sequential import SequentialConfig
from freewheel.core import Env, Snapshot
from freewheel.envs.gym import GymLoop
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.testing.conformance import check_collector


@pytest.mark.parametrize("num_envs", [1, 3])
def test_it_satisfies_the_contract_of_a_collector(
    factory: RunnerFactory, snapshot: Callable[[int], Snapshot], spec: Callable[[int], CollectSpec], num_envs: int
) -> None:
    check_collector(lambda: SequentialConfig(num_envs).build(factory, spec(7)), snapshot)


def test_a_chunk_holds_these_steps_of_all_lanes(
    factory: RunnerFactory, snapshot: Callable[[int], Snapshot], spec: Callable[[int], CollectSpec]
) -> None:
    with SequentialConfig(3).build(factory, spec(7)) as collector:
        collector.publish(snapshot(0), 0)
        (chunk,) = collector.collect(wait=True)
    assert chunk.data.obs.shape == (7, 3, 5)
    assert (chunk.rows, chunk.origin.lane0) == (21, 0)
    assert [(episode.lane, episode.length) for episode in chunk.episodes] == [(0, 5), (1, 5), (2, 5)]


def test_lanes_stay_in_this_process(factory: RunnerFactory, spec: Callable[[int], CollectSpec]) -> None:
    asked: list[tuple[range, bool]] = []

    def make(lanes: range, *, processes: bool = False, fault_tolerant: bool = False) -> Env:
        asked.append((lanes, processes))
        return factory.make(lanes)

    with SequentialConfig(num_envs=3).build(replace(factory, make=make), spec(1)):
        pass
    assert SequentialConfig().num_envs == 1
    assert isinstance(SequentialConfig().place(make, range(2)), GymLoop)
    assert asked == [(range(3), False), (range(2), False)]
