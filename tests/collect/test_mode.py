"""How many workers and envs: from the options, the number of cores and the cost of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from freewheel.collect.batch import BatchConfig
from freewheel.collect.continuous import ContinuousConfig
from freewheel.collect.workers import require_room, useful_workers
from freewheel.errors import SetupError, UsageError
from freewheel.rollout.probe import EnvCost
from tests.support.costs import cost as cost_of

COMPUTING = cost_of(1e-4, 1e-4)
SLEEPING = cost_of(1e-2, 5e-4)  # a twentieth of it is computing


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Any:
    def have(count: int) -> None:
        for module in ("workers", "batch"):
            monkeypatch.setattr(f"freewheel.collect.{module}.usable_cores", lambda: count)

    return have


MS = 1e-3


@pytest.mark.parametrize(
    ("count", "cost", "workers"),
    [
        (1, COMPUTING, 1),
        (2, COMPUTING, 2),  # the learner shares the two
        (2, cost_of(10e-6, 10e-6), 1),  # so cheap that the learner is slower
        (4, COMPUTING, 3),  # the learner has one
        (64, COMPUTING, 63),
        (4, cost_of(10 * MS, 6 * MS), 3),  # it waits less than half of the time
        (4, cost_of(10 * MS, 4 * MS), 8),  # twice as many as cores
        (2, cost_of(10 * MS, 1 * MS), 16),  # each keeps 0.11 of a core busy: 8 times as many, not 9
        (2, cost_of(10 * MS, 0.52 * MS), 32),
        (2, cost_of(10 * MS, 0.40 * MS), 32),  # a little noise changes nothing
        (4, SLEEPING, 64),
        (64, SLEEPING, 64),
        (100, SLEEPING, 100),
        (2, cost_of(1.0, 0.0), 64),  # nothing but sleep
        (4, cost_of(0.0, 0.0), 3),  # too fast for the clock
        (4, cost_of(1e-4, 3e-4), 3),  # threads or processes of its own
    ],
)
def test_workers_that_keep_the_cores_busy(cores: Any, count: int, cost: EnvCost, workers: int) -> None:
    cores(count)
    assert useful_workers(cost) == workers


@pytest.mark.parametrize(
    ("count", "duties", "plan"),
    [
        (2, (0.3, 0.6, 1.0, 4.0), (2, 4, 8)), (4, (0.3, 1.0), (3, 3, 9)), (16, (0.3, 1.0), (15, 1, 15)),
        (2, (0.0, 0.01, 0.1, 0.2), (32, 1, 32)), (8, (0.0, 0.2), (64, 1, 64)),
    ],
)  # fmt: skip
def test_batch_weighs_two_numbers(cores: Any, count: int, duties: Sequence[float], plan: tuple[int, int, int]) -> None:
    cores(count)
    for duty in duties:
        for wall in (10e-6, 10 * MS):
            found = BatchConfig().planned(cost_of(wall, duty * wall))
            assert (found.workers, found.envs_per_worker, found.num_envs) == plan


@pytest.mark.parametrize(
    ("memory", "plan", "remarks"),
    [
        (1 << 20, (80, 1, 80), []),
        (300 << 20, (16, 1, 16), ["memory allows 16 envs: one holds about 300 MB"]),
        (999 << 20, (4, 1, 4), ["memory allows 4 envs: one holds about 1,000 MB"]),
        (99 << 30, (1, 1, 1), ["memory allows 1 env: one holds about 100,000 MB"]),
    ],
)
def test_a_plan_fits_into_memory(
    cores: Any, monkeypatch: pytest.MonkeyPatch, memory: int, plan: tuple[int, int, int], remarks: list[str]
) -> None:
    cores(80)
    monkeypatch.setattr("freewheel.collect.workers.free_memory", lambda: 8 << 30)
    cost = cost_of(1.0, 0.0, memory=memory)
    found = ContinuousConfig().planned(cost)
    assert (found.workers, found.envs_per_worker, found.num_envs) == plan
    assert ContinuousConfig().remarks(cost) == remarks
    if memory < 8 << 30:
        require_room(cost, found.lanes, found.worker_count)


def test_more_than_fits_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freewheel.collect.workers.free_memory", lambda: 8 << 30)
    with pytest.raises(SetupError) as refusal:
        require_room(cost_of(memory=300 << 20), 100, 100)
    assert str(refusal.value) == (
        "100 envs of 300 MB each, as measured, need 30.5 GB of memory, but 8.0 GB are free: use at most 26 envs"
    )


def test_more_workers_than_cores_are_told_where_they_bring_nothing(cores: Any) -> None:
    cores(2)
    assert BatchConfig(workers=2).remarks(COMPUTING) == BatchConfig(workers=20).remarks(SLEEPING) == []
    (remark,) = BatchConfig(workers=20).remarks(COMPUTING)
    assert (
        remark
        == "20 workers on 2 cores bring no more than 2: the env computes all the time; --workers 2 takes less memory"
    )


@pytest.mark.parametrize(
    ("given", "cost", "plan"),
    [
        ({}, COMPUTING, (3, 3, 9)),  # at least eight envs by default
        ({}, SLEEPING, (64, 1, 64)),
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
    cores: Any, given: dict[str, Any], cost: EnvCost, plan: tuple[int, int, int]
) -> None:
    cores(4)
    config = ContinuousConfig(**given)
    planned = config.planned(cost)
    assert (planned.workers, planned.envs_per_worker, planned.num_envs) == plan
    assert planned.worker_count == planned.env_processes == plan[0]
    assert planned.numbers == config.chosen(cost) == plan[:2]
    assert (planned.worker_count, planned.lanes) == (plan[0], plan[2])
    assert planned.planned(SLEEPING) == planned, "planning again changes nothing"


@pytest.mark.parametrize(
    ("given", "least"),
    [
        ({}, (1, 1, 1)),
        ({"workers": 3}, (3, 1, 3)),
        ({"envs_per_worker": 4}, (1, 4, 4)),
        ({"num_envs": 12}, (1, 12, 12)),
        ({"workers": 3, "num_envs": 12}, (3, 4, 12)),
        ({"envs_per_worker": 4, "num_envs": 12}, (1, 12, 12)),
        ({"workers": 2, "envs_per_worker": 3}, (2, 3, 6)),
    ],
)
def test_what_is_still_to_be_chosen_counts_as_one(given: dict[str, Any], least: tuple[int, int, int]) -> None:
    config = ContinuousConfig(**given)
    assert (*config.numbers, config.lanes) == least


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": 0}, "--workers must be positive, not 0"),
        ({"envs_per_worker": -1}, "--envs-per-worker must be positive, not -1"),
        ({"num_envs": 0}, "--num-envs must be positive, not 0"),
        ({"workers": 4, "num_envs": 10}, "10 envs cannot be divided evenly over 4 workers; use --num-envs 8"),
        ({"workers": 4, "num_envs": 3}, "3 envs cannot be divided evenly over 4 workers; use --num-envs 4"),
        ({"envs_per_worker": 4, "num_envs": 10}, "--num-envs 10 is not a multiple of --envs-per-worker 4"),
        ({"workers": 2, "envs_per_worker": 2, "num_envs": 8},
         "2 workers x 2 envs are not 8 envs; leave one of the three out"),
    ],
)  # fmt: skip
def test_impossible_numbers_are_refused_in_one_line(given: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        BatchConfig(**given)
    assert str(refusal.value) == message


def test_the_line_about_the_plan(cores: Any) -> None:
    cores(4)
    assert BatchConfig(3, 2, 6).plan_line() == "3 workers x 2 envs, a thread each, on 4 cores"
