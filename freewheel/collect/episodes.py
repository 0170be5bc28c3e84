"""episodes: whole episodes from a pool that is kept busy, taken in the order in which they end; one version each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np

from freewheel.collect.mode import Mode
from freewheel.core import Chunk, Collector, RowCounts, Snapshot, Transitions
from freewheel.errors import UsageError
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.transport.pool import Size, WorkerPool
from freewheel.transport.shm.channel import COLUMNS, Fragment
from freewheel.transport.shm.tickets import NOBODY, EpisodeOrder, EpisodeQueue
from freewheel.transport.workers import Auto, WorkersConfig

SLOTS = 4  # fragments of a worker that may wait; an episode is put together on this side
AHEAD = 1  # updates' worth of finished episodes that may wait for the learner, where no lag was asked for


@dataclass(frozen=True)
class EpisodesConfig(WorkersConfig):
    """Workers play whole episodes on their own; the learner takes them as they end."""

    envs_per_worker: int | Auto = 1
    """A worker plays one episode at a time."""
    episodes_per_update: int | None = None
    """Learn from this many whole episodes at a time (default: from --num-steps-per-env × envs rows)."""
    wave: bool = False
    """Begin as many episodes as there are envs and wait for all of them: the barrier that this mode does without."""
    collection_batch_size: int = 128
    """Steps of an episode that travel together."""
    max_lag: int | None = None
    """Hold the lag of every row below this, at the price of waiting for long episodes (default: it is corrected, not bounded)."""
    patience: float = 20.0
    """With --max-lag: mean steps that one step may take before its episode is no longer waited for; then it is dropped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("episodes_per_update", "collection_batch_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be positive, not {value}")
        if (self.max_lag or 0) < 0 or self.patience <= 0:
            raise UsageError("--max-lag must not be negative and --patience must be positive")
        if self.envs_per_worker != 1:
            raise UsageError("in mode episodes every worker plays one episode at a time; leave out --envs-per-worker")

    def build(self, recipe: RunnerFactory, spec: CollectSpec) -> Collector:
        if spec.env.batched_on_device:
            raise UsageError(f"{spec.env.name} steps all its lanes at once: use --mode continuous instead of episodes")
        return Episodes(recipe, spec, self)


class Episodes:
    """Implements core.Collector."""

    def __init__(self, recipe: RunnerFactory, spec: CollectSpec, config: EpisodesConfig) -> None:
        self._draw = EpisodeOrder(recipe.seed, spec.env.lanes)
        steps, in_episodes = config.collection_batch_size, config.episodes_per_update is not None
        self._tickets = EpisodeQueue(config.staff, steps, self._draw, in_episodes=in_episodes)
        self.pool = WorkerPool(recipe, spec, self._tickets, Size(config.staff, SLOTS, steps))
        self._config, self._spec = config, spec
        self._parts: list[list[Fragment]] = [[] for _ in range(config.staff)]  # of the episode each worker plays
        self._expired: set[int] = set()  # workers whose episode is not waited for
        self._version, self._done, self._granted = NOBODY, 0, 0
        self._finished = self._finished_rows = self._cut = 0  # episodes delivered, their rows, episodes dropped
        self._wave = (config.episodes_per_update or config.staff) if config.wave else 0
        if self._wave:
            self._tickets.release(self._wave)

    def __enter__(self) -> Self:
        self.pool.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.pool.__exit__(kind, error, tb)

    def publish(self, snapshot: Snapshot, done: int) -> None:
        self.pool.post(snapshot)
        self._version, self._done = snapshot.version, done
        self._granted = self._limit()
        self._tickets.post(snapshot.version, self._granted, self._expected())

    def collect(self, wait: bool) -> Sequence[Chunk]:
        """Waiting ends with an episode, or when `oldest` has moved: one that takes too long is no longer waited for."""
        oldest, chunks = self.oldest(), self._take()  # in this order: what is dropped while it is taken has moved it
        while wait and not chunks and (self._config.max_lag is None or self.oldest() == oldest):
            if self._wave and self._tickets.wave_is_over():
                self._tickets.release(int(self._tickets.memory["wave"][0]) + self._wave)
            gated = self._blocks(oldest)
            self._tickets.memory["gated"][0] = gated
            patience = self.pool.wait(self._config.patience, hurried=gated or bool(self._wave))
            chunks = self._take()
            self._expire(patience)
        return chunks

    def oldest(self) -> int | None:
        announced = self._tickets.announced()  # before the queue: rows are queued before an announcement is cleared
        versions = [*announced[announced != NOBODY].tolist(), *self.pool.reader.queued_versions()]
        return min(versions, default=None)

    def rows(self) -> RowCounts:
        rows = self.pool.rows()
        held = sum(fragment.rows for parts in self._parts for fragment in parts)
        return replace(rows, queued=rows.queued + held)

    def stats(self) -> Mapping[str, float | None]:
        return self.pool.stats()

    def messages(self) -> Sequence[str]:
        return self.pool.messages()

    def summary(self) -> Mapping[str, Any]:
        return self.pool.summary()

    def _expected(self) -> int:
        """What an episode counts until it has ended: one, or the rows that it is likely to have."""
        if self._config.episodes_per_update:
            return 1
        return max(1, self._finished_rows // max(1, self._finished))

    def _limit(self) -> int:
        """An update's worth in training and `ahead` more waiting; without a bound on the lag, what is under way comes on top, so
        that nobody waits unless the learner is the slower one."""
        lag, each = self._config.max_lag, self._config.episodes_per_update
        ahead, under_way = (AHEAD, self._config.staff * self._expected()) if lag is None else (lag, 0)
        if each:
            return (ahead + 1 + max(self._version, 0)) * each + self._cut + under_way
        return (ahead + 1) * self._spec.batch.rows + self._done + self.pool.done + under_way

    def _take(self) -> list[Chunk]:
        chunks = [chunk for fragment in self.pool.take() for chunk in self._put(fragment)]
        if self._limit() > self._granted >= 0 and self._version != NOBODY:
            self._granted = self._limit()
            self._tickets.allow(self._granted)
        return chunks

    def _put(self, fragment: Fragment) -> Iterator[Chunk]:
        """Add a fragment to its episode; the episode, when that was its end."""
        parts = self._parts[fragment.worker]
        if parts and parts[0].incarnation != fragment.incarnation:
            self._drop(fragment.worker, "worker_death")
        parts.append(fragment)
        if fragment.lost:
            self._cut += 1
            self._drop(fragment.worker, next(iter(fragment.lost)))
        elif fragment.episodes:
            if fragment.worker in self._expired:
                self._cut += 1
                self._drop(fragment.worker, "stale")
                return
            whole = self._whole(parts)
            parts.clear()
            self._finished, self._finished_rows = self._finished + 1, self._finished_rows + whole.rows
            if (chunk := self.pool.sign(whole)) is not None:
                yield chunk

    def _whole(self, parts: Sequence[Fragment]) -> Fragment:
        lane, number = self._draw.episode(parts[-1].episodes[0].number)
        data = parts[0].data if len(parts) == 1 else Transitions(
            *(np.concatenate([getattr(part.data, name) for part in parts]) for name in COLUMNS)
        )  # fmt: skip
        return parts[0]._replace(
            data=data,
            episodes=(replace(parts[-1].episodes[0], lane=lane, number=number),),
            rows=sum(part.rows for part in parts),
            time=np.sum([part.time for part in parts], axis=0),
        )

    def _drop(self, worker: int, cause: str) -> None:
        for part in self._parts[worker]:
            self.pool.drop(part, cause)
        self._parts[worker].clear()
        self._expired.discard(worker)

    def _blocks(self, version: int | None) -> bool:
        """Whether a row of this version, still under way, keeps the next update from being sealed."""
        limit = self._config.max_lag
        return version is not None and limit is not None and version <= self._version - limit

    def _expire(self, patience: float) -> None:
        """Give up waiting for episodes that keep the next update from being sealed by a step that has used up its patience."""
        if self._config.max_lag is None:
            return
        announced = self._tickets.announced()
        blocking = (announced != NOBODY) & (announced <= self._version - self._config.max_lag)
        late = np.flatnonzero(blocking & (self.pool.heartbeats.age() > patience)).tolist()
        self._expired.update(worker for worker in late if self._tickets.revoke(worker, int(announced[worker])))


_SUMMARY = "workers play whole episodes; the learner takes each as it ends"
MODE = Mode(name="episodes", config=EpisodesConfig, summary=_SUMMARY, simulators=False, free_running=True)
