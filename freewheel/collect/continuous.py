"""Mode continuous: workers act without pause on the newest weights while the learner trains without pause."""

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

LONGEST, SHORTEST = 32, 16  # bounds on the default steps of a fragment; the lower one needs an update of as many steps


@dataclass(frozen=True)
class ContinuousConfig(WorkersConfig):
    """Free-running workers; the learner trains on their rows, which are at most max_lag versions old."""

    collection_batch_size: Annotated[int | None, FRAGMENT] = None
    """Steps of each env in a fragment, the unit that a worker sends to the learner: steps × envs of the worker rows
    (default: half of --num-steps-per-env, between 16 and 32; at most (max_lag + 1) × --num-steps-per-env)."""
    max_queue_size: Annotated[int | None, Range(least=1, most=10**5)] = None
    """Fragments that may wait for the learner, over all workers (default: what max_lag allows; more has no effect)."""
    overflow: Literal["block", "drop-oldest"] = "block"
    """When the queue is full: workers wait, or the oldest fragment is dropped and counted."""
    max_lag: Annotated[int, Range(least=0, most=10**6)] = 2
    """Hard bound on the number of updates between choosing an action and starting the update that learns from it. For
    learners with a replay buffer it only limits how many batches of rows may be under way."""
    patience: Annotated[float, POSITIVE] = 20.0
    """Mean step times that the learner waits for one step; a row that arrives later is dropped and counted."""
    adapt: bool = False
    """Adjust during the run how many workers act at a time, how long fragments are and how many may wait, to keep the
    use of queue, GPU and CPU on target. Every change is reported with its reason, also in adapt.jsonl of the run."""
    adapt_patience: Annotated[int, Range(least=1, most=10**6)] = 5
    """With --adapt: metrics rows outside a target before a change, and between two changes."""

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
        """Return the largest number of fragments of one worker that can wait."""
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
