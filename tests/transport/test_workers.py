"""Staff: how many workers and envs, from what is given, what the cores can do and what a step costs."""

from __future__ import annotations

from typing import Any

import pytest

from freewheel.envs.gym import GymConfig
from freewheel.errors import EnvError, UsageError
from freewheel.rollout.factory import Timeouts
from freewheel.rollout.probe import StepCost
from freewheel.transport.workers import MOST_WORKERS, WorkersConfig, useful_workers

BURNING = StepCost(wall=1e-4, cpu=1e-4)
SLEEPING = StepCost(wall=1e-2, cpu=5e-4)  # a twentieth of it is work


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Any:
    def have(count: int) -> None:
        monkeypatch.setattr("freewheel.transport.workers.usable_cores", lambda: count)

    return have


@pytest.mark.parametrize(
    ("count", "cost", "workers"),
    [
        (1, BURNING, 1),
        (2, BURNING, 2),  # the learner shares the two
        (4, BURNING, 3),  # the learner has one
        (64, BURNING, 63),
        (4, StepCost(1e-2, 0.5e-2), 8),  # half asleep: twice as many as cores
        (2, SLEEPING, 40),
        (4, SLEEPING, 80),
        (64, SLEEPING, MOST_WORKERS),
        (2, StepCost(1.0, 0.0), MOST_WORKERS),  # nothing but sleep
        (4, StepCost(0.0, 0.0), 3),  # too fast for the clock
        (4, StepCost(1e-4, 3e-4), 3),  # threads of its own
    ],
)
def test_workers_that_keep_the_cores_busy(cores: Any, count: int, cost: StepCost, workers: int) -> None:
    cores(count)
    assert useful_workers(cost) == workers


@pytest.mark.parametrize(
    ("given", "cost", "plan"),
    [
        ({}, BURNING, (3, 3, 9)),  # at least eight envs, where nothing is said
        ({}, SLEEPING, (80, 1, 80)),
        ({"workers": 2}, BURNING, (2, 4, 8)),
        ({"workers": 12}, BURNING, (12, 1, 12)),
        ({"envs_per_worker": 5}, BURNING, (3, 5, 15)),
        ({"num_envs": 12}, BURNING, (3, 4, 12)),
        ({"num_envs": 10}, BURNING, (2, 5, 10)),
        ({"num_envs": 7}, BURNING, (1, 7, 7)),
        ({"num_envs": 10}, SLEEPING, (10, 1, 10)),
        ({"workers": 2, "num_envs": 6}, BURNING, (2, 3, 6)),
        ({"envs_per_worker": 2, "num_envs": 6}, BURNING, (3, 2, 6)),
        ({"workers": 2, "envs_per_worker": 3}, BURNING, (2, 3, 6)),
        ({"workers": 2, "envs_per_worker": 3, "num_envs": 6}, SLEEPING, (2, 3, 6)),
    ],
)
def test_a_plan_keeps_what_is_given_and_finds_the_rest(
    cores: Any, given: dict[str, int], cost: StepCost, plan: tuple[int, int, int]
) -> None:
    cores(4)
    config = WorkersConfig(**given)
    planned = config.planned(cost)
    assert (planned.workers, planned.envs_per_worker, planned.num_envs) == plan
    assert planned.worker_count == plan[0]
    assert planned.planned(SLEEPING) == planned, "a plan is a plan"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": 0}, "--workers must be positive, not 0"),
        ({"envs_per_worker": -1}, "--envs-per-worker must be positive, not -1"),
        ({"num_envs": 0}, "--num-envs must be positive, not 0"),
        (
            {"workers": 4, "num_envs": 10},
            "10 envs cannot be divided evenly over 4 workers; use --num-envs 8",
        ),
        (
            {"workers": 4, "num_envs": 3},
            "3 envs cannot be divided evenly over 4 workers; use --num-envs 4",
        ),
        ({"envs_per_worker": 4, "num_envs": 10}, "--num-envs 10 is not a multiple of --envs-per-worker 4"),
        (
            {"workers": 2, "envs_per_worker": 2, "num_envs": 8},
            "2 workers x 2 envs are not 8 envs; leave one of the three out",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(given: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        WorkersConfig(**given)
    assert str(refusal.value) == message


def test_the_plan_in_words(cores: Any) -> None:
    cores(4)
    config = WorkersConfig(3, 2, 6)
    assert config.plan_line() == "3 workers x 2 envs, a thread each, on 4 cores; the learner has a core"
    cores(3)
    assert config.plan_line().endswith("on 3 cores; the learner shares them")
    cores(2)
    assert config.plan_line().endswith("on 2 cores; the learner shares them at lower priority")


def test_a_world_is_tried_out_in_a_process_of_its_own() -> None:
    spec, cost = WorkersConfig().survey(GymConfig("freewheel.testing.worlds:Counter", {"length": 4}).make, Timeouts())
    assert (spec.name, spec.lanes, spec.obs_size) == ("freewheel.testing.worlds:Counter", 1, 2)
    assert 0 < cost.wall < 0.1


def test_a_world_that_dies_of_being_tried_out_is_told_in_one_line() -> None:
    with pytest.raises(EnvError) as caught:
        WorkersConfig().survey(GymConfig("freewheel.testing.worlds:Dies").make, Timeouts())
    assert str(caught.value) == "the environment ended its process (exit code -9)"
