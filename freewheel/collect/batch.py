"""batch: all envs collect batch k + 1 while the learner trains on batch k; lag exactly 1, repeatable bit for bit."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from freewheel.collect.mode import Mode
from freewheel.core import Chunk, Collector, RowCounts, SeedStream, Snapshot
from freewheel.errors import UsageError
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.transport.pool import LOOK, Size, WorkerPool
from freewheel.transport.shm.channel import Tally
from freewheel.transport.shm.lock import ProcessLock
from freewheel.transport.shm.memory import SharedArrays
from freewheel.transport.shm.wakeup import Wakeups
from freewheel.transport.shm.worker import Grant
from freewheel.transport.stream import OneAhead, simulate_beside
from freewheel.transport.workers import WorkersConfig

NONE = -1


@dataclass(frozen=True)
class BatchConfig(WorkersConfig):
    """Batch k + 1 from all envs while the learner trains on batch k."""

    collection_batch_size: int | None = None
    """Steps of a fragment (default: all of --num-steps-per-env)."""
    max_queue_size: int = 2
    """Batches that there is room for between workers and learner; one batch ahead never takes more than 2."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("collection_batch_size", "max_queue_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be positive, not {value}")

    def build(self, recipe: RunnerFactory, spec: CollectSpec) -> Collector:
        if spec.env.batched_on_device:
            size = self.size(spec)
            return simulate_beside(recipe, spec, OneAhead(spec, size.steps), size)
        return Batch(recipe, spec, self)

    def size(self, spec: CollectSpec) -> Size:
        steps = min(self.collection_batch_size or spec.batch.steps, spec.batch.steps)
        return Size(self.staff, min(2, self.max_queue_size) * -(-spec.batch.steps // steps), steps)


class Releases:
    """Leave to collect one batch ahead. Batch k is acted with version k - 1, the newest that is sure to be there for all: who
    has finished its share of batch k - 1 goes on as soon as version k - 1 is posted, whatever the others do."""

    lock: ProcessLock | None = None
    gated = False  # batches are handed over in order: there is no gate

    def __init__(self, workers: int, lanes: int, spec: CollectSpec, steps: int) -> None:
        each = ((workers,), "i8")
        self._memory = SharedArrays(
            {"target": each, "waiting": each, "posted": ((1,), "i8"), "broken": ((1,), "i8"), "gone": each}
        )
        self._memory["posted"][0] = NONE
        self.wakeups = Wakeups(workers)
        self._lanes, self._steps, self.quota = lanes, steps, spec.batch.steps * lanes  # rows a worker gives to a batch

    @property
    def broken(self) -> bool:
        """A worker is gone for good: the others fill its place, as best they can."""
        return bool(self._memory["broken"][0])

    def post(self, version: int) -> None:
        """Version v lets everyone write up to the end of batch v + 1."""
        self._memory["posted"][0] = version
        self._allot()

    def _allot(self) -> None:
        """Share out what all batches up to posted + 1 take over those who are still there."""
        target, here = self._memory["target"], self._memory["gone"] == 0
        missing = (int(self._memory["posted"][0]) + 2) * self.quota * len(target) - int(target.sum())
        steps = -(-missing // self._lanes)
        share, extra = divmod(steps, max(1, int(here.sum())))
        target[here] += self._lanes * (share + (np.arange(here.sum()) < extra))
        waiting = np.flatnonzero(self._memory["waiting"].copy())  # which workers may write to meanwhile
        self._memory["waiting"][waiting] = 0
        self.wakeups.notify(waiting.tolist())

    def settle(self, worker: int, tally: Tally, *, for_good: bool) -> None:
        self._memory["waiting"][worker] = 0
        if for_good:
            self._memory["gone"][worker] = self._memory["broken"][0] = 1
            self._memory["target"][worker] = tally.produced - tally.failed
            self._allot()

    def take(self, worker: int, tally: Tally) -> Grant | None:
        memory, rows = self._memory, tally.produced - tally.failed
        memory["waiting"][worker] = 1  # before it looks: whoever posts after that will wake it
        if rows >= memory["target"][worker] or memory["posted"][0] == NONE:
            return None
        memory["waiting"][worker] = 0
        if self.broken:
            return Grant(self._fit(int(memory["target"][worker]) - rows), int(memory["posted"][0]))
        batch = rows // self.quota
        return Grant(self._fit((batch + 1) * self.quota - rows), max(batch - 1, 0), exact=True)

    def _fit(self, rows: int) -> int:
        return min(self._steps, -(-rows // self._lanes))

    def over(self, worker: int, version: int, ended: bool) -> bool:
        return False

    def give_back(self, worker: int, tally: Tally) -> None:
        """Nothing was reserved."""

    def streams(self, worker: int) -> Sequence[SeedStream]:
        return ()

    def close(self) -> None:
        self._memory.close()
        self.wakeups.close()


class Batch:
    """Implements core.Collector."""

    def __init__(self, recipe: RunnerFactory, spec: CollectSpec, config: BatchConfig) -> None:
        size = config.size(spec)
        self._releases = Releases(size.workers, spec.env.lanes // size.workers, spec, size.steps)
        self.pool = WorkerPool(recipe, spec, self._releases, size)
        self._waiting: list[deque[Chunk]] = [deque() for _ in range(size.workers)]
        self._came = np.zeros(size.workers, np.int64)  # rows, by worker
        self._batch = 0  # the next to be handed over

    def __enter__(self) -> Self:
        self.pool.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.pool.__exit__(kind, error, tb)

    def publish(self, snapshot: Snapshot, done: int) -> None:
        self.pool.post(snapshot)
        self._releases.post(snapshot.version)

    def collect(self, wait: bool) -> Sequence[Chunk]:
        """The next batch when it is whole, in the order of lanes."""
        chunks = self._whole_batch()
        while wait and not chunks:
            self.pool.listen(LOOK)
            chunks = self._whole_batch()
        return chunks

    def oldest(self) -> int | None:
        return None  # batches are handed over whole and in order: there is nothing to wait for

    def rows(self) -> RowCounts:
        rows = self.pool.rows()
        held = sum(chunk.rows for chunks in self._waiting for chunk in chunks)
        return RowCounts(rows.produced, rows.trained, rows.queued + held, rows.open, rows.dropped)

    def stats(self) -> Mapping[str, float | None]:
        return self.pool.stats()

    def messages(self) -> Sequence[str]:
        return self.pool.messages()

    def summary(self) -> Mapping[str, Any]:
        return self.pool.summary()

    def _whole_batch(self) -> list[Chunk]:
        for fragment in self.pool.take():
            if (chunk := self.pool.sign(fragment)) is not None:
                self._waiting[fragment.worker].append(chunk)
                self._came[fragment.worker] += chunk.rows
        end = (self._batch + 1) * self._releases.quota
        if self._releases.broken:
            return [chunks.popleft() for chunks in self._waiting for _ in range(len(chunks))]
        if (self._came < end).any():
            return []
        self._batch += 1
        return [chunk for worker in range(len(self._waiting)) for chunk in self._up_to(worker, end)]

    def _up_to(self, worker: int, end: int) -> list[Chunk]:
        """A worker's chunks until they make `end` rows since the start."""
        chunks, waiting = [], self._waiting[worker]
        came = int(self._came[worker]) - sum(chunk.rows for chunk in waiting)
        while came < end:
            chunks.append(waiting.popleft())
            came += chunks[-1].rows
        return chunks


_SUMMARY = "workers collect the next batch during an update; repeatable"
MODE = Mode(name="batch", config=BatchConfig, summary=_SUMMARY, whole_batches=True)
