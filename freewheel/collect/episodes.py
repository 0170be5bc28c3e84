"""Mode episodes: each worker plays whole episodes under one version; the learner takes them as they end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from freewheel.collect.mode import ENVS, FRAGMENT, LANES, WORKERS, Mode, count
from freewheel.collect.whole_episodes import SLOTS, STEPS, WholeEpisodes, episode_queue
from freewheel.collect.workers import PlannedWorkers, WorkersConfig, divisor
from freewheel.core import Auto, BatchSpec, Collector
from freewheel.errors import POSITIVE, Range, UsageError
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.rollout.probe import EnvCost, usable_cores
from freewheel.transport.pool import WorkerPool
from freewheel.transport.shm.wire import SharedMemoryWire
from freewheel.transport.workers.wire import Size


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
    """Steps of a fragment, the unit in which a worker sends an episode."""
    max_lag: Annotated[int | None, Range(least=0, most=10**6)] = None
    """Largest lag of a row; the learner then waits for long episodes (default: the lag is corrected, not bounded)."""
    patience: Annotated[float, POSITIVE] = 20.0
    """With --max-lag: mean step times that one step may take; if it takes longer, the learner drops its episode."""
    adapt: bool = False
    """Adjust during the run how many workers act at a time, how long fragments are and how many may wait, to keep the
    use of queue, GPU and CPU on target. Every change is reported with its reason, also in adapt.jsonl of the run."""
    adapt_patience: Annotated[int, Range(least=1, most=10**6)] = 5
    """With --adapt: metrics rows outside a target before a change, and between two changes."""

    @property
    def whole_episodes(self) -> bool:
        return True

    def chosen(self, cost: EnvCost) -> PlannedWorkers:
        """Choose one env per worker; lanes that cost nothing share just enough workers to keep the cores busy."""
        workers, each, lanes = self._given()
        if not cost.batched:
            if each is None and workers and lanes and workers != lanes:
                what = f"a worker plays one episode at a time here, so {lanes} envs need as many workers"
                raise UsageError(
                    f"{what}; leave out --workers or --num-envs, or use --envs-per-worker {lanes // workers}"
                )
            return super(EpisodesConfig, replace(self, envs_per_worker=each or 1)).chosen(cost)
        lanes = lanes or (workers or 1) * (each or (1 if workers else self.episodes_per_update or ENVS))
        cores = usable_cores()
        processes = divisor(lanes, workers if workers and workers <= cores else max(1, cores - 1))
        return PlannedWorkers(processes, lanes // processes)

    def remarks(self, cost: EnvCost) -> list[str]:
        if not cost.batched:
            return super().remarks(cost)
        found = self.chosen(cost)
        if self.workers in ("auto", found.workers):
            return []
        places = f"{found.lanes} envs stand side by side in {count(found.workers, 'worker')}, not in {self.workers}"
        return [f"{places}: many of them cost little more than one"]

    def fragment_steps(self, batch: BatchSpec) -> int:
        return self.collection_batch_size

    def build(self, factory: RunnerFactory, spec: CollectSpec) -> Collector:
        if spec.env.batched_on_device:
            raise UsageError(f"{spec.env.name} steps all its lanes at once: use --mode continuous instead of episodes")
        workers, each = self.worker_count, self.episodes_per_update
        steps = max(self.collection_batch_size, STEPS) if self.adapt else self.collection_batch_size
        pacing = episode_queue(
            factory, spec, workers=workers, steps=steps, episodes=each, max_lag=self.max_lag, wave=self.wave
        )
        pacing.first_steps = self.collection_batch_size
        size = Size(workers=workers, slots=SLOTS, steps=steps)
        wire = SharedMemoryWire(factory, spec, pacing, size)
        return WorkerPool(wire, WholeEpisodes(pacing, spec), spec, self.patience)


_SUMMARY = "workers play whole episodes; the learner takes each as it ends"
MODE = Mode(
    name="episodes", config=EpisodesConfig, summary=_SUMMARY, simulators=False, free_running=True, dependencies=WORKERS
)
