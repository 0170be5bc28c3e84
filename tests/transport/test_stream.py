"""A simulation in a thread, driven by hand: what it may begin and with which weights, and that it ends whatever happens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.collect.batch import WholeBatches
from freewheel.core import BatchSpec, Chunk, NDArray, Transitions
from freewheel.pacing.lag_bound import LagBound
from freewheel.pacing.one_ahead import OneAhead
from freewheel.policies.nets import TensorActor
from freewheel.rollout.factory import CollectSpec
from freewheel.testing.conformance import check_collector
from freewheel.transport.pool import AsTheyCome
from freewheel.transport.stream import SimulationCollector, simulation_wire
from tests.support.device_story import Stage, retold

LANES, STEPS, FRAGMENT = 4, 6, 3  # an update's steps, and those of a fragment
ROWS = LANES * STEPS
FIELDS = [field.name for field in fields(Transitions) if field.name != "log_prob"]


@pytest.fixture
def stage() -> Stage:
    return Stage(lanes=LANES)


def job_of(stage: Stage, waiting: Callable[[], None] | None = None, steps: int = STEPS) -> CollectSpec:
    batch = BatchSpec(steps, stage.spec.lanes)
    if waiting is None:
        return CollectSpec(env=stage.spec, batch=batch)
    return CollectSpec(env=stage.spec, batch=batch, while_waiting=waiting)


def free(
    stage: Stage, *, ahead: int = 2, workers: int = 1, slots: int = 100, job: CollectSpec | None = None
) -> SimulationCollector:
    spec = job or job_of(stage)
    pacing = LagBound(workers=1, lanes=LANES, steps=FRAGMENT, batch_rows=ROWS, ahead=ahead, max_lag=ahead)
    wire = simulation_wire(stage.recipe, spec, pacing, authors=workers, slots=slots, steps=FRAGMENT)
    return SimulationCollector(wire, AsTheyCome(), spec)


def one_ahead(stage: Stage, *, fragment: int = FRAGMENT, steps: int = STEPS) -> SimulationCollector:
    spec = job_of(stage, steps=steps)
    pacing = OneAhead(workers=1, lanes=LANES, steps=fragment, batch_steps=steps)
    wire = simulation_wire(stage.recipe, spec, pacing, authors=1, slots=6, steps=fragment)
    return SimulationCollector(wire, WholeBatches(pacing, authors=1, quota=spec.batch.rows), spec)


def eventually(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.001)


def eventually_produced(simulation: SimulationCollector, rows: int) -> None:
    eventually(lambda: simulation.rows().produced >= rows, f"{rows} rows")
    assert simulation.rows().produced == rows


def joined(chunks: Sequence[Chunk[Tensor]], name: str) -> NDArray:
    return np.concatenate([getattr(chunk.data, name).numpy() for chunk in chunks])


def assert_rows(chunks: Sequence[Chunk[Tensor]]) -> None:
    wanted = retold(joined(chunks, "action")).data
    for name in FIELDS:
        np.testing.assert_array_equal(joined(chunks, name), getattr(wanted, name), name)


# ------------------------------------------------------------------------------------------------------------- the promises


@pytest.mark.parametrize("workers", [1, 2])
def test_free_running_keeps_the_promises_of_a_collector(stage: Stage, workers: int) -> None:
    check_collector(lambda: free(stage, workers=workers), stage.snapshot, every=1)
    assert stage.closed == [1]


def test_one_ahead_keeps_the_promises_of_a_collector(stage: Stage) -> None:
    """New weights come with every batch, so that a turn is a batch."""
    check_collector(lambda: one_ahead(stage, fragment=STEPS), stage.snapshot, every=1)
    assert stage.closed == [1]


def test_rows_are_what_happened_across_versions(stage: Stage) -> None:
    chunks: list[Chunk[Tensor]] = []
    with free(stage) as simulation:
        for version in range(12):
            simulation.publish(stage.snapshot(version), sum(chunk.rows for chunk in chunks))
            chunks += simulation.collect(wait=True)
    assert len({chunk.version for chunk in chunks}) > 3
    assert_rows(chunks)
    wanted = retold(joined(chunks, "action")).episodes
    assert [episode for chunk in chunks for episode in chunk.episodes] == [one for told in wanted for one in told]


@pytest.mark.parametrize("mode", [free, one_ahead])
def test_rows_are_chosen_by_the_weights_they_are_signed_with(
    stage: Stage, mode: Callable[[Stage], SimulationCollector]
) -> None:
    chunks: list[Chunk[Tensor]] = []
    with mode(stage) as simulation:
        for version in range(6):
            simulation.publish(stage.snapshot(version), version * ROWS)
            while sum(chunk.rows for chunk in chunks) < (version + 1) * ROWS:
                chunks += simulation.collect(wait=True)
    actor = stage.recipe.actor()
    assert isinstance(actor, TensorActor)
    assert chunks[-1].version > 2
    for chunk in chunks:
        actor.load(stage.snapshot(chunk.version))
        distribution = actor.policy.distribution(chunk.data.obs.flatten(0, 1))
        wanted = distribution.log_prob(chunk.data.action.flatten(0, 1))
        torch.testing.assert_close(chunk.data.log_prob.flatten(), wanted.detach())


# ------------------------------------------------------------------------------------------------------------------ permits


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_free_running_never_goes_beyond_its_allowance(stage: Stage, ahead: int) -> None:
    """And goes as far as that: a learner that stops to publish stops the simulation, one that publishes starts it again."""
    allowance = (ahead + 1) * ROWS
    with free(stage, ahead=ahead) as simulation:
        done = 0
        for version, more in enumerate((0, 1, ROWS, 5, 2 * ROWS, ROWS)):
            done += more
            simulation.publish(stage.snapshot(version), done)
            limit = -(-(allowance + done) // LANES) * LANES  # a step is a row of every lane
            eventually_produced(simulation, limit)
            simulation.collect(wait=False)
    assert simulation.rows().produced == limit  # nor did it go on afterwards


def test_batch_k_is_acted_with_version_k_minus_1(stage: Stage) -> None:
    """Whatever the fragments are: 7 steps in fragments of 3 are 3, 3 and 1."""
    chunks: list[Chunk[Tensor]] = []
    rows = 7 * LANES
    with one_ahead(stage, steps=7) as simulation:
        for version in range(6):
            simulation.publish(stage.snapshot(version), version * rows)
            while sum(chunk.rows for chunk in chunks) < (version + 1) * rows:
                chunks += simulation.collect(wait=True)
        eventually_produced(simulation, 7 * rows)
    assert simulation.rows().produced == 7 * rows  # version 5 lets batch 6 begin, and nothing after it
    by_step = [chunk.version for chunk in chunks for _ in range(len(chunk.data.reward))]
    assert by_step[: 6 * 7] == [max(batch - 1, 0) for batch in range(6) for _ in range(7)]
    assert [len(chunk.data.reward) for chunk in chunks[:6]] == [3, 3, 1, 3, 3, 1]
    assert_rows(chunks)


def test_a_batch_waits_for_its_version_however_long_that_takes(stage: Stage) -> None:
    with one_ahead(stage) as simulation:
        simulation.publish(stage.snapshot(0), 0)
        eventually_produced(simulation, 2 * ROWS)
    assert simulation.rows().produced == 2 * ROWS
    assert simulation.oldest() is None, "batches are handed over whole and in order"


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_no_more_fragments_wait_than_there_are_slots(stage: Stage, slots: int) -> None:
    fragment = FRAGMENT * LANES
    with free(stage, ahead=50, slots=slots) as simulation:
        simulation.publish(stage.snapshot(0), 0)
        eventually_produced(simulation, slots * fragment)
        assert simulation.stats() == {"queue_util": 1.0, "queue/fragments": slots}
        came = sum(chunk.rows for chunk in simulation.collect(wait=False))  # which makes room
        eventually(lambda: simulation.rows().queued == slots * fragment, "a full queue again")
    assert simulation.rows().produced == came + slots * fragment


def test_oldest_is_the_version_of_what_waits(stage: Stage) -> None:
    with free(stage, ahead=0) as simulation:
        assert simulation.oldest() is None
        simulation.publish(stage.snapshot(0), 0)
        eventually_produced(simulation, ROWS)
        assert simulation.oldest() == 0
        first = simulation.collect(wait=False)
        assert simulation.oldest() is None
        simulation.publish(stage.snapshot(1), ROWS)
        eventually_produced(simulation, 2 * ROWS)
        assert simulation.oldest() == 1
        second = simulation.collect(wait=True)
    assert [chunk.version for chunk in (*first, *second)] == [0, 0, 1, 1]


# -------------------------------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize("authors", [2, 4])
def test_lanes_are_cut_into_chunks_of_their_authors(stage: Stage, authors: int) -> None:
    with free(stage, ahead=3) as whole, free(stage, ahead=3, workers=authors) as cut:
        parts: list[list[Chunk[Tensor]]] = []
        for simulation in (whole, cut):
            simulation.publish(stage.snapshot(0), 0)
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


def test_parts_are_delivered_together_and_in_order(stage: Stage) -> None:
    with free(stage, workers=2, ahead=1) as simulation:
        simulation.publish(stage.snapshot(0), 0)
        eventually_produced(simulation, 2 * ROWS)
        chunks = simulation.collect(wait=True)
    assert [(chunk.origin.worker, chunk.origin.sequence) for chunk in chunks] == [
        (worker, number) for number in range(4) for worker in range(2)
    ]


# ------------------------------------------------------------------------------------------------------------------- endings


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("freewheel")]


def test_what_a_world_raises_is_raised_where_it_is_waited_for() -> None:
    stage = Stage(lanes=LANES, explodes_at=7)
    came: list[Chunk[Tensor]] = []

    def take_all() -> None:
        while True:
            came.extend(simulation.collect(wait=True))

    with free(stage) as simulation:
        simulation.publish(stage.snapshot(0), 0)
        for _ in range(2):  # and again
            with pytest.raises(ZeroDivisionError, match="a rotor came off"):
                take_all()
        rows = simulation.rows()
    delivered = sum(chunk.rows for chunk in came)
    assert rows.produced == delivered + rows.queued == 2 * FRAGMENT * LANES  # the third fragment was never finished
    assert (threads(), stage.closed) == ([], [1])


def test_a_world_that_cannot_begin_is_closed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no fuel")

    monkeypatch.setattr("freewheel.envs.device.DeviceEnv.reset", refuse)
    with pytest.raises(RuntimeError, match="no fuel"), free(stage):
        pass
    assert (threads(), stage.closed) == ([], [1])


@pytest.mark.parametrize("when", ["at once", "published", "full", "collected", "failing"])
def test_it_can_be_left_at_any_time(stage: Stage, when: str) -> None:
    class OnPurposeError(Exception):
        pass

    def use(simulation: SimulationCollector) -> None:
        if when == "at once":
            return
        simulation.publish(stage.snapshot(0), 0)
        if when == "full":
            eventually(lambda: simulation.rows().queued == 3 * ROWS, "all that is allowed")
        if when in ("collected", "failing"):
            assert simulation.collect(wait=True)
        if when == "failing":
            raise OnPurposeError

    if when == "failing":
        with pytest.raises(OnPurposeError), free(stage) as simulation:
            use(simulation)
    else:
        with free(stage) as simulation:
            use(simulation)
    assert (threads(), stage.closed) == ([], [1])
    assert simulation.rows().open == 0


class Stopped(BaseException):
    """What a run raises in whoever waits."""


def test_a_stop_is_honoured_while_it_waits(stage: Stage) -> None:
    calls = []

    def waiting() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise Stopped

    with free(stage, job=job_of(stage, waiting)) as simulation, pytest.raises(Stopped):
        simulation.collect(wait=True)  # nothing is published: nothing will ever come
    assert len(calls) == 3


def test_whoever_does_not_wait_gets_nothing_at_once(stage: Stage) -> None:
    with free(stage) as simulation:
        assert list(simulation.collect(wait=False)) == []
        assert (simulation.messages(), simulation.summary()) == ([], {})
