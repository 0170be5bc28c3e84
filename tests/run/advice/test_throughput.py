"""The model of throughput: limits that it must meet, and a real policy measured."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from freewheel.config.resolve import from_argv
from freewheel.run.advice import policy_times, throughput
from freewheel.run.advice.policy_times import measure_policy
from freewheel.run.advice.throughput import PolicyTimes, StepTimes, Way, WireTimes, forecast
from freewheel.run.planning import plan
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


def test_episodes_that_end_together_reset_together() -> None:
    apart = StepTimes(times=(0.005,), reset=0.002)
    together = StepTimes(times=(0.005,), reset=0.002, ends_together=True)
    slow, fast = (forecast(way("barrier"), env, FREE, cores=2).rate for env in (apart, together))
    assert fast > 2 * slow


def test_envs_that_compute_are_limited_by_the_cores_in_every_way() -> None:
    burning = StepTimes(times=(0.002,), cpu=0.002)
    for one in (way("barrier"), way("free", workers=2), way("batch", workers=2), way("free", workers=64, lanes=64)):
        assert 700 < forecast(one, burning, FREE, cores=2).rate <= 1000  # 2 cores / 2 ms
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


def test_a_barrier_over_exponential_steps_waits_for_a_harmonic_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "LANE_ROW", 0.0)
    monkeypatch.setattr(throughput, "BARRIER_ROW", 0.0)
    quantiles = (np.arange(20_000) + 0.5) / 20_000
    env = StepTimes(times=tuple((-0.01 * np.log1p(-quantiles)).tolist()))  # exponential, 10 ms in the mean
    for lanes in (1, 2, 8, 32):
        slowest = 0.01 * sum(1 / k for k in range(1, lanes + 1))
        assert env.slowest_of(lanes) == pytest.approx(slowest, rel=0.01)
        found = forecast(way("barrier", lanes=lanes), env, FREE, cores=2)
        assert found.rate == pytest.approx(lanes / slowest, rel=0.01)
        assert forecast(way("free", lanes, lanes), env, FREE, cores=2).rate == pytest.approx(lanes / 0.01, rel=0.01)


def test_a_learner_that_is_the_bottleneck_sets_the_rate_and_fills_the_bound_on_the_lag() -> None:
    policy = PolicyTimes(act=0.0, learn=0.001)
    for max_lag in (1, 2, 5):
        one = replace(way("free", workers=8), fragment=8, max_lag=max_lag)
        found = forecast(one, StepTimes(times=(0.001,)), policy, cores=4)
        assert found.rate == pytest.approx(1000)
        assert found.limit == "learner"
        assert found.lag == max_lag
        assert found.busy == pytest.approx(1)
    taking = forecast(way("free", workers=8), EVEN, policy, 4, WireTimes(taken_fragment=0.064))  # 1 ms a row more
    assert taking.rate == pytest.approx(500)


def test_the_lag_follows_by_littles_law() -> None:
    # 8 workers of 5 ms make 1600 rows/s; the learner takes 0.25 ms a row, 0.4 of the time: so many are acted during an update.
    policy, free = PolicyTimes(act=0.0, learn=0.00025), replace(way("free", workers=8), max_lag=2)
    assert forecast(free, EVEN, policy, cores=8).lag == pytest.approx(0.4)
    # Open fragments of 16 steps hold 8 in the mean, of 64 that each lane has in an update.
    assert forecast(replace(free, fragment=16), EVEN, policy, cores=8).lag == pytest.approx(0.4 + 8 / 64)
    # Whole episodes keep their version from their first step to their last: 8 x 128 rows are two batches of 512.
    assert forecast(replace(free, episode=128.0, max_lag=None), EVEN, policy, cores=8).lag == pytest.approx(0.4 + 2)
    kinds: list[throughput.Kind] = ["serial", "barrier", "batch"]
    assert [forecast(way(kind), EVEN, policy, cores=8).lag for kind in kinds] == [0, 0, 1]


def test_without_lag_workers_wait_for_every_update() -> None:
    policy, one = PolicyTimes(act=0.0, learn=0.001), replace(way("free", workers=8), max_lag=0)
    found = forecast(one, EVEN, policy, cores=9)
    assert found.rate == pytest.approx(1 / (0.005 / 8 + 0.001))
    assert found.lag == 0


def test_workers_share_the_cores_with_the_learner_and_with_each_other() -> None:
    burning, policy = StepTimes(times=(0.001,), cpu=0.001), PolicyTimes(act=0.0, learn=0.0005)
    found = forecast(way("free", workers=2), burning, policy, cores=2)
    assert found.rate == pytest.approx(2 / 0.0015)  # 2 cores, 1.5 ms of work a row
    assert found.limit == "cores"
    wired = forecast(replace(way("free", 2), fragment=8), burning, FREE, 2, WireTimes(row=0.0001, fragment=0.0032))
    assert wired.rate == pytest.approx(2 / 0.0012)  # of each row 0.1 ms, and 0.1 ms of the fragment of 32 rows


def test_the_cycle_of_waiting_and_working_is_the_machine_repair_model() -> None:
    # Two that wait 1 s and work 1 s at one server: states 0, 1, 2 with odds 1 : 2 : 2, so it works 4/5 of the time.
    assert throughput.cycle_rate(2, 1.0, 1.0, 1) == pytest.approx(0.8)
    assert throughput.cycle_rate(2, 1.0, 1.0, 2) == pytest.approx(1.0)
    assert throughput.cycle_rate(500, 0.01, 0.001, 2) == pytest.approx(2000, rel=1e-3)


def test_lanes_that_share_a_process_cost_what_was_measured() -> None:
    env = StepTimes(times=(0.001,), cpu=0.001, together=((1, 1.0), (16, 2.5)))
    assert env.beside(16).row == pytest.approx(0.0025 / 16)
    assert env.beside(6).row == pytest.approx(0.0015 / 6)
    assert env.beside(31).row == pytest.approx(0.004 / 31)
    assert forecast(way("serial", lanes=16), env, FREE, cores=2).rate == pytest.approx(16 / 0.0025)


@pytest.mark.parametrize("options", [["--mode", "continuous"], ["--algo", "sac", "--env", "Pendulum-v1"]])
def test_the_policy_and_its_learner_are_measured(tmp_path: Path, options: list[str]) -> None:
    env = [] if "--env" in options else [IDENTITY]
    planned = plan(from_argv([*env, *options, "--runs-dir", str(tmp_path)]))
    began = time.perf_counter()
    found = measure_policy(planned)
    assert found is not None
    spent = time.perf_counter() - began
    assert 1e-7 < found.act < found.learn < spent


@pytest.mark.parametrize("options", [["--ppo.minibatch", "16"], ["--algo", "sac", "--envs-per-worker", "1000"]])
def test_long_updates_are_measured_partly(tmp_path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = [IDENTITY, "--mode", "continuous", "--workers", "1", *options, "--runs-dir", str(tmp_path)]
    planned = plan(from_argv(words))
    whole = measure_policy(planned)
    steps = policy_times._Steps()
    monkeypatch.setattr(policy_times, "LONGEST", 0.0)
    monkeypatch.setattr(policy_times, "_Steps", lambda: steps)
    found = measure_policy(planned)
    assert found is not None
    assert whole is not None
    assert steps.count == 1, "gradient steps"
    assert found.learn > whole.learn / 50, "one step stands for all"


def test_a_learner_with_parts_beside_it_is_not_measured(tmp_path: Path) -> None:
    planned = plan(from_argv(["Pendulum-v1", "--algo", "mbpo", "--mbpo.clock", "async", "--runs-dir", str(tmp_path)]))
    assert measure_policy(planned) is None
