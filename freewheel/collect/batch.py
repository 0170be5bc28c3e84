"""Mode batch: all envs collect batch k + 1 while the learner trains on batch k. The lag is 1; runs are repeatable."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

from freewheel.collect.mode import FRAGMENT, WORKERS, Mode
from freewheel.collect.workers import MOST_WAITING, WorkersConfig
from freewheel.core import BatchSpec, Collector
from freewheel.errors import Range
from freewheel.pacing.one_ahead import OneAhead
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.rollout.probe import EnvCost, usable_cores
from freewheel.transport.pool import WorkerPool
from freewheel.transport.shm.wire import SharedMemoryWire
from freewheel.transport.stream import SimulationCollector, simulation_wire
from freewheel.transport.wire import Fragment, Wire
from freewheel.transport.workers.wire import Size

WAITS, PER_CORE = 0.25, 16  # an env that keeps at most WAITS of a core busy gets up to PER_CORE workers per core


@dataclass(frozen=True)
class BatchConfig(WorkersConfig):
    """All envs collect batch k + 1 while the learner trains on batch k."""

    collection_batch_size: Annotated[int | None, FRAGMENT] = None
    """Steps of each env in a fragment, the unit that a worker sends (default and maximum: --num-steps-per-env)."""
    max_queue_size: Annotated[int, Range(least=1, most=10**5)] = 2
    """Batches that may be queued between workers and learner; more than 2 are never used."""

    def useful_workers(self, cost: EnvCost) -> int:
        """Return one of two distant numbers, so that repeated runs choose the same one: their results depend on it."""
        cores = usable_cores()
        if cost.duty > WAITS:
            return max(1, cores - 1) if cores > 2 else cores
        return min(max(MOST_WAITING, cores), PER_CORE * cores)

    def size_notes(self, batch: BatchSpec) -> list[str]:
        found = []
        if (self.collection_batch_size or 0) > batch.steps:
            asked = f"--collection-batch-size {self.collection_batch_size} is more than a batch has"
            found.append(f"{asked}: fragments have {batch.steps} steps (--num-steps-per-env)")
        if self.max_queue_size > 2:
            found.append(
                f"--max-queue-size {self.max_queue_size} has no effect: no more than 2 batches ever wait in mode batch"
            )
        return found

    def fragment_steps(self, batch: BatchSpec) -> int:
        return min(self.collection_batch_size or batch.steps, batch.steps)

    def build(self, factory: RunnerFactory, spec: CollectSpec) -> Collector:
        size = self.size(spec)
        workers = 1 if spec.env.batched_on_device else size.workers
        pacing = OneAhead(
            workers=workers,
            lanes=spec.env.lanes // workers,
            steps=size.steps,
            batch_steps=spec.batch.steps,
            last=spec.whole and spec.whole // spec.batch.rows,
        )
        assembly = WholeBatches(pacing, authors=size.workers, quota=spec.batch.rows // size.workers)
        if spec.env.batched_on_device:
            wire = simulation_wire(factory, spec, pacing, authors=size.workers, slots=size.slots, steps=size.steps)
            return SimulationCollector(wire, assembly, spec)
        return WorkerPool(SharedMemoryWire(factory, spec, pacing, size), assembly, spec)

    def size(self, spec: CollectSpec) -> Size:
        steps = self.fragment_steps(spec.batch)
        slots = min(2, self.max_queue_size) * -(-spec.batch.steps // steps)
        return Size(workers=self.worker_count, slots=slots, steps=steps)


class WholeBatches:
    """Delivers the next batch when it is complete, in the order of lanes. Implements Assembly."""

    takes_parts = gathers = hurried = False
    only_waited_for = True
    oldest = None  # there is no gate

    def __init__(self, pacing: OneAhead, *, authors: int, quota: int) -> None:
        self._pacing, self._quota = pacing, quota  # rows of each author in a batch
        self._waiting: list[deque[Fragment]] = [deque() for _ in range(authors)]
        self._received = [0] * authors  # rows of each author
        self._batch = 0  # number of the next batch to deliver

    def put(self, fragment: Fragment, *, late: bool) -> Iterable[tuple[Fragment, str]]:
        self._waiting[fragment.worker].append(fragment)
        self._received[fragment.worker] += fragment.rows
        return ()

    def ready(self) -> Iterable[Fragment]:
        if self._pacing.broken:
            return [fragments.popleft() for fragments in self._waiting for _ in range(len(fragments))]
        end = (self._batch + 1) * self._quota
        if min(self._received) < end:
            return ()
        self._batch += 1
        self._pacing.delivered += 1
        return [fragment for author in range(len(self._waiting)) for fragment in self._up_to(author, end)]

    def _up_to(self, author: int, end: int) -> Iterator[Fragment]:
        """An author's fragments up to its row number `end`."""
        waiting = self._waiting[author]
        rows = self._received[author] - sum(fragment.rows for fragment in waiting)
        while rows < end:
            fragment = waiting.popleft()
            rows += fragment.rows
            yield fragment

    @property
    def rows(self) -> int:
        return sum(fragment.rows for fragments in self._waiting for fragment in fragments)

    def wait(self, wire: Wire) -> None:
        """Nothing to decide."""


_SUMMARY = "workers collect the next batch during an update; repeatable"
MODE = Mode(name="batch", config=BatchConfig, summary=_SUMMARY, whole_batches=True, dependencies=WORKERS)
