"""Modes of collection: what each must provide, the registry of all of them, and how many workers there are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, Self

from freewheel.core import Auto, Collector
from freewheel.errors import UsageError, require_positive
from freewheel.registry import Registry
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.rollout.probe import EnvCost, usable_cores


class ModeConfig(Protocol):
    """The options of a mode: a frozen dataclass that builds the Collector."""

    @property
    def lanes(self) -> int: ...  # of all workers; known after `planned`

    episodes_per_update: int | None = None  # learn from so many whole episodes; None: from S rows
    max_lag: int | None = None  # rows that are older are never learned from; None: no bound

    def planned(self, cost: EnvCost) -> Self: ...  # the same with every number that was "auto" chosen
    def build(self, recipe: RunnerFactory, spec: CollectSpec) -> Collector: ...

    def plan_line(self) -> str:
        """What acts, in one line for the user."""
        return f"{self.lanes} envs"


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A mode of collection."""

    name: str
    config: type[ModeConfig]
    summary: str  # one line for the help of --mode
    simulators: bool = True  # it can collect from a simulator that steps all lanes at once
    whole_batches: bool = False  # every update gets exactly one batch: the policy must be published after each
    free_running: bool = False  # workers never wait for each other or for an update


MODES: Registry[Mode] = Registry("mode", "MODE", "freewheel.collect")

ENVS = 8  # default number of environments
CHEAP = 25e-6  # seconds: one worker with shorter steps than this is faster than the learner
MOST_WORKERS = 256  # upper limit of a planned number


@dataclass(frozen=True)
class WorkersConfig(ModeConfig):
    """Workers, each with its own environments."""

    workers: int | Auto = "auto"
    """Worker processes (also --num-collectors, --n-workers); auto: as many as the cores and the measured step time suggest."""
    envs_per_worker: int | Auto = "auto"
    """Environments of a worker, stepped in turn."""
    num_envs: int | Auto = "auto"
    """Lanes: environments over all workers."""

    def __post_init__(self) -> None:
        workers, each, lanes = self._given()
        require_positive(workers=workers, envs_per_worker=each, num_envs=lanes)
        if workers and lanes and lanes % workers:
            possible = lanes // workers * workers or workers
            raise UsageError(f"{lanes} envs cannot be divided evenly over {workers} workers; use --num-envs {possible}")
        if each and lanes and lanes % each:
            raise UsageError(f"--num-envs {lanes} is not a multiple of --envs-per-worker {each}")
        if workers and each and lanes and workers * each != lanes:
            raise UsageError(f"{workers} workers x {each} envs are not {lanes} envs; leave one of the three out")

    def _given(self) -> tuple[int | None, int | None, int | None]:
        """Workers, envs of each, and all envs; None where not given."""
        workers, each, lanes = (
            None if value == "auto" else value for value in (self.workers, self.envs_per_worker, self.num_envs)
        )
        return workers, each, lanes

    @property
    def worker_count(self) -> int:
        """Number of workers, after planning."""
        assert self.workers != "auto", "call planned() first"
        return self.workers

    def planned(self, cost: EnvCost) -> Self:
        """The same with every number chosen."""
        workers, each, lanes = self._given()
        if workers is None:
            useful = useful_workers(cost)
            lanes = lanes or useful * (each or -(-ENVS // useful))
            workers = lanes // each if each else _divisor(lanes, useful)
        each = each or (lanes // workers if lanes else max(1, ENVS // workers))
        return replace(self, workers=workers, envs_per_worker=each, num_envs=workers * each)

    @property
    def lanes(self) -> int:
        """Number of environments, after planning."""
        assert self.num_envs != "auto", "call planned() first"
        return self.num_envs

    def plan_line(self) -> str:
        """The plan in one line, for the user."""
        cores = usable_cores()
        shares = "the learner shares them" + (" at lower priority" if self.worker_count > cores else "")
        learner = "the learner has a core" if self.worker_count < cores else shares
        return f"{self.worker_count} workers x {self.envs_per_worker} envs, a thread each, on {cores} cores; {learner}"


def useful_workers(cost: EnvCost) -> int:
    """How many workers keep the cores busy: more than cores if steps sleep, one less than cores if the learner can have a core
    of its own or will be slower anyway."""
    cores = usable_cores()
    duty = min(1.0, max(cost.duty, 1 / MOST_WORKERS))
    if duty > 0.5:
        return max(1, cores - 1) if cores > 2 or cost.cpu < CHEAP else cores
    return min(MOST_WORKERS, round(cores / duty))


def _divisor(lanes: int, wanted: int) -> int:
    """The largest number of workers up to `wanted` that divides the lanes evenly."""
    return next(workers for workers in range(min(lanes, wanted), 0, -1) if lanes % workers == 0)
