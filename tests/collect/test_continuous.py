"""continuous: credits, the gate, patience, and what an update may learn from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from freewheel.collect.continuous import ContinuousConfig
from freewheel.core import Collector, Snapshot
from freewheel.envs.gym import GymConfig
from freewheel.errors import UsageError
from freewheel.policies.numpy_actor import make_actor
from freewheel.policies.spec import PolicySpec
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.seeding import training_episodes
from freewheel.testing.worlds import Drifting
from tests.support.pools import wire_of

Weights = Callable[[int], Snapshot]
LIMIT = 20.0  # seconds for anything that should happen at once


class Gated(Drifting):
    """Waits where `gates` says (seed: step, file) until that file exists."""

    def __init__(self, gates: dict[int, tuple[int, str]]) -> None:
        super().__init__(n=4, length=5)
        self.gates = gates

    def judge(self, action: Any) -> float:
        step, file = self.gates.get(self.seed, (-1, ""))
        deadline = time.monotonic() + LIMIT
        while step == self.count and not Path(file).exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        return super().judge(action)


class Stage:
    """Two workers of one lane: lane 0 waits in its first step, lane 1 in its third."""

    def __init__(self, folder: Path, policy: PolicySpec) -> None:
        self.start, self.gate = folder / "start", folder / "gate"
        first, second = (training_episodes(3, lane).seed(0) for lane in range(2))
        gates = {first: (0, str(self.start)), second: (2, str(self.gate))}
        world = GymConfig(id="Gated", args={"gates": gates}, factory=Gated)
        self._recipe = RunnerFactory(world.make, make_actor(policy), seed=3)

    @contextmanager
    def playing(self, config: ContinuousConfig, job: CollectSpec, first: Snapshot) -> Iterator[Collector]:
        """Until lane 1 is at its gate; then lane 0 is let go."""
        with config.build(self._recipe, job) as collector:
            collector.publish(first, 0)
            deadline = time.monotonic() + LIMIT
            while wire_of(collector).heartbeats.memory["steps"][1] < 2 and time.monotonic() < deadline:
                time.sleep(0.001)
            self.start.touch()
            yield collector


@pytest.fixture
def stage(tmp_path: Path, policy: PolicySpec) -> Stage:
    return Stage(tmp_path, policy)


def gather(collector: Collector, rows: int) -> list[Any]:
    """Chunks until they hold so many rows."""
    chunks: list[Any] = []
    while sum(chunk.rows for chunk in chunks) < rows:
        chunks += collector.collect(wait=True)
    return chunks


TWO = ContinuousConfig(workers=2, envs_per_worker=1, num_envs=2, max_lag=1, collection_batch_size=4)


def test_workers_stop_where_the_credits_end(
    recipe: RunnerFactory, snapshot: Weights, job: Callable[..., CollectSpec]
) -> None:
    """(max_lag + 1) × S rows and not one more, until the learner is through with some."""
    with TWO.build(recipe, job(8, lanes=2)) as collector:
        collector.publish(snapshot(0), 0)
        chunks = gather(collector, 32)
        assert sum(chunk.rows for chunk in chunks) == collector.rows().produced == 32
        assert collector.oldest() is None
        collector.publish(snapshot(1), 16)
        chunks = gather(collector, 16)
        assert {chunk.version for chunk in chunks} == {1}
        assert collector.rows().produced == 48


def test_a_step_that_lasts_is_waited_for_then_passed_over_and_its_row_dropped(
    stage: Stage, snapshot: Weights, job: Callable[..., CollectSpec]
) -> None:
    """The rows it had finished are taken from its open fragment; only the one it was stepping comes too late."""
    config = ContinuousConfig(
        workers=2, envs_per_worker=1, num_envs=2, max_lag=0, collection_batch_size=4, patience=1.0
    )
    with stage.playing(config, job(8, lanes=2), snapshot(0)) as collector:
        chunks = gather(collector, 16)  # lane 0 fills what lane 1 was to write
        from_held = [chunk for chunk in chunks if chunk.origin.worker == 1]
        assert sum(chunk.rows for chunk in from_held) == 2
        assert collector.oldest() is None, "nobody waits for it any more"
        collector.publish(snapshot(1), 16)
        stage.gate.touch()
        chunks = gather(collector, 16)
        assert {chunk.version for chunk in chunks} == {1}
        deadline = time.monotonic() + 20.0
        while not collector.rows().dropped and time.monotonic() < deadline:  # lane 0 may have written all of them
            time.sleep(0.001)
            chunks += collector.collect(wait=False)
        assert collector.rows().dropped == {"stale": 1}
        for version in range(2, 100):
            if late := [chunk for chunk in chunks if chunk.origin.worker == 1]:
                break
            collector.publish(snapshot(version), 16 * version)
            chunks += gather(collector, 16)
        assert late
        assert all(chunk.origin.sequence > from_held[-1].origin.sequence + 1 for chunk in late), "no joint over the gap"


def test_within_its_patience_a_step_holds_the_gate(
    stage: Stage, snapshot: Weights, job: Callable[..., CollectSpec]
) -> None:
    config = ContinuousConfig(
        workers=2, envs_per_worker=1, num_envs=2, max_lag=0, collection_batch_size=4, patience=1e9
    )
    with stage.playing(config, job(8, lanes=2), snapshot(0)) as collector:
        chunks = gather(collector, 12)  # lane 1 holds a fragment of four
        assert collector.oldest() == 0
        stage.gate.touch()
        chunks += gather(collector, 4)
        assert sum(chunk.rows for chunk in chunks) == 16
        while collector.oldest() is not None:
            assert collector.collect(wait=True) == []
        assert collector.rows().dropped == {}


def test_new_weights_close_a_fragment(stage: Stage, snapshot: Weights, job: Callable[..., CollectSpec]) -> None:
    config = ContinuousConfig(workers=2, envs_per_worker=1, num_envs=2, max_lag=4, collection_batch_size=50)
    with stage.playing(config, job(100, lanes=2), snapshot(0)) as collector:
        gather(collector, 50)
        collector.publish(snapshot(1), 0)
        stage.gate.touch()
        held: list[Any] = []
        while len(held) < 2:
            held += [chunk for chunk in collector.collect(wait=True) if chunk.origin.worker == 1]
    assert (held[0].version, held[0].rows) == (0, 3), "two rows, the one that was held, and no more of the old weights"
    assert held[1].version == 1


def test_what_can_be_set() -> None:
    with pytest.raises(UsageError, match="--max-lag must not be negative"):
        ContinuousConfig(max_lag=-1)
    with pytest.raises(UsageError, match="--patience must be positive"):
        ContinuousConfig(patience=0)
    with pytest.raises(UsageError, match="--max-queue-size must be positive"):
        ContinuousConfig(max_queue_size=0)


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
def test_fragments_and_slots(
    job: Callable[..., CollectSpec], steps: int, config: dict[str, int], fragment: int, slots: int
) -> None:
    size = ContinuousConfig(workers=4, envs_per_worker=1, num_envs=4, **config).size(job(steps, lanes=4))  # type: ignore[arg-type]
    assert (size.workers, size.steps, size.slots) == (4, fragment, slots)
