"""How many workers and envs: from the options, the number of cores and the cost of a step."""

from __future__ import annotations

from typing import Any

import pytest

from freewheel.collect.batch import BatchConfig
from freewheel.collect.mode import MOST_WORKERS, useful_workers
from freewheel.errors import UsageError
from freewheel.rollout.probe import EnvCost
from tests.support.costs import cost as cost_of

COMPUTING = cost_of(1e-4, 1e-4)
SLEEPING = cost_of(1e-2, 5e-4)  # a twentieth of it is computing


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Any:
    def have(count: int) -> None:
        monkeypatch.setattr("freewheel.collect.mode.usable_cores", lambda: count)

    return have


@pytest.mark.parametrize(
    ("count", "cost", "workers"),
    [
        (1, COMPUTING, 1),
        (2, COMPUTING, 2),  # the learner shares the two
        (4, COMPUTING, 3),  # the learner has one
        (64, COMPUTING, 63),
        (4, cost_of(1e-2, 0.5e-2), 8),  # half asleep: twice as many as cores
        (2, SLEEPING, 40),
        (4, SLEEPING, 80),
        (64, SLEEPING, MOST_WORKERS),
        (2, cost_of(1.0, 0.0), MOST_WORKERS),  # nothing but sleep
        (4, cost_of(0.0, 0.0), 3),  # too fast for the clock
        (4, cost_of(1e-4, 3e-4), 3),  # threads of its own
    ],
)
def test_workers_that_keep_the_cores_busy(cores: Any, count: int, cost: EnvCost, workers: int) -> None:
    cores(count)
    assert useful_workers(cost) == workers


@pytest.mark.parametrize(
    ("given", "cost", "plan"),
    [
        ({}, COMPUTING, (3, 3, 9)),  # at least eight envs by default
        ({}, SLEEPING, (80, 1, 80)),
        ({"workers": 2}, COMPUTING, (2, 4, 8)),
        ({"workers": 12}, COMPUTING, (12, 1, 12)),
        ({"envs_per_worker": 5}, COMPUTING, (3, 5, 15)),
        ({"num_envs": 12}, COMPUTING, (3, 4, 12)),
        ({"num_envs": 10}, COMPUTING, (2, 5, 10)),
        ({"num_envs": 7}, COMPUTING, (1, 7, 7)),
        ({"num_envs": 10}, SLEEPING, (10, 1, 10)),
        ({"workers": 2, "num_envs": 6}, COMPUTING, (2, 3, 6)),
        ({"envs_per_worker": 2, "num_envs": 6}, COMPUTING, (3, 2, 6)),
        ({"workers": 2, "envs_per_worker": 3}, COMPUTING, (2, 3, 6)),
        ({"workers": 2, "envs_per_worker": 3, "num_envs": 6}, SLEEPING, (2, 3, 6)),
    ],
)
def test_a_plan_keeps_the_given_numbers_and_chooses_the_rest(
    cores: Any, given: dict[str, int], cost: EnvCost, plan: tuple[int, int, int]
) -> None:
    cores(4)
    config = BatchConfig(**given)
    planned = config.planned(cost)
    assert (planned.workers, planned.envs_per_worker, planned.num_envs) == plan
    assert planned.worker_count == plan[0]
    assert planned.planned(SLEEPING) == planned, "planning again changes nothing"


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
def test_impossible_numbers_are_refused_in_one_line(given: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        BatchConfig(**given)
    assert str(refusal.value) == message


def test_the_line_about_the_plan(cores: Any) -> None:
    cores(4)
    config = BatchConfig(3, 2, 6)
    assert config.plan_line() == "3 workers x 2 envs, a thread each, on 4 cores; the learner has a core"
    cores(3)
    assert config.plan_line().endswith("on 3 cores; the learner shares them")
    cores(2)
    assert config.plan_line().endswith("on 2 cores; the learner shares them at lower priority")
