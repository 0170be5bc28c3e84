"""Mode continuous: workers act all the time on the newest weights, and the learner trains all the time beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from freewheel.collect import fragments
from freewheel.collect.mode import FRAGMENT, WORKERS, Mode
from freewheel.collect.workers import WorkersConfig
from freewheel.core import BatchSpec, Collector
from freewheel.errors import POSITIVE, Range, UsageError
from freewheel.pacing.lag_bound import LagBound
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.transport.pool import AsTheyCome, WorkerPool
from freewheel.transport.shm.wire import SharedMemoryWire
from freewheel.transport.stream import SimulationCollector, simulation_wire
from freewheel.transport.workers.wire import Size

LONGEST, SHORTEST = 32, 16  # steps of a fragment by default, if an update has so many


@dataclass(frozen=True)
class ContinuousConfig(WorkersConfig):
    """Free-running workers; the learner trains on their rows, which are at most max_lag versions old."""

    collection_batch_size: Annotated[int | None, FRAGMENT] = None
    """Steps of each env in a fragment, the part that a worker sends to the learner at once: so many × envs of the worker rows
    (default: half of --num-steps-per-env, between 16 and 32). Never more than max_lag lets be under way."""
    max_queue_size: Annotated[int | None, Range(least=1, most=10**5)] = None
    """Fragments that may wait for the learner, over all workers (default: as many as max_lag allows, and more have no effect)."""
    overflow: Literal["block", "drop-oldest"] = "block"
    """When the queue is full: workers wait, or the oldest fragment is dropped and counted."""
    max_lag: Annotated[int, Range(least=0, most=10**6)] = 2
    """Updates that may lie between choosing an action and starting the update that learns from it: a hard bound. For learners
    with a replay buffer it only limits how many batches of rows may be under way."""
    patience: Annotated[float, POSITIVE] = 20.0
    """Mean steps after which the learner no longer waits for a step; if it comes too late, its row is dropped and counted."""
    adapt: bool = False
    """Change how many workers act at a time, the length of fragments and how many may wait while the run goes on, so that queue,
    GPU and CPU are used as they should be; every change is told with its reason, and is in adapt.jsonl of the run."""
    adapt_patience: Annotated[int, Range(least=1, most=10**6)] = 5
    """With --adapt: rows of metrics outside a target before a change, and between two changes."""

    def build(self, factory: RunnerFactory, spec: CollectSpec) -> Collector:
        size = self.size(spec)
        if spec.env.batched_on_device:
            if self.adapt:
                raise UsageError(
                    f"--adapt is for worker processes, and {spec.env.name} steps all its lanes at once; leave it out"
                )
            if self.overflow == "drop-oldest":
                raise UsageError(f"{spec.env.name} waits for the learner when the queue is full; leave out --overflow")
            pacing = self._pacing(spec, size, workers=1)
            wire = simulation_wire(factory, spec, pacing, authors=size.workers, slots=size.slots, steps=size.steps)
            return SimulationCollector(wire, AsTheyCome(), spec)
        pacing = self._pacing(spec, size, workers=size.workers)
        return WorkerPool(SharedMemoryWire(factory, spec, pacing, size), AsTheyCome(), spec, self.patience)

    def size(self, spec: CollectSpec) -> Size:
        steps, allowed = self.fragment_steps(spec.batch), self._allowed(spec.batch)
        if self.adapt:  # room for longer fragments
            steps = min(max(steps, spec.batch.steps), fragments.under_way(spec.batch, self.max_lag))
        slots = allowed if self.max_queue_size is None else max(2, self.max_queue_size // self.worker_count)
        return Size(workers=self.worker_count, slots=slots, steps=steps, drop_oldest=self.overflow == "drop-oldest")

    def fragment_steps(self, batch: BatchSpec) -> int:
        """Steps of each env in a fragment."""
        usual = min(LONGEST, max(batch.steps // 2, SHORTEST if batch.steps >= SHORTEST else 1))
        return fragments.fragment_steps(batch, self.max_lag, self.collection_batch_size, usual)

    def first_steps(self, batch: BatchSpec) -> int:
        return self.fragment_steps(batch)

    def _allowed(self, batch: BatchSpec) -> int:
        """Fragments of a worker that can ever wait."""
        return fragments.slots(batch, self.max_lag, self.fragment_steps(batch))

    def size_notes(self, batch: BatchSpec) -> list[str]:
        found, most = [], self._allowed(batch) * self.worker_count
        if (self.collection_batch_size or 0) > fragments.under_way(batch, self.max_lag):
            asked = f"--collection-batch-size {self.collection_batch_size} steps x {batch.lanes} envs"
            bound = f"(--max-lag {self.max_lag} + 1) x --num-steps-per-env {batch.steps}"
            found.append(f"{asked} would keep rows back: fragments have {self.fragment_steps(batch)} steps, {bound}")
        if (self.max_queue_size or 0) > most:
            reason = f"--max-lag {self.max_lag} lets no more than {most} fragments wait"
            found.append(f"--max-queue-size {self.max_queue_size} has no effect: {reason}")
        return found

    def _pacing(self, spec: CollectSpec, size: Size, workers: int) -> LagBound:
        first = self.fragment_steps(spec.batch)
        return fragments.lag_bound(spec, workers=workers, steps=size.steps, first_steps=first, max_lag=self.max_lag)


_SUMMARY = "workers act all the time; --max-lag bounds how old their weights may be"
MODE = Mode(name="continuous", config=ContinuousConfig, summary=_SUMMARY, free_running=True, dependencies=WORKERS)
