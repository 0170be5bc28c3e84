"""Mode lockstep: a barrier at every step, in this process for cheap envs and in processes for expensive ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import gymnasium
import numpy as np
import pytest

from freewheel.collect.lockstep import BARRIER, LockstepConfig, processes_pay
from freewheel.collect.sequential import SequentialConfig
from freewheel.core import Chunk, Env, Snapshot
from freewheel.envs.gym import GymConfig
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.rollout.probe import measured
from freewheel.testing.conformance import check_collector
from tests.support.costs import cost
from tests.support.worlds import Counter, Crawls


@pytest.mark.parametrize("placement", ["inline", "processes"])
def test_it_satisfies_the_contract_of_a_collector(
    factory: RunnerFactory,
    snapshot: Callable[[int], Snapshot],
    spec: Callable[[int], CollectSpec],
    placement: Literal["inline", "processes"],
) -> None:
    check_collector(lambda: LockstepConfig(3, placement).build(factory, spec(7)), snapshot)


def test_it_collects_what_sequential_collects(
    factory: RunnerFactory, snapshot: Callable[[int], Snapshot], spec: Callable[[int], CollectSpec]
) -> None:
    def collected(config: SequentialConfig | LockstepConfig) -> list[Chunk[Any]]:
        with config.build(factory, spec(6)) as collector:
            chunks: list[Chunk[Any]] = []
            for version in range(3):
                collector.publish(snapshot(version), 0)
                chunks += collector.collect(wait=True)
            return chunks

    reference = collected(SequentialConfig(3))
    for config in (LockstepConfig(3, "inline"), LockstepConfig(3, "processes")):
        for ours, theirs in zip(reference, collected(config), strict=True):
            assert (ours.version, ours.origin, ours.rows) == (theirs.version, theirs.origin, theirs.rows)
            for name in ours.data.__slots__:
                np.testing.assert_array_equal(getattr(ours.data, name), getattr(theirs.data, name), err_msg=name)
            assert [(one.seed, one.ret) for one in ours.episodes] == [(one.seed, one.ret) for one in theirs.episodes]


class Hiccups(Counter):
    """Cheap, except for one slow step."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0

    def judge(self, action: Any) -> float:
        self.taken += 1
        if self.taken == 10:
            time.sleep(200 * BARRIER)
        return super().judge(action)


@pytest.mark.parametrize(
    ("world", "args", "placement"),
    [(Counter, {}, "inline"), (Crawls, {"seconds": 4 * BARRIER, "at": 0}, "processes"), (Hiccups, {}, "inline")],
)
def test_auto_goes_by_cost(world: Callable[..., gymnasium.Env[Any, Any]], args: dict[str, Any], placement: str) -> None:
    with measured(GymConfig(id="a world", args=args, factory=world).make, 0) as found:
        planned = LockstepConfig(4).planned(found)
        assert planned.placement == placement
        assert planned.planned(cost()) == planned, "planning again changes nothing"
        assert LockstepConfig(4).planned(replace(found, portable=False)).placement == "inline"
        assert LockstepConfig(1).planned(found).placement == "inline", "one lane needs no process"


@pytest.mark.parametrize(("placement", "processes"), [("inline", False), ("processes", True)])
def test_a_placement_that_is_given_is_not_measured(placement: Literal["inline", "processes"], processes: bool) -> None:
    calls: list[tuple[int, bool]] = []

    def make(lanes: range, *, processes: bool = False, fault_tolerant: bool = False) -> Env:
        calls.append((len(lanes), processes))
        return GymConfig(id="Counter", factory=Counter).make(lanes)  # only the arguments matter here

    LockstepConfig(4, placement).planned(cost(1.0)).place(make, range(4)).close()
    assert calls == [(4, processes)]


def test_it_says_how_many_processes_step_environments() -> None:
    assert LockstepConfig(4, "processes").env_processes == 4
    assert LockstepConfig(4, "inline").env_processes == SequentialConfig(4).env_processes == 0
    assert LockstepConfig(4, "processes").plan_line() == "4 envs, a process each"
    assert LockstepConfig(4, "inline").plan_line() == "4 envs in this process"


@pytest.mark.parametrize(
    ("wall", "cpu", "cores", "pays"),
    [
        (0.1e-3, 0.1e-3, 64, False),  # cheaper than the barrier itself
        (0.8e-3, 0.8e-3, 2, False),  # computing, and two cores only halve it
        (0.8e-3, 0.8e-3, 8, True),
        (1.6e-3, 1.6e-3, 2, True),
        (0.8e-3, 0.0, 1, True),  # sleeping: all lanes at once
        (9.0, 9.0, 1, False),  # computing on one core: nothing overlaps
    ],
)
def test_processes_pay_if_the_overlap_is_worth_the_barrier(
    monkeypatch: pytest.MonkeyPatch, wall: float, cpu: float, cores: int, pays: bool
) -> None:
    monkeypatch.setattr("freewheel.collect.lockstep.usable_cores", lambda: cores)
    assert processes_pay(cost(wall, cpu), lanes=8) is pays
