"""Mode episodes: each worker plays whole episodes under one version; the learner takes them as they end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Self

import numpy as np

from freewheel.collect.mode import ENVS, FRAGMENT, LANES, WORKERS, Mode, WorkersConfig, count, divisor
from freewheel.core import Auto, BatchSpec, Collector, Transitions
from freewheel.errors import POSITIVE, Range, SetupError, UsageError
from freewheel.pacing.episode_queue import EpisodeOrder, EpisodeQueue
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.rollout.probe import EnvCost, usable_cores
from freewheel.transport.pool import WorkerPool
from freewheel.transport.shm.channel import COLUMNS
from freewheel.transport.shm.wire import SharedMemoryWire
from freewheel.transport.wire import Fragment, Wire
from freewheel.transport.workers.wire import Size

STEPS = 128  # of a fragment, by default
SLOTS = 4  # fragments of a worker that may wait; the learner's side joins them to episodes


@dataclass(frozen=True)
class EpisodesConfig(WorkersConfig):
    """Workers play whole episodes on their own; the learner takes them as they end."""

    envs_per_worker: Annotated[int | Auto, LANES] = "auto"
    """Episodes that a worker plays side by side; they must begin and end together (auto: one at a time, except where an
    environment steps many lanes at the cost of one)."""
    episodes_per_update: Annotated[int | None, Range(least=1, most=10**7)] = None
    """Learn from this many whole episodes at a time (default: from --num-steps-per-env × envs rows)."""
    wave: bool = False
    """Begin as many episodes as there are envs and wait for all of them: the barrier that this mode normally avoids."""
    collection_batch_size: Annotated[int, FRAGMENT] = STEPS
    """Steps of a fragment, the part of an episode that is sent at once."""
    max_lag: Annotated[int | None, Range(least=0, most=10**6)] = None
    """Largest lag of a row, which makes the learner wait for long episodes (default: the lag is corrected, not bounded)."""
    patience: Annotated[float, POSITIVE] = 20.0
    """With --max-lag: mean steps that one step may take; after that the learner does not wait for its episode and drops it."""
    adapt: bool = False
    """Change how many workers act at a time, the length of fragments and how many may wait while the run goes on, so that queue,
    GPU and CPU are used as they should be; every change is told with its reason, and is in adapt.jsonl of the run."""
    adapt_patience: Annotated[int, Range(least=1, most=10**6)] = 5
    """With --adapt: rows of metrics outside a target before a change, and between two changes."""

    def __post_init__(self) -> None:
        super().__post_init__()

    def planned(self, cost: EnvCost) -> Self:
        """One env a worker; lanes that cost nothing stand side by side in as few workers as keep the cores busy."""
        workers, each, lanes = self._given()
        if not cost.batched:
            if each is None and workers and lanes and workers != lanes:
                what = f"a worker plays one episode at a time here, so {lanes} envs need as many workers"
                raise UsageError(
                    f"{what}; leave out --workers or --num-envs, or use --envs-per-worker {lanes // workers}"
                )
            return super(EpisodesConfig, replace(self, envs_per_worker=each or 1)).planned(cost)
        lanes = lanes or (workers or 1) * (each or (1 if workers else self.episodes_per_update or ENVS))
        cores = usable_cores()
        processes = divisor(lanes, workers if workers and workers <= cores else max(1, cores - 1))
        return replace(self, workers=processes, envs_per_worker=lanes // processes, num_envs=lanes)

    def remarks(self, cost: EnvCost) -> list[str]:
        if not cost.batched:
            return super().remarks(cost)
        planned = self.planned(cost)
        if self.workers in ("auto", planned.workers):
            return []
        places = f"{planned.num_envs} envs stand side by side in {count(planned.worker_count, 'worker')}, not in {self.workers}"
        return [f"{places}: many of them cost little more than one"]

    def fragment_steps(self, batch: BatchSpec) -> int:
        return self.collection_batch_size

    def build(self, factory: RunnerFactory, spec: CollectSpec) -> Collector:
        if spec.env.batched_on_device:
            raise UsageError(f"{spec.env.name} steps all its lanes at once: use --mode continuous instead of episodes")
        workers, each = self.worker_count, self.episodes_per_update
        side_by_side = spec.env.lanes // workers
        steps = max(self.collection_batch_size, STEPS) if self.adapt else self.collection_batch_size
        pacing = EpisodeQueue(
            order=EpisodeOrder(factory.seed, spec.env.lanes, factory.first_lane),
            side_by_side=side_by_side,
            workers=workers,
            steps=steps,
            first_steps=self.collection_batch_size,
            batch_rows=spec.batch.rows,
            batch_episodes=each,
            max_lag=self.max_lag,
            wave=-(-(each or spec.env.lanes) // side_by_side) if self.wave else 0,
            turns=spec.workers.turns,
        )
        size = Size(workers=workers, slots=SLOTS, steps=steps)
        wire = SharedMemoryWire(factory, spec, pacing, size)
        return WorkerPool(wire, WholeEpisodes(pacing, spec.env.name), spec, self.patience)


class WholeEpisodes:
    """Joins fragments to episodes, those of a worker's envs side by side. Implements Assembly."""

    takes_parts, gathers, only_waited_for = False, True, False
    oldest = None  # a worker announces the version of its episode until the end is here

    def __init__(self, queue: EpisodeQueue, env: str) -> None:
        self._queue, self._env = queue, env
        self._parts: list[list[Fragment]] = [[] for _ in range(queue.workers)]  # of each worker's current episode
        self._ready: list[Fragment] = []
        self.hurried = bool(queue.wave)

    def put(self, fragment: Fragment, *, late: bool) -> Iterable[tuple[Fragment, str]]:
        parts = self._parts[fragment.worker]
        if parts and parts[0].incarnation != fragment.incarnation:
            yield from self._drop(parts, "worker_death")
        parts.append(fragment)
        if fragment.lost:
            self._queue.cut += 1
            yield from self._drop(parts, next(iter(fragment.lost)))
        elif fragment.episodes and late:
            self._queue.cut += 1
            yield from self._drop(parts, "stale")
        elif fragment.episodes:
            if len(fragment.episodes) != self._queue.side_by_side:
                remedy = "use --envs-per-worker 1, or --mode continuous"
                raise SetupError(
                    f"episodes of {self._env} do not all end together, as those side by side must; {remedy}"
                )
            whole = self._joined(parts)
            parts.clear()
            self._queue.finished += 1
            self._queue.finished_rows += whole.rows
            self._ready.append(whole)

    @staticmethod
    def _drop(parts: list[Fragment], cause: str) -> Iterator[tuple[Fragment, str]]:
        dropped = parts[:]
        parts.clear()
        yield from ((part, cause) for part in dropped)

    def _joined(self, parts: Sequence[Fragment]) -> Fragment:
        order, ended = self._queue.order, parts[-1].episodes
        episodes = [(episode, *order.episode(episode.number)) for episode in ended]
        data = parts[0].data if len(parts) == 1 else Transitions(
            *(np.concatenate([getattr(part.data, name) for part in parts]) for name in COLUMNS)
        )  # fmt: skip
        return parts[0]._replace(
            data=data,
            episodes=tuple(replace(episode, lane=lane, number=number) for episode, lane, number in episodes),
            rows=sum(part.rows for part in parts),
            time=np.sum([part.time for part in parts], axis=0),
        )

    def ready(self) -> Iterable[Fragment]:
        ready, self._ready = self._ready, []
        return ready

    @property
    def rows(self) -> int:
        return sum(part.rows for parts in self._parts for part in parts)

    def wait(self, wire: Wire) -> None:
        """Begin the next wave when the last one is over."""
        permits, queue = wire.permits, self._queue
        if queue.wave and permits.locked(queue.wave_is_over):
            permits.wake(permits.locked(queue.release))


_SUMMARY = "workers play whole episodes; the learner takes each as it ends"
MODE = Mode(
    name="episodes",
    config=EpisodesConfig,
    summary=_SUMMARY,
    simulators=False,
    free_running=True,
    whole_episodes=True,
    dependencies=WORKERS,
)
