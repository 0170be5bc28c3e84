"""Modes with workers: the number of workers, and of environments per worker."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple, Self

from freewheel.collect.mode import ENVS, LANES, ModeConfig, count
from freewheel.core import Auto, BatchSpec
from freewheel.errors import Range, SetupError, UsageError, check_ranges
from freewheel.files.memory import free_memory, in_words
from freewheel.rollout.probe import EnvCost, usable_cores

CHEAP = 20e-6  # seconds: one worker with shorter steps than this is faster than the learner
WORKER_STEP = 100e-6  # processor seconds that a worker adds to a step of its env
MOST_WAITING = 64  # most workers for an env that waits, unless there are more cores: more would outrun the learner
WORKER_MEMORY = 12 << 20  # bytes of a worker without its envs
MEMORY_SHARE = 0.75  # share of the free memory that the envs of a plan may use


class PlannedWorkers(NamedTuple):
    """The number of workers, and of envs per worker."""

    workers: int
    envs_per_worker: int

    @property
    def lanes(self) -> int:
        """Environments over all workers."""
        return self.workers * self.envs_per_worker


@dataclass(frozen=True)
class WorkersConfig(ModeConfig):
    """Workers, each with its own environments."""

    workers: Annotated[int | Auto, Range(least=1, most=10_000)] = "auto"
    """Worker processes (also --num-collectors, --n-workers); auto: chosen by the cores and the measured step time."""
    envs_per_worker: Annotated[int | Auto, LANES] = "auto"
    """Environments of a worker, stepped in turn."""
    num_envs: Annotated[int | Auto, LANES] = "auto"
    """Lanes: environments over all workers."""

    def __post_init__(self) -> None:
        workers, each, lanes = self._given()
        check_ranges(self)
        if workers and lanes and lanes % workers:
            possible = lanes // workers * workers or workers
            raise UsageError(f"{lanes} envs cannot be divided evenly over {workers} workers; use --num-envs {possible}")
        if each and lanes and lanes % each:
            raise UsageError(f"--num-envs {lanes} is not a multiple of --envs-per-worker {each}")
        if workers and each and lanes and workers * each != lanes:
            raise UsageError(f"{workers} workers x {each} envs are not {lanes} envs; leave one of the three out")

    def _given(self) -> tuple[int | None, int | None, int | None]:
        """Return workers, envs per worker and all envs; None for each that is not given."""
        workers, each, lanes = (
            None if value == "auto" else value for value in (self.workers, self.envs_per_worker, self.num_envs)
        )
        return workers, each, lanes

    @property
    def numbers(self) -> PlannedWorkers:
        """The known numbers; a number that `planned` has not yet chosen counts as one, its minimum."""
        workers, each, lanes = (value or 1 for value in self._given())
        return PlannedWorkers(workers, max(each, lanes // workers))

    @property
    def worker_count(self) -> int:
        """Number of workers; see `numbers`."""
        return self.numbers.workers

    env_processes = worker_count

    @property
    def needs_step_time(self) -> bool:
        """Return True also for more workers than cores: then the measured CPU use decides whether they act in turn."""
        return self.workers == "auto" or self.workers > usable_cores()

    def useful_workers(self, cost: EnvCost) -> int:
        """Return how many workers keep the cores busy."""
        return useful_workers(cost)

    def chosen(self, cost: EnvCost) -> PlannedWorkers:
        """Return the given numbers, and values for the others that fit them."""
        workers, each, lanes = self._given()
        if workers is None:
            room = memory_room(cost)
            useful = min(self.useful_workers(cost), room)
            lanes = lanes or useful * (each or -(-min(ENVS, room) // useful))
            workers = lanes // each if each else divisor(lanes, useful)
        return PlannedWorkers(workers, each or (lanes // workers if lanes else max(1, ENVS // workers)))

    def planned(self, cost: EnvCost) -> Self:
        """Return a copy with every number chosen."""
        found = self.chosen(cost)
        return replace(self, workers=found.workers, envs_per_worker=found.envs_per_worker, num_envs=found.lanes)

    @property
    def lanes(self) -> int:
        """Number of environments; see `numbers`."""
        return self.numbers.lanes

    def fragment_steps(self, batch: BatchSpec) -> int:
        """Steps of each env in a fragment, the unit that a worker hands over; known after planning."""
        return batch.steps

    def plan_line(self) -> str:
        """The plan in one line, for the user."""
        workers, each = self.numbers
        return f"{count(workers, 'worker')} x {count(each, 'env')}, a thread each, on {count(usable_cores(), 'core')}"

    def remarks(self, cost: EnvCost) -> list[str]:
        workers, _, lanes = self._given()
        if workers is None and lanes is None and (room := memory_room(cost)) < max(ENVS, self.useful_workers(cost)):
            return [f"memory allows {count(room, 'env')}: one holds about {_rounded(cost.memory / 2**20)} MB"]
        cores = usable_cores()
        if workers is not None and workers > cores and cost.computes:
            no_more = f"{workers} workers on {cores} cores bring no more than {cores}: the env computes all the time"
            return [f"{no_more}; --workers {cores} takes less memory"]
        return []


def useful_workers(cost: EnvCost) -> int:
    """Return how many workers keep the cores busy. If the env computes: one per core, less one if the learner can have
    a core or will be slower anyway. If it waits: cores times a power of two, because the measurement is not exact."""
    cores = usable_cores()
    if cost.computes:
        return max(1, cores - 1) if cores > 2 or cost.fast < CHEAP else cores
    times = 1 << max(0, math.floor(math.log2(1 / worker_cores(cost))))
    return min(max(MOST_WAITING, cores), cores * times)


def worker_cores(cost: EnvCost) -> float:
    """Cores that a worker keeps busy while it steps."""
    return (cost.cpu + WORKER_STEP) / max(cost.own, WORKER_STEP)


def memory_room(cost: EnvCost) -> int:
    """Return how many envs, each with a worker, fit into the free memory: a power of two, because it varies."""
    room = MEMORY_SHARE * free_memory() / (WORKER_MEMORY + cost.memory)
    return 1 << max(0, math.floor(math.log2(max(room, 1.0))))


def require_room(cost: EnvCost, lanes: int, workers: int) -> None:
    """Raise SetupError if these envs and workers do not fit into the free memory."""
    need, free = lanes * cost.memory + workers * WORKER_MEMORY, free_memory()
    if need > free:
        each = f"{lanes:,} envs of {in_words(cost.memory)} each, as measured"
        most = max(1, free // (cost.memory + WORKER_MEMORY))
        sizes = f"need {need / 2**30:.1f} GB of memory, but {free / 2**30:.1f} GB are free"
        raise SetupError(f"{each}, {sizes}: use at most {most} envs")


def _rounded(value: float) -> str:
    """Round to one digit, so that a remark does not change with every measurement."""
    digits = math.floor(math.log10(max(value, 1.0)))
    return f"{round(value, -digits):,.0f}"


def divisor(lanes: int, wanted: int) -> int:
    """The largest number of workers up to `wanted` that divides the lanes evenly."""
    return next(workers for workers in range(min(lanes, wanted), 0, -1) if lanes % workers == 0)
