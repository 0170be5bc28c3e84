"""A simulation in a thread: when it may act and with which weights, and that it always ends."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.collect.batch import WholeBatches
from freewheel.core import BatchSpec, Chunk, Transitions
from freewheel.pacing.lag_bound import LagBound
from freewheel.pacing.one_ahead import OneAhead
from freewheel.policies.nets import TensorActor
from freewheel.rollout.factory import CollectSpec
from freewheel.testing.conformance import check_collector
from freewheel.timeline.recording import SpanRecording
from freewheel.transport.pool import AsTheyCome
from freewheel.transport.stream import SimulationCollector, simulation_wire
from tests.support.device_story import DeviceSetup, assert_rows
from tests.support.trainers import wait_until

LANES, STEPS, FRAGMENT = 4, 6, 3  # steps of an update and of a fragment
ROWS = LANES * STEPS


@pytest.fixture
def device() -> DeviceSetup:
    return DeviceSetup(lanes=LANES)


def spec_of(device: DeviceSetup, waiting: Callable[[], None] | None = None, steps: int = STEPS) -> CollectSpec:
    batch = BatchSpec(steps, device.spec.lanes)
    if waiting is None:
        return CollectSpec(env=device.spec, batch=batch)
    return CollectSpec(env=device.spec, batch=batch, while_waiting=waiting)


def free(
    device: DeviceSetup, *, ahead: int = 2, workers: int = 1, slots: int = 100, given: CollectSpec | None = None
) -> SimulationCollector:
    spec = given or spec_of(device)
    pacing = LagBound(
        workers=1, lanes=LANES, steps=FRAGMENT, batch_rows=ROWS, ahead=ahead, max_lag=ahead, whole_fragments=True
    )
    wire = simulation_wire(device.factory, spec, pacing, authors=workers, slots=slots, steps=FRAGMENT)
    return SimulationCollector(wire, AsTheyCome(), spec)


def one_ahead(device: DeviceSetup, *, fragment: int = FRAGMENT, steps: int = STEPS) -> SimulationCollector:
    spec = spec_of(device, steps=steps)
    pacing = OneAhead(workers=1, lanes=LANES, steps=fragment, batch_steps=steps)
    wire = simulation_wire(device.factory, spec, pacing, authors=1, slots=6, steps=fragment)
    return SimulationCollector(wire, WholeBatches(pacing, authors=1, quota=spec.batch.rows), spec)


def eventually_produced(simulation: SimulationCollector, rows: int) -> None:
    wait_until(lambda: simulation.rows().produced >= rows)
    assert simulation.rows().produced == rows


@pytest.mark.parametrize("workers", [1, 2])
def test_free_running_satisfies_the_contract_of_a_collector(device: DeviceSetup, workers: int) -> None:
    check_collector(lambda: free(device, workers=workers), device.snapshot, every=1)
    assert device.closed == [1]


def test_one_ahead_satisfies_the_contract_of_a_collector(device: DeviceSetup) -> None:
    """New weights come with every batch."""
    check_collector(lambda: one_ahead(device, fragment=STEPS), device.snapshot, every=1)
    assert device.closed == [1]


@pytest.mark.parametrize("mode", [free, one_ahead])
def test_rows_are_by_the_right_weights(device: DeviceSetup, mode: Callable[[DeviceSetup], SimulationCollector]) -> None:
    chunks: list[Chunk[Tensor]] = []
    with mode(device) as simulation:
        for version in range(6):
            simulation.publish(device.snapshot(version), version * ROWS)
            while sum(chunk.rows for chunk in chunks) < (version + 1) * ROWS:
                chunks += simulation.collect(wait=True)
    actor = device.factory.actor()
    assert isinstance(actor, TensorActor)
    assert chunks[-1].version > 2
    for chunk in chunks:
        actor.load(device.snapshot(chunk.version))
        wanted = actor.policy.distribution(chunk.data.obs.flatten(0, 1)).log_prob(chunk.data.action.flatten(0, 1))
        torch.testing.assert_close(chunk.data.log_prob.flatten(), wanted.detach())


def test_what_it_does_is_a_row_of_the_timeline(device: DeviceSetup) -> None:
    recording = SpanRecording()
    with free(device, given=replace(spec_of(device), trace=recording)) as simulation:
        for version in range(6):
            simulation.publish(device.snapshot(version), version * ROWS)
            simulation.collect(wait=True)
    rows = {row.name: row for row in recording.finished().rows}
    assert set(rows) == {"simulation", "collector"}, "it is on the CPU: there is no row of a GPU"
    assert {"step", "wait-credit"} <= set(rows["simulation"].seconds()) <= {"step", "load", "wait-credit"}
    for one, other in itertools.pairwise(rows["simulation"].spans):
        assert one.t1_s <= other.t0_s + 1e-9


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_free_running_never_exceeds_its_credits(device: DeviceSetup, ahead: int) -> None:
    """And uses them all: the simulation waits while the learner does not publish, and continues after a publication."""
    allowance = (ahead + 1) * ROWS
    with free(device, ahead=ahead) as simulation:
        done = 0
        for version, more in enumerate((0, 1, ROWS, 5, 2 * ROWS, ROWS)):
            done += more
            simulation.publish(device.snapshot(version), done)
            limit = -(-(allowance + done) // (FRAGMENT * LANES)) * FRAGMENT * LANES  # in whole fragments
            eventually_produced(simulation, limit)
            simulation.collect(wait=False)
    assert simulation.rows().produced == limit  # it did not continue afterwards


def test_batch_k_uses_version_k_minus_1(device: DeviceSetup) -> None:
    """For any fragments: 7 steps in fragments of 3 are 3, 3 and 1."""
    chunks: list[Chunk[Tensor]] = []
    rows = 7 * LANES
    with one_ahead(device, steps=7) as simulation:
        for version in range(6):
            simulation.publish(device.snapshot(version), version * rows)
            while sum(chunk.rows for chunk in chunks) < (version + 1) * rows:
                chunks += simulation.collect(wait=True)
        eventually_produced(simulation, 7 * rows)
    assert simulation.rows().produced == 7 * rows  # version 5 allows batch 6, and nothing after it
    assert simulation.oldest() is None, "batches are delivered whole and in order"
    by_step = [chunk.version for chunk in chunks for _ in range(len(chunk.data.reward))]
    assert by_step[: 6 * 7] == [max(batch - 1, 0) for batch in range(6) for _ in range(7)]
    assert [len(chunk.data.reward) for chunk in chunks[:6]] == [3, 3, 1, 3, 3, 1]
    assert_rows(chunks)


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_no_more_fragments_wait_than_there_are_slots(device: DeviceSetup, slots: int) -> None:
    fragment = FRAGMENT * LANES
    with free(device, ahead=50, slots=slots) as simulation:
        simulation.publish(device.snapshot(0), 0)
        eventually_produced(simulation, slots * fragment)
        assert simulation.stats().items() >= {"queue_util": 1.0, "queue/fragments": slots}.items()
        received = sum(chunk.rows for chunk in simulation.collect(wait=False))  # which frees slots
        wait_until(lambda: simulation.rows().queued == slots * fragment)
    assert simulation.rows().produced == received + slots * fragment


def test_oldest_is_the_version_of_queued_rows(device: DeviceSetup) -> None:
    with free(device, ahead=0) as simulation:
        assert simulation.oldest() is None
        simulation.publish(device.snapshot(0), 0)
        eventually_produced(simulation, ROWS)
        assert simulation.oldest() == 0
        first = simulation.collect(wait=False)
        assert simulation.oldest() is None
        simulation.publish(device.snapshot(1), ROWS)
        eventually_produced(simulation, 2 * ROWS)
        assert simulation.oldest() == 1
        second = simulation.collect(wait=True)
    assert [chunk.version for chunk in (*first, *second)] == [0, 0, 1, 1]


@pytest.mark.parametrize("authors", [2, 4])
def test_lanes_are_split_into_chunks_of_their_authors(device: DeviceSetup, authors: int) -> None:
    with free(device, ahead=3) as whole, free(device, ahead=3, workers=authors) as cut:
        parts: list[list[Chunk[Tensor]]] = []
        for simulation in (whole, cut):
            simulation.publish(device.snapshot(0), 0)
            eventually_produced(simulation, 4 * ROWS)
            parts.append(list(simulation.collect(wait=True)))
    for chunk, together in zip(parts[0], zip(*[iter(parts[1])] * authors, strict=True), strict=True):
        for field in fields(Transitions):
            joint = np.concatenate([getattr(part.data, field.name).numpy() for part in together], axis=1)
            np.testing.assert_array_equal(joint, getattr(chunk.data, field.name).numpy())
        assert [part.origin.worker for part in together] == list(range(authors))
        assert [part.origin.lane0 for part in together] == [n * LANES // authors for n in range(authors)]
        assert sorted((one for part in together for one in part.episodes), key=repr) == sorted(chunk.episodes, key=repr)
        assert all(len(part.state) == LANES // authors for part in together)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("freewheel")]


def test_an_exception_of_the_simulator_is_raised_where_the_learner_waits() -> None:
    device = DeviceSetup(lanes=LANES, explodes_at=7)
    received: list[Chunk[Tensor]] = []

    def take_all() -> None:
        while True:
            received.extend(simulation.collect(wait=True))

    with free(device) as simulation:
        simulation.publish(device.snapshot(0), 0)
        for _ in range(2):  # and again
            with pytest.raises(ZeroDivisionError, match="a rotor came off"):
                take_all()
        rows = simulation.rows()
    delivered = sum(chunk.rows for chunk in received)
    assert rows.produced == delivered + rows.queued == 2 * FRAGMENT * LANES  # the third fragment was not finished
    assert (threads(), device.closed) == ([], [1])


def test_a_simulator_that_cannot_begin_is_closed(device: DeviceSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no fuel")

    monkeypatch.setattr("freewheel.envs.device.DeviceEnv.reset", refuse)
    with pytest.raises(RuntimeError, match="no fuel"), free(device):
        pass
    assert (threads(), device.closed) == ([], [1])


@pytest.mark.parametrize("when", ["at once", "published", "full", "collected", "failing"])
def test_it_can_be_left_at_any_time(device: DeviceSetup, when: str) -> None:
    class ExpectedError(Exception): ...

    def use(simulation: SimulationCollector) -> None:
        if when == "at once":
            return
        simulation.publish(device.snapshot(0), 0)
        if when == "full":
            wait_until(lambda: simulation.rows().queued == 3 * ROWS)
        if when in ("collected", "failing"):
            assert simulation.collect(wait=True)
        if when == "failing":
            raise ExpectedError

    with suppress(ExpectedError), free(device) as simulation:
        use(simulation)
    assert (threads(), device.closed) == ([], [1])
    assert simulation.rows().open == 0


class Stopped(BaseException):
    """What a run raises to end a wait."""


def test_a_stop_ends_a_wait(device: DeviceSetup) -> None:
    calls = []

    def waiting() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise Stopped

    with free(device, given=spec_of(device, waiting)) as simulation, pytest.raises(Stopped):
        simulation.collect(wait=True)  # nothing is published, so there will be no rows
    assert len(calls) == 3


def test_without_a_wait_there_is_nothing_at_first(device: DeviceSetup) -> None:
    with free(device) as simulation:
        assert list(simulation.collect(wait=False)) == []
        assert (simulation.messages(), simulation.summary()) == ([], {})
