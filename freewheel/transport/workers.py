"""Staff: how many workers run how many envs each on this machine, given or planned."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Self

from freewheel.core import EnvSpec
from freewheel.errors import UsageError
from freewheel.rollout.factory import MakeEnv, Timeouts
from freewheel.rollout.probe import StepCost, step_cost, usable_cores
from freewheel.transport.executors import call_in_process

Auto = Literal["auto"]
ENVS = 8  # where nothing is said
CHEAP = 25e-6  # seconds of a step that one worker brings faster than a learner can use it
CROWD = 256  # workers at most, where none are asked for


@dataclass(frozen=True)
class WorkersConfig:
    """Workers, each with envs of its own."""

    workers: int | Auto = "auto"
    """Worker processes (also --num-collectors, --n-workers); auto: as many as the cores and the measured step time suggest."""
    envs_per_worker: int | Auto = "auto"
    """Environments of a worker, stepped in turn."""
    num_envs: int | Auto = "auto"
    """Lanes: environments over all workers."""

    def __post_init__(self) -> None:
        require_positive(self, "workers", "envs_per_worker", "num_envs")
        workers, each, lanes = self._given()
        if workers and lanes and lanes % workers:
            possible = lanes // workers * workers or workers
            raise UsageError(f"{lanes} envs do not share out over {workers} workers; use --num-envs {possible}")
        if each and lanes and lanes % each:
            raise UsageError(f"--num-envs {lanes} is no multiple of --envs-per-worker {each}")
        if workers and each and lanes and workers * each != lanes:
            raise UsageError(f"{workers} workers x {each} envs are not {lanes} envs; leave one of the three out")

    def _given(self) -> tuple[int | None, int | None, int | None]:
        """Workers, envs of each, and all envs, as far as they were said."""
        workers, each, lanes = (
            None if value == "auto" else value for value in (self.workers, self.envs_per_worker, self.num_envs)
        )
        return workers, each, lanes

    @property
    def worker_count(self) -> int:
        """Workers, when that is known."""
        assert self.workers != "auto", "planned comes first"
        return self.workers

    def survey(self, make: MakeEnv, limits: Timeouts, modules: Sequence[str] = ()) -> tuple[EnvSpec, StepCost]:
        """What the world is and what its steps cost, found out in a process of its own."""
        return call_in_process(
            partial(_try_out, make), "the world", limits.construct + limits.reset + limits.step, modules
        )

    def planned(self, cost: StepCost) -> Self:
        """The same with every number known."""
        workers, each, lanes = self._given()
        if workers is None:
            useful = useful_workers(cost)
            lanes = lanes or useful * (each or -(-ENVS // useful))
            workers = lanes // each if each else _divisor(lanes, useful)
        each = each or (lanes // workers if lanes else max(1, ENVS // workers))
        return replace(self, workers=workers, envs_per_worker=each, num_envs=workers * each)

    @property
    def lanes(self) -> int:
        """Envs, when that is known."""
        assert self.num_envs != "auto", "planned comes first"
        return self.num_envs

    @property
    def episodes_per_update(self) -> int | None:
        return None

    @property
    def max_lag(self) -> int | None:
        return None

    def plan_line(self) -> str:
        """The plan for a person."""
        cores = usable_cores()
        shares = "the learner shares them" + (" at lower priority" if self.worker_count > cores else "")
        learner = "the learner has a core" if self.worker_count < cores else shares
        return f"{self.worker_count} workers x {self.envs_per_worker} envs, a thread each, on {cores} cores; {learner}"


def useful_workers(cost: StepCost) -> int:
    """How many workers keep the cores busy: more than cores where steps sleep, one less where the learner can have its own or
    will be the slower one anyway."""
    cores = usable_cores()
    duty = min(1.0, max(cost.cpu / cost.wall, 1 / CROWD)) if cost.wall > 0 else 1.0
    if duty > 0.5:
        return max(1, cores - 1) if cores > 2 or cost.cpu < CHEAP else cores
    return min(CROWD, round(cores / duty))


def _divisor(lanes: int, wanted: int) -> int:
    """The largest number of workers up to `wanted` that shares lanes out evenly."""
    return next(workers for workers in range(min(lanes, wanted), 0, -1) if lanes % workers == 0)


def _try_out(make: MakeEnv) -> tuple[EnvSpec, StepCost]:
    with closing(make(range(1))) as env:
        return env.spec, step_cost(env, 0)


def require_positive(config: object, *names: str) -> None:
    """UsageError unless each of these options is above 0, or left to be chosen."""
    for name in names:
        value = getattr(config, name)
        if value not in (None, "auto") and not value > 0:
            raise UsageError(f"--{name.replace('_', '-')} must be positive, not {value}")
