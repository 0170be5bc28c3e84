"""Tests of the search: which settings are tried, which options stay fixed, and which setting comes first."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from freewheel.config.resolve import Config
from freewheel.rollout.probe import EnvCost, usable_cores
from freewheel.run.advice.policy_times import PolicyClock
from freewheel.run.advice.throughput import PolicyTimes, StepTimes, WireTimes
from freewheel.run.naming import RunName
from freewheel.run.plan import Plan
from freewheel_lab.tune.command import configure
from freewheel_lab.tune.probe import Probe
from freewheel_lab.tune.search import TuningCandidate, best_two, fixed_options, search
from tests.support.costs import cost

WAITING, BURNING, QUICK = (
    replace(cost(wall, cpu, memory=1 << 20), times=(wall,), lengths=(100, 100))
    for wall, cpu in ((0.01, 0.0001), (0.002, 0.002), (1e-5, 1e-5))
)


class Known(PolicyClock):
    """Stands in for a policy whose times are known."""

    def __init__(self, learn: float) -> None:
        super().__init__()
        self._learn = learn

    def __call__(self, planned: Plan) -> PolicyTimes:
        return PolicyTimes(act=1e-5, learn=self._learn)


def configured(words: str = "") -> Config:
    return configure(["Toy-v0", *words.split()])


def probed(cost: EnvCost, words: str = "", learn: float = 5e-5) -> Probe:
    name = RunName(Path("runs"), "toy")
    wire = WireTimes(fragment=2e-5, taken_fragment=2e-5)
    return Probe(configured(words), cost, name, "cpu", StepTimes.of(cost), wire=wire, clock=Known(learn))


@functools.cache
def searched(cost: EnvCost, words: str = "", learn: float = 5e-5) -> list[TuningCandidate]:
    return search(probed(cost, words, learn))[0]


def test_every_mode_is_searched_over_workers_envs_and_fragments() -> None:
    found = searched(WAITING)
    assert {one.mode for one in found} == {"sequential", "lockstep", "batch", "continuous", "episodes"}
    free = [one for one in found if one.mode == "continuous"]
    assert {one.plan.workers for one in free} >= {1, 2, 4, 8, 16, 32, 64}
    assert {one.plan.spec.lanes // one.plan.workers for one in free} >= {1, 2, 4, 8}
    assert len({one.fragment for one in free}) >= 3
    assert len({tuple(one.options.items()) for one in found}) > 100
    assert all(one.forecast.rate > 0 and one.memory > 0 for one in found)
    assert all(one.plan.batch.steps >= 16 for one in found), "an update follows each env for a while"


def test_an_env_that_waits_gets_many_workers_and_a_slow_learner_none() -> None:
    best = searched(WAITING)[0]
    assert best.plan.workers >= 64
    assert best.plan.spec.lanes == best.plan.workers, "envs of one worker would wait for each other"
    slow = searched(QUICK, learn=0.01)[0]
    assert slow.mode == "sequential", "no mode is faster than its learner: the one without lag and processes"
    assert slow.plan.spec.lanes == 8, "as usual, where it makes no difference"


def test_an_env_that_computes_never_gets_more_workers_than_cores() -> None:
    found = searched(BURNING)
    workers = [one for one in found if one.plan.worker_config is not None]
    assert max(one.plan.workers for one in workers) == usable_cores()
    apart = [one for one in found if one.options.get("placement") == "processes"]
    assert max((one.plan.spec.lanes for one in apart), default=0) <= usable_cores()


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("--workers 4", {"workers": 4}),
        ("--workers 3 --envs-per-worker 2", {"workers": 3, "envs_per_worker": 2}),
        ("--mode continuous --collection-batch-size 5", {"mode": "continuous", "collection_batch_size": 5}),
        ("--mode lockstep --placement inline", {"mode": "lockstep", "placement": "inline"}),
        ("--mode sequential --num-envs 3", {"mode": "sequential", "num_envs": 3}),
        ("--max-lag 1 --mode continuous", {"mode": "continuous", "max_lag": 1}),
    ],
)
def test_what_a_person_has_decided_stays(words: str, kept: dict[str, object]) -> None:
    found = searched(WAITING, words)
    assert found
    for one in found:
        has = {**vars(one.plan.config.collector), "mode": one.mode}
        assert {name: has[name] for name in kept} == kept
    assert kept.keys() <= fixed_options(configured(words))
    assert len(found) > 1 or kept["mode"] == "sequential", "the rest is searched"


def test_a_fixed_number_of_envs_is_divided_over_workers() -> None:
    found = searched(WAITING, "--num-envs 12 --mode continuous --collection-batch-size 8")
    assert {one.plan.workers for one in found} == {1, 2, 4}
    assert all(one.plan.spec.lanes == 12 for one in found)


def test_an_env_that_cannot_be_sent_has_no_workers() -> None:
    found, _ = search(probed(replace(WAITING, portable=False)))
    assert not [one for one in found if one.options.get("placement") == "processes"]
    assert searched(WAITING, "--mode continuous")


def test_of_settings_that_are_as_fast_the_one_with_the_least_lag_comes_first() -> None:
    order = searched(QUICK, learn=5e-5)
    best = max(one.forecast.rate for one in order)
    assert order[0].forecast.rate >= 0.97 * best
    good = [one for one in order if one.forecast.rate >= 0.97 * best]
    assert order[0].forecast.lag == min(one.forecast.lag for one in good)


def test_two_are_run_for_real_the_best_and_the_best_of_another_mode() -> None:
    first, second = best_two(searched(WAITING))
    assert first.mode != second.mode
    one, other = best_two(searched(WAITING, "--mode continuous"))
    assert (one.plan.workers, one.plan.spec.lanes) != (other.plan.workers, other.plan.spec.lanes)
    only = searched(WAITING, "--mode batch --workers 2 --envs-per-worker 1")
    assert best_two(only) == only
