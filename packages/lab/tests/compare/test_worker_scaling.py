"""Tests of the law over numbers of workers, with numbers from the law itself and with known limits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from freewheel.run.advice.throughput import Kind, PolicyTimes, StepTimes, forecast
from freewheel_lab.compare.results import ResultRow
from freewheel_lab.compare.worker_scaling import MeasuredPoint, fit, pays_up_to, scaled, way_with
from packages.lab.tests.support.comparison import row

EVEN = StepTimes(times=(0.010,) * 100, cpu=1e-5)
UNEVEN = StepTimes(times=tuple(np.random.default_rng(0).lognormal(math.log(0.01) - 0.245, 0.7, 400)), cpu=1e-5)
POLICY = PolicyTimes(act=5e-5, learn=1e-4)
ROWS = 2048


def trained(mode: str, workers: int, rate: float) -> ResultRow:
    """Return a training of this rate whose time shares agree with `POLICY`."""
    wall, total = 20_480 / rate, 20_480
    act, learn = POLICY.act * total / (workers * wall), POLICY.learn * total / wall
    shares = {"worker": {"infer": act}, "learner": {"update": learn}}
    return row(mode, 1, rate, workers=workers, envs=workers, wall_s=wall, shares=shares, produced=total)


def timed(mode: str, kind: Kind, env: StepTimes, counts: tuple[int, ...], barrier: float = 1.0) -> list[MeasuredPoint]:
    """Return the measurements that the law predicts for this env."""
    found = []
    for workers in counts:
        way = way_with(kind, workers, ROWS)
        rate = forecast(way, env, POLICY, 2, barrier=barrier).rate
        found.append(MeasuredPoint(mode, way, (trained(mode, 1 if kind == "barrier" else workers, rate),)))
    return found


def test_the_fit_finds_the_numbers_that_made_the_points() -> None:
    slower = UNEVEN.scaled(1.3)
    points = timed("continuous", "free", slower, (1, 2, 4, 8)) + timed("lockstep", "barrier", slower, (1, 2, 4, 8), 1.6)
    law = fit(points, UNEVEN, POLICY, cores=2)
    assert law.env.row == pytest.approx(slower.row, rel=0.02)
    assert max(abs(point.error or 0.0) for point in scaled(points, law, memory=0, rows_per_update=ROWS).points) < 0.02
    assert law.barrier == pytest.approx(1.6, rel=0.2)


def test_free_workers_have_the_mean_and_a_barrier_has_the_slowest() -> None:
    law = fit(timed("continuous", "free", UNEVEN, (1, 2, 4)), UNEVEN, POLICY, cores=64)
    free, barrier = (law.predict(way_with(kind, 50, ROWS)).rate for kind in ("free", "barrier"))
    assert free == pytest.approx(50 / (law.env.row + law.policy.act), rel=0.1)
    assert barrier < 0.5 * free  # the slowest of 50 lognormal steps takes several times the mean
    assert UNEVEN.slowest_of(50) > 3 * float(np.mean(UNEVEN.times))


def test_workers_pay_until_the_learner_is_the_limit() -> None:
    law = fit(timed("continuous", "free", EVEN, (1, 2)), EVEN, POLICY, cores=10_000)
    assert 75 <= pays_up_to(law, "free", ROWS) <= 90  # 80 workers make 80 % of 10,000 rows/s, which the learner accepts
    slow = PolicyTimes(act=5e-5, learn=2.5e-3)  # 400 rows/s: 4 workers
    law = fit([], EVEN, slow, cores=10_000)
    assert 3 <= pays_up_to(law, "free", ROWS) <= 5
    assert pays_up_to(fit([], EVEN, PolicyTimes(act=0.0, learn=1e-9), cores=10_000), "free", ROWS) == 200


def test_extrapolation_names_its_assumptions_and_goes_beyond_what_was_measured() -> None:
    points = timed("continuous", "free", EVEN, (1, 2, 4, 20))
    found = scaled(points, fit(points, EVEN, POLICY, cores=2), memory=50 << 20, rows_per_update=ROWS)
    assert [point.workers for point in found.extrapolated] == [50, 100, 200]
    assert all(point.measured is None for point in found.extrapolated)
    assert any("2 cores" in text for text in found.assumptions)
    assert any("for 200" in text for text in found.assumptions)
    assert found.verdict[0].startswith("continuous: ")
    last = found.extrapolated[-1]
    assert last.a_core_each is not None
    assert last.a_core_each >= last.predicted


def test_a_point_that_failed_is_kept_with_its_reason() -> None:
    lost = MeasuredPoint("continuous", way_with("free", 4, ROWS), (), "no memory")
    points = [*timed("continuous", "free", EVEN, (1, 2)), lost]
    found = scaled(points, fit(points, EVEN, POLICY, cores=2), memory=0, rows_per_update=ROWS)
    assert (found.points[-1].measured, found.points[-1].failed) == (None, "no memory")
    assert len(found.rows) == 2
