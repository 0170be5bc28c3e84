"""The simulation behind packages/ray/docs/cluster.md gives known limits exactly and predicts the measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import cluster_model
from benchmarks._cluster import FREE, CallCosts, Costs, Curve, Queue, Setting, Unit, World, simulate
from benchmarks._cluster_page import newest
from benchmarks._common import RESULTS, Row

ZERO = Curve(((0.0, 0.0),))
NO_COSTS = Costs(near=FREE, far=FREE)
CONSTANT = World(
    name="constant", step=0.01, spread=0.0, computes=0.0, row_bytes=400.0, weights_bytes=1e5, learn=ZERO, episode=10**9
)
FAR = Setting(workers=20, nodes=2, trip=0.0)


def flat(seconds: float) -> Curve:
    return Curve(((0.0, seconds),))


def test_a_wire_that_costs_nothing_reaches_the_ideal() -> None:
    instant = replace(FAR, bandwidth=1e18)
    ways: list[tuple[Unit, int]] = [("fragments", 10**9), ("fragments", 100), ("episodes", 100)]
    for unit, episode in ways:
        outcome = simulate(replace(instant, unit=unit), replace(CONSTANT, episode=episode), NO_COSTS)
        assert outcome.share == pytest.approx(1.0, abs=0.04)
        assert outcome.limit == "environments"


def test_idle_time_between_calls_costs_its_share() -> None:
    """32 steps of 10 ms, then 80 ms: four fifths are left."""
    outcome = simulate(FAR, CONSTANT, replace(NO_COSTS, far=replace(FREE, idle=flat(0.08))))
    assert outcome.share == pytest.approx(0.8, abs=0.01)
    assert outcome.limit == "latency"
    longer = simulate(replace(FAR, fragment=128), CONSTANT, replace(NO_COSTS, far=replace(FREE, idle=flat(0.08))))
    assert longer.share == pytest.approx(1.28 / 1.36, abs=0.01), "longer fragments make up for it"


def test_a_driver_is_the_limit_where_it_pumps_all_the_time() -> None:
    """20 ms a call: 50 calls of 32 rows a second, where 20 workers could make 62."""
    outcome = simulate(FAR, CONSTANT, replace(NO_COSTS, far=replace(FREE, pump=flat(0.02))))
    assert outcome.rate == pytest.approx(50 * 32, rel=0.02)
    assert outcome.limit == "driver"
    several = simulate(replace(FAR, learners=2), CONSTANT, replace(NO_COSTS, far=replace(FREE, pump=flat(0.02))))
    assert several.limit != "driver"
    assert several.rate > 1.15 * outcome.rate, "two drivers share the workers"


def test_an_episode_that_ends_is_one_more_call() -> None:
    """40 steps of 10 ms and twice 50 ms."""
    costs = replace(NO_COSTS, far=replace(FREE, idle=flat(0.05)))
    outcome = simulate(replace(FAR, unit="episodes"), replace(CONSTANT, episode=40), costs)
    assert outcome.share == pytest.approx(0.4 / 0.5, abs=0.01)


def test_a_look_finds_all_that_has_come_since_the_last_one() -> None:
    pump = Queue(look=1.0)
    ends = [pump.serve(now, 0.5) for now in (0.0, 0.2, 0.3, 5.0)]
    assert ends == [1.5, 3.0, 3.5, 6.5], "the second and the third are found together"
    assert pump.busy == 5.0


@pytest.mark.parametrize("unit", ["fragments", "episodes"])
def test_a_learner_is_the_limit_where_it_learns_all_the_time(unit: Unit) -> None:
    outcome = simulate(replace(FAR, unit=unit), replace(CONSTANT, learn=flat(0.001), episode=100), NO_COSTS)
    assert outcome.rate == pytest.approx(1000, rel=0.03)
    assert outcome.limit == "learner"
    assert outcome.busy["lag bound"] > 0.4, "workers wait for credit"


def test_a_network_is_the_limit_where_rows_do_not_fit() -> None:
    """1 MB/s for rows of 1 kB."""
    outcome = simulate(replace(FAR, bandwidth=1e6), replace(CONSTANT, row_bytes=1e3, weights_bytes=0.0), NO_COSTS)
    assert outcome.rate == pytest.approx(1000, rel=0.03)
    assert outcome.limit == "network"
    assert outcome.bytes_in == pytest.approx(1e6, rel=0.03)


def test_weights_go_to_every_node_once_a_version() -> None:
    outcome = simulate(replace(FAR, bandwidth=1e18), CONSTANT, NO_COSTS)
    versions = outcome.rate / FAR.rows
    assert outcome.bytes_out == pytest.approx(2 * versions * CONSTANT.weights_bytes, rel=0.2)


def test_a_store_is_the_limit_of_large_fragments_only() -> None:
    costs = replace(NO_COSTS, far=replace(FREE, raylets=flat(0.04)))  # half of it is the worker's node's
    assert simulate(FAR, CONSTANT, costs).limit == "environments", "12.8 kB come with the answer"
    outcome = simulate(replace(FAR, bandwidth=1e18), replace(CONSTANT, row_bytes=4e3), costs)
    assert outcome.limit == "object store"
    assert outcome.rate == pytest.approx(50 * 32, rel=0.02)


def test_what_computes_shares_the_cores_of_one_machine() -> None:
    """8 workers that compute all the time on 2 cores: a quarter of the ideal."""
    outcome = simulate(Setting(workers=8, nodes=1, cores=2), replace(CONSTANT, computes=0.01), NO_COSTS)
    assert outcome.share == pytest.approx(0.25, rel=0.05)
    assert outcome.limit == "processor"


def test_one_update_at_a_time_where_no_lag_is_allowed() -> None:
    """While it learns nobody acts: 64 steps of 10 ms, then 0.64 s of learning."""
    slow = replace(CONSTANT, learn=flat(0.64 / (64 * 20)))
    outcome = simulate(replace(FAR, max_lag=0, bandwidth=1e18), slow, NO_COSTS)
    assert outcome.share == pytest.approx(0.5, abs=0.05)
    assert outcome.limit == "lag bound"


def test_costs_are_extrapolated_beyond_the_measurements() -> None:
    curve = Curve(((1.0, 1.0), (2.0, 3.0)))
    assert [curve(0.0), curve(1.5), curve(4.0)] == [1.0, 2.0, 7.0]


def measured() -> list[Row]:
    """The newest runs of --mode ray with 50 sleepers."""
    return [row for row in newest("ray_straggler") if row["mode"] == "ray"]


@pytest.mark.skipif(not (RESULTS / "ray_straggler.jsonl").exists(), reason="not measured yet")
def test_the_measured_straggler_is_predicted() -> None:
    rows = newest("ray_costs")
    costs, sleeper = cluster_model.calibrated(rows), cluster_model.world("sleeper", rows)
    assert {row["order"]["options"]["unit"] for row in measured()} == {"fragments", "episodes"}
    for row in measured():
        outcome = cluster_model.predicted(row, sleeper, costs)
        assert outcome.rate == pytest.approx(row["rows_per_s"], rel=cluster_model.CLOSE)


def test_costs_come_from_the_newest_rows() -> None:
    costs = cluster_model.calibrated(newest("ray_costs"))
    assert isinstance(costs.near, CallCosts)
    assert costs.far.raylets(1e6) > costs.near.raylets(1e6) > costs.near.raylets(1e3), "stores and a connection"
    assert costs.near.idle(1e6) > costs.near.idle(1e3) > 0
    assert costs.near.pump(1_000) > 1e-5
    assert costs.pending > 0
