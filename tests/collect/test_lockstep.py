"""Mode lockstep: a barrier at every step, in this process for cheap envs and in processes for expensive ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, Literal

import gymnasium
import numpy as np
import pytest

from freewheel.collect.lockstep import BARRIER, LockstepConfig, processes_pay
from freewheel.collect.sequential import SequentialConfig
from freewheel.core import Chunk, Env, Snapshot
from freewheel.envs.gym import GymConfig, GymLoop
from freewheel.errors import EnvError
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.rollout.probe import StepCost
from freewheel.testing.conformance import check_collector
from tests.support.worlds import Counter, Crawls, Raises


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


class RecordingMaker:
    """Makes envs and records the calls and how many envs are open."""

    def __init__(self, world: Callable[..., gymnasium.Env[Any, Any]], **args: Any) -> None:
        self.config = GymConfig(id=world.__name__, args=args, factory=world)
        self.calls: list[tuple[int, bool]] = []
        self.open = 0

    def __call__(self, lanes: range, *, processes: bool = False, fault_tolerant: bool = False) -> Env:
        self.calls.append((len(lanes), processes))
        env = self.config.make(lanes)  # never in processes: only the arguments matter here
        assert isinstance(env, GymLoop)
        closed, self.open = env.close, self.open + 1

        def close() -> None:
            self.open -= 1
            closed()

        env.close = close  # type: ignore[method-assign]
        return env


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
    ("world", "args", "processes"),
    [(Counter, {}, False), (Crawls, {"seconds": 4 * BARRIER, "at": 0}, True), (Hiccups, {}, False)],
)
def test_auto_measures_one_lane_and_places_all_by_its_cost(
    world: Callable[..., gymnasium.Env[Any, Any]], args: dict[str, Any], processes: bool
) -> None:
    make = RecordingMaker(world, **args)
    with closing(LockstepConfig(4).place(make, range(4))):
        assert make.open == 1
    assert make.calls == [(1, False), (4, processes)]
    assert make.open == 0


@pytest.mark.parametrize(("placement", "processes"), [("inline", False), ("processes", True)])
def test_a_given_placement_is_used_without_a_measurement(
    placement: Literal["inline", "processes"], processes: bool
) -> None:
    make = RecordingMaker(Counter)
    LockstepConfig(4, placement).place(make, range(4)).close()
    assert make.calls == [(4, processes)]


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
    assert processes_pay(StepCost(wall, cpu), lanes=8) is pays


def test_one_lane_needs_no_process() -> None:
    make = RecordingMaker(Crawls, seconds=4 * BARRIER, at=0)
    LockstepConfig(1).place(make, range(1)).close()
    assert make.calls == [(1, False)]


def test_a_measurement_that_fails_leaves_nothing_open() -> None:
    make = RecordingMaker(Raises, at=2)
    with pytest.raises(EnvError, match="lane 0 of Raises raised ValueError: boom"):
        LockstepConfig(4).place(make, range(4))
    assert make.open == 0
