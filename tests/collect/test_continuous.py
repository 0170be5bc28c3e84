"""Mode continuous: credits, the bound on the lag, patience, and the rows of an update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freewheel.collect.continuous import ContinuousConfig
from freewheel.core import WORKER_TIME, BatchSpec, Collector, Snapshot
from freewheel.envs.gym import GymConfig
from freewheel.errors import UsageError
from freewheel.policies.numpy_actor import make_actor
from freewheel.policies.spec import PolicySpec
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.seeding import training_episodes
from freewheel.transport import pool
from tests.support.collectors import Spec, Weights
from tests.support.pools import wire_of
from tests.support.trainers import wait_until
from tests.support.worlds import Drifting


class Gated(Drifting):
    """Waits at a step until a file exists; gates: seed -> (step, file)."""

    def __init__(self, gates: dict[int, tuple[int, str]]) -> None:
        super().__init__(n=4, length=5)
        self.gates = gates

    def judge(self, action: Any) -> float:
        step, file = self.gates.get(self.seed, (-1, ""))
        wait_until(lambda: step != self.count or Path(file).exists())
        return super().judge(action)


class GatedLanes:
    """Two workers of one lane: lane 0 waits in its first step, lane 1 in its third."""

    def __init__(self, folder: Path, policy: PolicySpec) -> None:
        self.start, self.gate = folder / "start", folder / "gate"
        first, second = (training_episodes(3, lane).seed(0) for lane in range(2))
        gates = {first: (0, str(self.start)), second: (2, str(self.gate))}
        world = GymConfig(id="Gated", args={"gates": gates}, factory=Gated)
        self.factory = RunnerFactory(world.make, make_actor(policy), seed=3)

    @contextmanager
    def playing(self, config: ContinuousConfig, spec: CollectSpec, first: Snapshot) -> Iterator[Collector]:
        """Waits until lane 1 is at its gate; then lets lane 0 continue."""
        with config.build(self.factory, spec) as collector:
            collector.publish(first, 0)
            wait_until(lambda: wire_of(collector).heartbeats.memory["steps"][1] >= 2)
            self.start.touch()
            yield collector


@pytest.fixture
def gated(tmp_path: Path, policy: PolicySpec) -> GatedLanes:
    return GatedLanes(tmp_path, policy)


def gather(collector: Collector, rows: int) -> list[Any]:
    """Chunks with at least this many rows."""
    chunks: list[Any] = []
    while sum(chunk.rows for chunk in chunks) < rows:
        chunks += collector.collect(wait=True)
    return chunks


def take_until(collector: Collector, chunks: list[Any], done: Callable[[], bool]) -> None:
    """Take what has come until this holds."""

    def taken() -> bool:
        chunks.extend(collector.collect(wait=False))
        return done()

    wait_until(taken)


def rows_of(chunks: list[Any], *workers: int) -> int:
    return sum(chunk.rows for chunk in chunks if chunk.origin.worker in (workers or (0, 1)))


TWO = ContinuousConfig(workers=2, envs_per_worker=1, num_envs=2, max_lag=1, collection_batch_size=4)


def test_workers_stop_where_the_credits_end(factory: RunnerFactory, snapshot: Weights, spec: Spec) -> None:
    """(max_lag + 1) × S rows and no more, until the learner has trained on some."""
    with TWO.build(factory, spec(8, lanes=2)) as collector:
        collector.publish(snapshot(0), 0)
        chunks = gather(collector, 32)
        assert rows_of(chunks) == collector.rows().produced == 32
        wait_until(lambda: collector.oldest() is None)  # a fragment is queued before it is given back
        collector.publish(snapshot(1), 16)
        chunks = gather(collector, 16)
        assert {chunk.version for chunk in chunks} == {1}
        assert collector.rows().produced == 48


def test_the_row_of_a_step_that_takes_too_long_is_dropped(
    gated: GatedLanes, snapshot: Weights, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finished rows of its open fragment are used; only the row of the long step is too late."""
    monkeypatch.setattr(pool, "SHORTEST_PATIENCE", 0.5)  # lane 0 may lose the processor for a while
    with gated.playing(replace(TWO, max_lag=0, patience=1.0), spec(8, lanes=2), snapshot(0)) as collector:
        chunks = gather(collector, 16)  # lane 0 writes the share of lane 1
        from_gated = [chunk for chunk in chunks if chunk.origin.worker == 1]
        assert rows_of(from_gated) == 2
        assert collector.oldest() is None, "the learner does not wait for it"
        collector.publish(snapshot(1), 16)
        gated.gate.touch()
        chunks = gather(collector, 16)
        assert {chunk.version for chunk in chunks} == {1}
        take_until(collector, chunks, lambda: bool(collector.rows().dropped))
        assert collector.rows().dropped == {"stale": 1}
        for version in range(2, 100):
            if late := [chunk for chunk in chunks if chunk.origin.worker == 1]:
                break
            collector.publish(snapshot(version), 16 * version)
            chunks += gather(collector, 16)
        assert late
        last = from_gated[-1].origin.sequence
        assert all(chunk.origin.sequence > last + 1 for chunk in late), "the sequence shows the gap"


def test_the_learner_waits_for_a_step_within_its_patience(gated: GatedLanes, snapshot: Weights, spec: Spec) -> None:
    with gated.playing(replace(TWO, max_lag=0, patience=1e9), spec(8, lanes=2), snapshot(0)) as collector:
        chunks = gather(collector, 12)  # lane 1 still has a fragment of four rows
        assert collector.oldest() == 0
        gated.gate.touch()
        chunks += gather(collector, 4)
        assert rows_of(chunks) == 16
        while collector.oldest() is not None:
            assert collector.collect(wait=True) == []
        assert collector.rows().dropped == {}


def test_new_weights_close_a_fragment(gated: GatedLanes, snapshot: Weights, spec: Spec) -> None:
    config = replace(TWO, max_lag=4, collection_batch_size=50)
    with gated.playing(config, spec(100, lanes=2), snapshot(0)) as collector:
        gather(collector, 50)
        collector.publish(snapshot(1), 0)
        gated.gate.touch()
        from_lane_1: list[Any] = []
        while len(from_lane_1) < 2:
            from_lane_1 += [chunk for chunk in collector.collect(wait=True) if chunk.origin.worker == 1]
    # two rows and the one of the gated step, then no more of the old weights
    assert [(chunk.version, chunk.rows) for chunk in from_lane_1[:1]] == [(0, 3)]
    assert from_lane_1[1].version == 1


@pytest.mark.parametrize(
    ("option", "text"),
    [("max_lag", "--max-lag must not be"), ("patience", "--patience must"), ("max_queue_size", "--max-q")],
)
def test_invalid_options_are_refused(option: str, text: str) -> None:
    invalid: dict[str, Any] = {option: -1}
    with pytest.raises(UsageError, match=text):
        ContinuousConfig(**invalid)


@pytest.mark.parametrize(
    ("steps", "config", "fragment", "slots"),
    [
        (64, {}, 32, 7),  # half a batch, at most 32; three batches and one more
        (256, {}, 32, 25),
        (7, {}, 3, 8),
        (1, {}, 1, 4),
        (64, {"max_lag": 0}, 32, 3),
        (64, {"collection_batch_size": 10}, 10, 21),
        (64, {"max_queue_size": 40}, 32, 10),
        (64, {"max_queue_size": 1}, 32, 2),
    ],
)
def test_fragments_and_slots(spec: Spec, steps: int, config: dict[str, int], fragment: int, slots: int) -> None:
    size = ContinuousConfig(workers=4, envs_per_worker=1, num_envs=4, **config).size(spec(steps, lanes=4))  # type: ignore[arg-type]
    assert (size.workers, size.steps, size.slots) == (4, fragment, slots)


ASKED = "--collection-batch-size 512 steps x 128 envs"


@pytest.mark.parametrize(
    ("given", "steps", "notes"),
    [
        ({"collection_batch_size": 12}, 12, []),
        ({"collection_batch_size": 512}, 12,
         [f"{ASKED} would keep rows back: fragments have 12 steps, (--max-lag 2 + 1) x --num-steps-per-env 4"]),
        ({"max_queue_size": 20}, 2, []),
        ({"max_queue_size": 2000}, 2, ["--max-queue-size 2000 has no effect: --max-lag 2 lets no more than 56 fragments wait"]),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be_as_asked_say_so(given: dict[str, Any], steps: int, notes: list[str]) -> None:
    config = ContinuousConfig(workers=8, num_envs=128, **given)
    batch = BatchSpec(4, 128)
    assert config.size_notes(batch) == notes
    assert config.fragment_steps(batch) == steps


def in_turn(spec: CollectSpec, turns: int) -> CollectSpec:
    return replace(spec, workers=replace(spec.workers, turns=turns))


@pytest.mark.system
def test_a_few_workers_act_at_a_time_and_every_lane_gets_its_turns(
    factory: RunnerFactory, spec: Spec, snapshot: Weights
) -> None:
    config = ContinuousConfig(workers=6, envs_per_worker=1, num_envs=6, max_lag=100_000, collection_batch_size=4)
    with config.build(factory, in_turn(spec(8, lanes=6), 2)) as collector:
        collector.publish(snapshot(0), 0)
        first: list[Any] = []
        take_until(collector, first, lambda: len({chunk.origin.worker for chunk in first}) == 6)
        chunks: list[Any] = []
        take_until(collector, chunks, lambda: all(rows_of(chunks, worker) >= 80 for worker in range(6)))
        assert sum(version >= 0 for version in wire_of(collector).permits.pacing.announced()) <= 2
        assert collector.stats()["workers/turns"] == 2
    spent = np.sum([chunk.time for chunk in chunks], axis=0)
    assert spent[WORKER_TIME.index("wait-gate")] > spent[WORKER_TIME.index("wait-credit")]


def test_the_turn_of_a_worker_that_hangs_is_lent(
    gated: GatedLanes, spec: Spec, snapshot: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lane 0 waits at its gate before its first row; without its turn, lane 1 would never act."""
    monkeypatch.setattr(pool, "LEND", (0.05, 0.05))
    with replace(TWO, max_lag=1000).build(gated.factory, in_turn(spec(8, lanes=2), 1)) as collector:
        collector.publish(snapshot(0), 0)
        gated.gate.touch()
        chunks = gather(collector, 8)
        assert {chunk.origin.worker for chunk in chunks} == {1}
        gated.start.touch()
        take_until(collector, chunks, lambda: rows_of(chunks, 0) > 0)
        rows = collector.rows()
    assert rows.produced == rows.queued + rows.open + rows_of(chunks)
