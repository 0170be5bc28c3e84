"""The model of throughput: limits that it must meet, and a real policy measured."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from freewheel.config.resolve import from_argv
from freewheel.run.advice import throughput
from freewheel.run.advice.throughput import PolicyTimes, StepTimes, Way, forecast, measure_policy
from freewheel.run.plan import plan
from tests.support.runs import IDENTITY

FREE = PolicyTimes(act=0.0, learn=0.0)
EVEN = StepTimes(times=(0.005,))


def way(kind: throughput.Kind, workers: int = 1, lanes: int = 8) -> Way:
    return Way(kind=kind, workers=workers, lanes=lanes, steps=64)


def test_the_slowest_of_several_steps_is_what_drawing_them_shows() -> None:
    rng = np.random.default_rng(0)
    times = np.exp(0.7 * rng.standard_normal(5000))
    drawn = rng.choice(times, (20_000, 8)).max(axis=1).mean()
    assert StepTimes(times=tuple(times)).slowest_of(8) == pytest.approx(drawn, rel=0.02)
    assert EVEN.slowest_of(100) == pytest.approx(0.005)


def test_lanes_in_turn_take_the_sum() -> None:
    policy = PolicyTimes(act=0.001, learn=0.002)
    found = forecast(way("serial"), StepTimes(times=(0.004, 0.006), reset=0.001), policy, cores=2)
    assert found.rate == pytest.approx(1 / 0.009)
    assert found.limit == "envs"
    assert forecast(way("serial"), EVEN, PolicyTimes(act=0.0, learn=0.1), cores=2).limit == "learner"


def test_a_barrier_waits_for_the_slowest_and_workers_do_not() -> None:
    uneven = StepTimes(times=(0.001,) * 9 + (0.041,))  # mean 5 ms, as EVEN
    barrier, free = (forecast(way(kind, workers=8), uneven, FREE, cores=2).rate for kind in ("barrier", "free"))
    assert barrier < 8 / uneven.slowest_of(8)
    assert free == pytest.approx(8 / 0.005, rel=0.02)
    even = forecast(way("barrier"), EVEN, FREE, cores=2)
    assert even.rate > 2 * barrier
    assert even.limit == "barrier"


def test_episodes_that_end_together_reset_together() -> None:
    apart = StepTimes(times=(0.005,), reset=0.002)
    together = StepTimes(times=(0.005,), reset=0.002, ends_together=True)
    slow, fast = (forecast(way("barrier"), env, FREE, cores=2).rate for env in (apart, together))
    assert fast > 2 * slow


def test_envs_that_compute_are_limited_by_the_cores_in_every_way() -> None:
    burning = StepTimes(times=(0.002,), cpu=0.002)
    for one in (way("barrier"), way("free", workers=2), way("batch", workers=2), way("free", workers=64, lanes=64)):
        found = forecast(one, burning, FREE, cores=2)
        assert 700 < found.rate < 1000  # 2 cores / 2 ms
    assert forecast(way("free", workers=64, lanes=64), burning, FREE, cores=2).limit == "cores"


def test_no_way_is_faster_than_its_learner() -> None:
    slow = PolicyTimes(act=0.0, learn=0.01)
    for kind in ("serial", "barrier", "batch", "free"):
        found = forecast(way(kind, workers=64, lanes=64), StepTimes(times=(1e-5,)), slow, cores=64)
        assert found.rate <= 100
        assert found.limit == "learner"


def test_a_batch_is_a_little_slower_than_free_workers_where_steps_are_uneven() -> None:
    uneven = StepTimes(times=(0.001,) * 9 + (0.041,))
    batch, free = (forecast(way(kind, workers=8), uneven, FREE, cores=2).rate for kind in ("batch", "free"))
    assert 0.7 * free < batch < 0.99 * free


@pytest.mark.parametrize("options", [["--mode", "continuous"], ["--algo", "sac", "--env", "Pendulum-v1"]])
def test_the_policy_and_its_learner_are_measured(tmp_path: Path, options: list[str]) -> None:
    env = [] if "--env" in options else [IDENTITY]
    planned = plan(from_argv([*env, *options, "--runs-dir", str(tmp_path)]))
    began = time.perf_counter()
    found = measure_policy(planned)
    assert found is not None
    spent = time.perf_counter() - began
    assert 1e-7 < found.act < found.learn < spent


def test_a_learner_with_parts_beside_it_is_not_measured(tmp_path: Path) -> None:
    planned = plan(from_argv(["Pendulum-v1", "--algo", "mbpo", "--mbpo.clock", "async", "--runs-dir", str(tmp_path)]))
    assert measure_policy(planned) is None
