"""Mode ray: workers are actors of a Ray cluster, on this machine or on many; otherwise as `continuous` or `episodes`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

from freewheel.collect import fragments
from freewheel.collect.mode import FRAGMENT, MOST_WAITING, Mode, PlannedWorkers, WorkersConfig, count, worker_cores
from freewheel.collect.whole_episodes import SLOTS, STEPS, WholeEpisodes, episode_queue
from freewheel.core import Auto, BatchSpec, Collector
from freewheel.errors import POSITIVE, Range, UsageError
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.rollout.probe import EnvCost
from freewheel.transport.pool import AsTheyCome, WorkerPool
from freewheel.transport.workers.wire import Size
from freewheel_ray.actors.cluster import Cluster, cluster_cpus, require_ray
from freewheel_ray.actors.wire import RayWire

LONGEST = 64  # steps of a fragment, by default: each costs a call
MAX_LAG = 2  # of fragments, by default
LEAST_CPUS = 0.01  # of a worker whose env waits


@dataclass(frozen=True)
class RayConfig(WorkersConfig):
    """Workers as actors of a Ray cluster; what they send and how old it may be is as in continuous, or in episodes."""

    unit: Literal["fragments", "episodes"] | Auto = "auto"
    """What the learner is given: fragments as they come, at most --max-lag versions old, or whole episodes as they end (auto:
    fragments, unless --episodes-per-update is given)."""
    collection_batch_size: Annotated[int | None, FRAGMENT] = None
    """Steps of each env in a fragment, the part that an actor sends at once: each costs a call (default:
    --num-steps-per-env, at most 64; of episodes 128)."""
    episodes_per_update: Annotated[int | None, Range(least=1, most=10**7)] = None
    """Learn from this many whole episodes at a time (default: from --num-steps-per-env × envs rows)."""
    max_lag: Annotated[int | None, Range(least=0, most=10**6)] = None
    """Updates that may lie between choosing an action and starting the update that learns from it: a hard bound (default: 2 for
    fragments; for whole episodes the lag is corrected, not bounded)."""
    patience: Annotated[float, POSITIVE] = 20.0
    """Mean steps after which the learner no longer waits for a step; what comes too late is dropped and counted."""
    address: str | None = None
    """Address of a running cluster, host:port, or auto for the one on this machine (default: a cluster of its own is started here
    and ended with the run)."""
    cpus_per_worker: Annotated[float | Auto, Range(least=0, most=10_000)] = "auto"
    """CPUs that Ray sets aside for a worker; it does not get more workers onto a machine than these allow (auto: 1 if the env
    computes, less if it waits, as measured)."""
    placement: Literal["spread", "pack"] = "spread"
    """Spread workers evenly over the nodes of the cluster, or fill one node after the other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unit == "fragments" and self.episodes_per_update is not None:
            raise UsageError("--episodes-per-update needs whole episodes: use --unit episodes, or leave it out")

    @property
    def whole_episodes(self) -> bool:
        return self.unit == "episodes" or (self.unit == "auto" and self.episodes_per_update is not None)

    def require(self) -> None:
        require_ray()

    @property
    def elsewhere(self) -> bool:
        return self.address is not None

    @property
    def needs_step_time(self) -> bool:
        return self.cpus_per_worker == "auto" or super().needs_step_time

    def useful_workers(self, cost: EnvCost) -> int:
        """As many as the cluster has CPUs for."""
        if self.address is None:
            return super().useful_workers(cost)
        cpus = cluster_cpus(self.address)
        return max(1, min(max(MOST_WAITING, int(cpus)), int(cpus / max(self._cpus(cost), LEAST_CPUS))))

    def _cpus(self, cost: EnvCost) -> float:
        if self.cpus_per_worker != "auto":
            return self.cpus_per_worker
        return 1.0 if cost.computes else max(LEAST_CPUS, round(worker_cores(cost), 2))

    def remarks(self, cost: EnvCost) -> list[str]:
        return [] if self.elsewhere else super().remarks(cost)

    def chosen(self, cost: EnvCost) -> PlannedWorkers:
        require_ray()
        workers, each, lanes = self._given()
        one = self.whole_episodes and each is None and (not workers or not lanes or workers == lanes)  # at a time
        return super(RayConfig, replace(self, envs_per_worker=1) if one else self).chosen(cost)

    def planned(self, cost: EnvCost) -> Self:
        whole, planned = self.whole_episodes, super().planned(cost)
        unit: Literal["fragments", "episodes"] = "episodes" if whole else "fragments"
        max_lag = self.max_lag if whole else self._bound
        return replace(planned, unit=unit, max_lag=max_lag, cpus_per_worker=self._cpus(cost))

    @property
    def _bound(self) -> int:
        """Of the lag of fragments."""
        return MAX_LAG if self.max_lag is None else self.max_lag

    @property
    def _cpus_known(self) -> float:
        """Of a worker; all of one until they are chosen."""
        return 1.0 if self.cpus_per_worker == "auto" else self.cpus_per_worker

    def fragment_steps(self, batch: BatchSpec) -> int:
        if self.whole_episodes:
            return self.collection_batch_size or STEPS
        return fragments.fragment_steps(batch, self._bound, self.collection_batch_size, min(LONGEST, batch.steps))

    def first_steps(self, batch: BatchSpec) -> int:
        return batch.steps if self.whole_episodes else self.fragment_steps(batch)

    def plan_line(self) -> str:
        workers, each = self.numbers
        where = f"the Ray cluster at {self.address}" if self.address else "a local Ray cluster"
        return f"{count(workers, 'actor')} x {count(each, 'env')}, {self._cpus_known:g} CPUs each, on {where}"

    def build(self, factory: RunnerFactory, spec: CollectSpec) -> Collector:
        if spec.env.batched_on_device:
            raise UsageError(f"{spec.env.name} steps all its lanes at once: use --mode continuous instead of ray")
        if spec.trace is not None:
            raise UsageError(
                "--trace draws worker processes of this machine: leave it out, or use another mode than ray"
            )
        require_ray()
        workers, steps = self.worker_count, self.fragment_steps(spec.batch)
        cluster = Cluster(self.address, workers=workers, cpus_per_worker=self._cpus_known, placement=self.placement)
        if self.whole_episodes:
            queue = episode_queue(
                factory, spec, workers=workers, steps=steps, episodes=self.episodes_per_update, max_lag=self.max_lag
            )
            wire = RayWire(factory, spec, queue, Size(workers=workers, slots=SLOTS, steps=steps), cluster)
            return WorkerPool(wire, WholeEpisodes(queue, spec), spec, self.patience)
        slots = fragments.slots(spec.batch, self._bound, steps)
        pacing = fragments.lag_bound(spec, workers=workers, steps=steps, first_steps=steps, max_lag=self._bound)
        wire = RayWire(factory, spec, pacing, Size(workers=workers, slots=slots, steps=steps), cluster)
        return WorkerPool(wire, AsTheyCome(), spec, self.patience)


_SUMMARY = "workers are Ray actors, here or on a cluster (--address); as continuous, or as episodes"
MODE = Mode(
    name="ray",
    config=RayConfig,
    summary=_SUMMARY,
    simulators=False,
    free_running=True,
    on_request=True,
    dependencies=("Ray",),
)
