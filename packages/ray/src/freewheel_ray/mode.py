"""Mode ray: like `continuous` or `episodes`, but the workers are actors of a Ray cluster on one machine or on many."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

from freewheel.collect import fragments
from freewheel.collect.mode import FRAGMENT, Mode, count
from freewheel.collect.whole_episodes import SLOTS, STEPS, WholeEpisodes, episode_queue
from freewheel.collect.workers import MOST_WAITING, PlannedWorkers, WorkersConfig, worker_cores
from freewheel.core import Auto, BatchSpec, Collector
from freewheel.errors import POSITIVE, Range, UsageError
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.rollout.probe import EnvCost
from freewheel.transport.pool import AsTheyCome, WorkerPool
from freewheel.transport.workers.wire import Size
from freewheel_ray.actors.cluster import Cluster, cluster_cpus, require_ray
from freewheel_ray.actors.wire import RayWire

LONGEST = 64  # default maximum of steps in a fragment; each fragment costs a call
MAX_LAG = 2  # default for fragments
LEAST_CPUS = 0.01  # for a worker whose env mostly waits


@dataclass(frozen=True)
class RayConfig(WorkersConfig):
    """Workers are actors of a Ray cluster. They send the same data as in mode continuous or episodes, with the same lag rules."""

    unit: Literal["fragments", "episodes"] | Auto = "auto"
    """What the learner receives: fragments as they arrive, at most --max-lag versions old, or whole episodes when they end (auto:
    fragments, unless --episodes-per-update is given)."""
    collection_batch_size: Annotated[int | None, FRAGMENT] = None
    """Steps of each env in a fragment, which an actor sends with one call (default: --num-steps-per-env, at most 64; 128 for
    whole episodes)."""
    episodes_per_update: Annotated[int | None, Range(least=1, most=10**7)] = None
    """Learn from this many whole episodes at a time (default: as many as give --num-steps-per-env × envs rows)."""
    max_lag: Annotated[int | None, Range(least=0, most=10**6)] = None
    """Upper bound on the updates between choosing an action and starting the update that learns from it (default: 2 for
    fragments; with whole episodes the lag is corrected instead of bounded)."""
    patience: Annotated[float, POSITIVE] = 20.0
    """The learner stops waiting for a step after this many mean step times. Rows that arrive later are dropped and counted."""
    address: str | None = None
    """Address of a running cluster as host:port, or auto for the one on this machine (default: the run starts a local cluster and
    ends it afterwards)."""
    cpus_per_worker: Annotated[float | Auto, Range(least=0, most=10_000)] = "auto"
    """CPUs that Ray reserves for each worker, which limits the workers on a machine (auto: 1 if the env computes, less if it
    waits, as measured)."""
    placement: Literal["spread", "pack"] = "spread"
    """spread: distribute workers evenly over the nodes of the cluster. pack: fill one node after the other."""

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
        """Return how many workers the CPUs of the cluster can serve."""
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
        # Each worker plays one episode at a time, unless the numbers say otherwise.
        one = self.whole_episodes and each is None and (not workers or not lanes or workers == lanes)
        return super(RayConfig, replace(self, envs_per_worker=1) if one else self).chosen(cost)

    def planned(self, cost: EnvCost) -> Self:
        whole, planned = self.whole_episodes, super().planned(cost)
        unit: Literal["fragments", "episodes"] = "episodes" if whole else "fragments"
        max_lag = self.max_lag if whole else self._bound
        return replace(planned, unit=unit, max_lag=max_lag, cpus_per_worker=self._cpus(cost))

    @property
    def _bound(self) -> int:
        """The bound on the lag of fragments."""
        return MAX_LAG if self.max_lag is None else self.max_lag

    @property
    def _cpus_known(self) -> float:
        """The CPUs of a worker. It is a whole one until the number is chosen."""
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
            raise UsageError(f"{spec.env.name} steps all its envs at once; use --mode continuous instead of ray")
        if spec.trace is not None:
            raise UsageError(
                "--trace records only worker processes of this machine; leave it out, or use a mode other than ray"
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


_SUMMARY = "workers are Ray actors, here or on a cluster (--address); otherwise like continuous or episodes"
MODE = Mode(
    name="ray",
    config=RayConfig,
    summary=_SUMMARY,
    simulators=False,
    free_running=True,
    on_request=True,
    dependencies=("Ray",),
)
