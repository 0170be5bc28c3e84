"""continuous: workers that act all the time on the newest weights they may use; the learner overlaps with them for ever."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from freewheel.collect.mode import Mode
from freewheel.core import Chunk, Collector, RowCounts, Snapshot
from freewheel.errors import UsageError
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.transport.pool import Size, WorkerPool
from freewheel.transport.shm.credits import NOBODY, Credits
from freewheel.transport.stream import FreeRunning, simulate_beside
from freewheel.transport.workers import WorkersConfig


@dataclass(frozen=True)
class ContinuousConfig(WorkersConfig):
    """Free-running workers; the learner trains on what they bring, at most max_lag versions old."""

    collection_batch_size: int | None = None
    """Steps of a fragment (default: half of --num-steps-per-env, at most 32)."""
    max_queue_size: int | None = None
    """Fragments that may wait for the learner, over all workers (default: what max_lag allows)."""
    overflow: Literal["block", "drop-oldest"] = "block"
    """When the queue is full: workers wait, or the oldest fragment is dropped and counted."""
    max_lag: int = 2
    """Updates that may lie between choosing an action and starting the update that learns from it: a hard bound. For learners
    with a replay buffer it only says how many updates' worth of rows may be under way."""
    patience: float = 20.0
    """Mean steps after which the learner no longer waits for a step; if it comes too late, its row is dropped and counted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("collection_batch_size", "max_queue_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be positive, not {value}")
        if self.max_lag < 0 or self.patience <= 0:
            raise UsageError("--max-lag must not be negative and --patience must be positive")

    def build(self, recipe: RunnerFactory, spec: CollectSpec) -> Collector:
        if spec.env.batched_on_device:
            if self.overflow == "drop-oldest":
                raise UsageError(f"{spec.env.name} waits for the learner when the queue is full; leave out --overflow")
            size = self.size(spec)
            return simulate_beside(recipe, spec, FreeRunning(spec, self.max_lag, size.steps), size)
        return Continuous(recipe, spec, self)

    def size(self, spec: CollectSpec) -> Size:
        steps = self.collection_batch_size or max(1, min(32, spec.batch.steps // 2))
        allowed = -(-(self.max_lag + 1) * spec.batch.steps // steps) + 1
        slots = allowed if self.max_queue_size is None else max(2, self.max_queue_size // self.staff)
        return Size(self.staff, slots, steps, self.overflow == "drop-oldest")


class Continuous:
    """Implements core.Collector."""

    def __init__(self, recipe: RunnerFactory, spec: CollectSpec, config: ContinuousConfig) -> None:
        size = config.size(spec)
        self._credits = Credits(size.workers, spec.env.lanes // size.workers, size.steps, fresh=spec.on_policy)
        self.pool = WorkerPool(recipe, spec, self._credits, size)
        self._patience, self._max_lag = config.patience, config.max_lag if spec.on_policy else None
        self._allowance = (config.max_lag + 1) * spec.batch.rows
        self._done = self._granted = 0  # rows that the learner is through with; the limit of credits
        self._version = NOBODY
        self._expired: set[int] = set()  # workers whose open fragment is not waited for: the rest of it is dropped

    def __enter__(self) -> Self:
        self.pool.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.pool.__exit__(kind, error, tb)

    def publish(self, snapshot: Snapshot, done: int) -> None:
        self.pool.post(snapshot)
        self._version, self._done = snapshot.version, done
        self._granted = self._limit()
        self._credits.post(snapshot.version, self._granted)

    def collect(self, wait: bool) -> Sequence[Chunk]:
        """Waiting ends with a chunk, or when `oldest` has moved: a step that takes too long is no longer waited for."""
        oldest, chunks = self.oldest(), self._take()  # in this order: what is dropped while it is taken has moved it
        while wait and not chunks and self.oldest() == oldest:
            gated = self._blocks(oldest)
            self._credits.memory["gated"][0] = gated
            patience = self.pool.wait(self._patience, hurried=gated)
            chunks = self._take()
            if gated and not chunks:
                chunks = [chunk for worker in self._late(patience) for chunk in self._expire(worker)]
        return chunks

    def oldest(self) -> int | None:
        announced = self._credits.announced()  # before the queue: rows are queued before an announcement is cleared
        versions = [*announced[announced != NOBODY].tolist(), *self.pool.reader.queued_versions()]
        return min(versions, default=None)

    def rows(self) -> RowCounts:
        return self.pool.rows()

    def stats(self) -> Mapping[str, float | None]:
        return self.pool.stats()

    def messages(self) -> Sequence[str]:
        return self.pool.messages()

    def summary(self) -> Mapping[str, Any]:
        return self.pool.summary()

    def _limit(self) -> int:
        return self._allowance + self._done + self.pool.done

    def _take(self) -> list[Chunk]:
        chunks = []
        for fragment in self.pool.take():
            if fragment.worker in self._expired:
                self._expired.remove(fragment.worker)
                self.pool.drop(fragment, "stale")
            elif (chunk := self.pool.sign(fragment)) is not None:
                chunks.append(chunk)
        if self._limit() > self._granted:
            self._granted = self._limit()
            self._credits.allow(self._granted)
        return chunks

    def _blocks(self, version: int | None) -> bool:
        """Whether a row of this version, still under way, keeps the next update from being sealed."""
        return version is not None and self._max_lag is not None and version <= self._version - self._max_lag

    def _late(self, patience: float) -> list[int]:
        """Workers that keep the next update from being sealed, by a step that has used up its patience."""
        announced, old = self._credits.announced(), self.pool.heartbeats.age() > patience
        return [
            worker for worker in np.flatnonzero((announced != NOBODY) & old).tolist() if self._blocks(announced[worker])
        ]

    def _expire(self, worker: int) -> Iterator[Chunk]:
        """The finished rows of a worker's open fragment; what else comes of it will be dropped."""
        version = int(self._credits.memory["announced"][worker])
        fragment = self.pool.reader.take_open(worker)
        if fragment is None:  # it has just been closed
            return
        produced = self.pool.reader.account(worker).produced
        if self._credits.revoke(worker, version, produced):
            self._expired.add(worker)
        if (chunk := self.pool.sign(self.pool.book(fragment))) is not None:
            yield chunk


_SUMMARY = "workers act all the time; --max-lag bounds how old their weights may be"
MODE = Mode(name="continuous", config=ContinuousConfig, summary=_SUMMARY, free_running=True)
