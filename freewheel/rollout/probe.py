"""Tries an environment before training: random actions, and the cost of steps and resets in time, CPU and memory."""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Literal, Protocol, TypeAlias

import numpy as np
import psutil

from freewheel.core import Env, EnvSpec, NDArray
from freewheel.errors import EnvError
from freewheel.rollout.factory import MakeEnv
from freewheel.rollout.tolerance import Tolerance
from freewheel.seeding import generator, training_episodes

BUDGET = 0.3  # seconds of stepping, by default
BRIEF = 0.05  # the same if nothing depends on the time of a step
LONG = 10  # a first step that takes at least this many budgets stays the only one
ENOUGH_STEPS, ENOUGH_SHARE = 100, 1 / 15  # this many steps are enough if this share of the budget is spent ...
CERTAIN = 0.05  # ... and the standard error of their mean is at most this share of it
KEPT_TIMES = 200  # step times that are kept
COMPUTES = 0.5  # cores that an env must keep busy to be called computing
MOST_STOLEN = 0.9  # upper bound on the stolen share of time; a larger share says nothing about the env

Phase: TypeAlias = Literal["constructor", "reset", "step", "close"]
PHASES: tuple[Phase, ...] = ("constructor", "reset", "step", "close")
CPU_INFO = Path("/proc/cpuinfo")
SURVEYED = -1  # number of the episode that is begun with seed 0 to see what a reset returns


@dataclass(frozen=True, kw_only=True)
class EnvCost:
    """The cost of one environment in seconds and bytes, measured while playing random actions."""

    spec: EnvSpec  # of one lane
    wall: float  # mean seconds of a step, resets excluded
    row: float  # the same, including the resets that these steps required
    cpu: float  # processor seconds of a row, resets, threads and child processes included
    stolen: float = 0.0  # seconds of a row in which the env could have run but other processes had the processor
    fast: float = 0.0  # 10th percentile of the seconds of a step; a busy machine hardly changes it
    median: float = 0.0  # median seconds of a step; with the percentiles it shows how uneven steps are
    slow: float = 0.0  # 95th percentile of the seconds of a step
    longest: float = 0.0
    times: tuple[float, ...] = ()  # step times in rising order, evenly sampled from all measured ones
    lengths: tuple[int, ...] = ()  # steps of the episodes that ended
    reset: float = 0.0  # mean seconds of a reset
    construct: float = 0.0  # seconds of the constructor and of reading the spaces
    memory: int = 0  # bytes that the env added to its process and holds in child processes
    children: int = 0  # processes that the env has started
    steps: int = 0  # measured steps
    resets: int = 0  # measured resets, including the first one
    failures: int = 0  # steps and resets that raised
    failure: str = ""  # the report of the last failure
    closed: bool = True  # whether close() returned in time
    portable: bool = True  # whether it can be sent to other processes
    batched: bool = False  # whether many lanes in one process cost little more than one

    @property
    def own(self) -> float:
        """Mean seconds of a row without the time that other processes took the processor."""
        return max(self.row - self.stolen, 0.0)

    @property
    def usual(self) -> float:
        """`own` without the longest step, which may be an outlier."""
        others = (self.wall * self.steps - self.longest) / (self.steps - 1) if self.steps > 1 else self.wall
        return min(self.own, others + self.row - self.wall)

    @property
    def duty(self) -> float:
        """The number of cores that the env keeps busy while it steps: near 0 if it waits, 1 or more if it computes."""
        return self.cpu / self.own if self.own > 0 else 1.0

    @property
    def computes(self) -> bool:
        """Return whether the env, with its child processes, computes rather than waits."""
        return self.duty > COMPUTES


class Watch(Protocol):
    """A function that is called before every call of the environment."""

    def __call__(self, phase: Phase, episode: int, step: int) -> None: ...


def _unwatched(phase: Phase, episode: int, step: int) -> None:
    """Do nothing: nobody supervises this process."""


_watching: ContextVar[Watch] = ContextVar("watching", default=_unwatched)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Environments that are made in this block report what they do to `watch`."""
    token = _watching.set(watch)
    try:
        yield
    finally:
        _watching.reset(token)


def constructing(lane: int) -> None:
    """Report that the environment of this lane is about to be made."""
    _watching.get()("constructor", lane, 0)


def surveying() -> None:
    """Report that an env is about to be reset, as part of making it, to see what it returns."""
    _watching.get()("reset", SURVEYED, 0)


def random_actions(spec: EnvSpec, obs: NDArray, rng: np.random.Generator) -> NDArray:
    """Return an allowed action for every lane, uniform over the choices or over [-1, 1] in each column."""
    if spec.action.kind == "box":
        return rng.uniform(-1, 1, (spec.lanes, spec.action.size)).astype(np.float32)
    scores = rng.random((spec.lanes, spec.action.size))
    if mask := spec.slice("action_mask"):
        scores *= obs[:, mask.start : mask.stop] > 0
    return np.asarray(scores.argmax(axis=1))


@contextmanager
def measured(
    make: MakeEnv,
    seed: int,
    *,
    budget: float = BUDGET,
    most_steps: int = 0,
    watch: Watch = _unwatched,
    begun: Callable[[EnvCost], None] = lambda _: None,
) -> Iterator[EnvCost]:
    """Make an env of one lane and play random actions for about `budget` seconds, at least one step; close it on exit.

    Steps and resets that raise are counted, and a new episode begins; if the env does little else, its error is raised.
    With `most_steps`, the trial ends after that many steps even if time is left. `begun` receives what is known before
    the first step, with the processor seconds used until then.
    """
    others = frozenset(child.pid for child in psutil.Process().children())  # children that are not the env's
    memory, construct = _memory(others), perf_counter()
    watch("constructor", 0, 0)
    with watching(watch):
        env = make(range(1))
    construct = perf_counter() - construct
    with ExitStack() as stack:
        stack.push(partial(_close, env, watch))
        trial = _Trial(env, seed, watch, others)
        obs = trial.begin()
        begun(
            EnvCost(
                spec=env.spec,
                wall=0.0,
                row=0.0,
                cpu=process_time(),
                construct=construct,
                memory=_memory(others) - memory,
            )
        )
        used = trial.play(obs, budget, most_steps)
        yield trial.cost(used, construct=construct, memory=max(0, _memory(others) - memory))


def _close(env: Env, watch: Watch, kind: type[BaseException] | None, *_: object) -> None:
    if kind is None or not issubclass(kind, SystemExit):  # an env that exits is reported by the call that did so
        watch("close", 0, 0)
        env.close()


@dataclass
class _Used:
    """Wall-clock seconds, processor seconds, and seconds in which other processes had the processor."""

    wall: float
    cpu: float
    stolen: float

    def __add__(self, other: _Used) -> _Used:
        return _Used(self.wall + other.wall, self.cpu + other.cpu, self.stolen + other.stolen)

    def __sub__(self, other: _Used) -> _Used:
        return _Used(self.wall - other.wall, self.cpu - other.cpu, self.stolen - other.stolen)


def _by_process() -> _Used:
    return _Used(perf_counter(), process_time(), _stolen("thread-self"))


def _children(others: frozenset[int]) -> list[psutil.Process]:
    """Return all descendant processes except `others` and their descendants. The search takes milliseconds."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        if child.pid not in others:
            with suppress(psutil.Error):
                found += [child, *child.children(recursive=True)]
    return found


def _by_children(others: frozenset[int]) -> _Used:
    """Return what child processes used, including the ones that have ended."""
    ended, children = resource.getrusage(resource.RUSAGE_CHILDREN), _children(others)
    cpu = ended.ru_utime + ended.ru_stime + sum(cpu_of(child.pid) for child in children)
    return _Used(0.0, cpu, sum(_stolen(str(child.pid)) for child in children))


class _Trial:
    """Plays random actions in an env, and keeps the time of every call."""

    def __init__(self, env: Env, seed: int, watch: Watch, others: frozenset[int]) -> None:
        self._others = others  # child processes that are not the env's
        self._env, self._seed, self._watch, self._rng = env, seed, watch, generator(seed, "probe")
        self._episode, self._taken = -1, 0  # the number of the episode, and the steps in it
        self._steps, self._resets = list[float](), list[float]()  # seconds
        self._total = self._squares = 0.0  # sums over the seconds of steps, and over their squares
        self._lengths: list[int] = []
        self._extra = 0  # resets before the first step that counts
        self._failures, self._good = 0, 0
        self._tolerance = Tolerance(trusted_after=1)  # like workers, accept occasional failures
        self._failure = ""

    def play(self, obs: NDArray, budget: float, most_steps: int) -> _Used:
        self._extra, others, own = len(self._resets), _by_children(self._others), _by_process()
        obs = self._advance(obs)
        if sum(self._steps) < LONG * budget and most_steps != 1:  # a warm-up: simulators may start in their first step
            self._steps.clear()
            self._total = self._squares = 0.0
            self._extra, others, own = len(self._resets), _by_children(self._others), _by_process()
        while not self._enough(perf_counter() - own.wall, budget, most_steps):
            obs = self._advance(obs)
        return _by_process() - own + (_by_children(self._others) - others)

    def _enough(self, elapsed: float, budget: float, most_steps: int) -> bool:
        count = len(self._steps)
        many = count >= ENOUGH_STEPS and elapsed >= ENOUGH_SHARE * budget
        long = elapsed >= budget or (many and self._mean_is_certain())
        return count > 0 and (long or 0 < most_steps <= count)

    def _mean_is_certain(self) -> bool:
        """Return whether more steps would hardly change the mean of their times."""
        total, squares, count = self._total, self._squares, len(self._steps)
        return squares / count - (total / count) ** 2 <= (CERTAIN * total) ** 2 / count

    def _advance(self, obs: NDArray) -> NDArray:
        """Make a step and, if the episode has ended, a reset; returns the observation to act on."""
        action = random_actions(self._env.spec, obs, self._rng)
        self._taken += 1
        self._watch("step", self._episode, self._taken)
        began = perf_counter()
        try:
            step = self._env.step(action)
        except EnvError as error:
            self._fail(error)
            return self.begin()
        self._steps.append(took := perf_counter() - began)
        self._total, self._squares = self._total + took, self._squares + took * took
        self._good += 1
        if not (step.terminated | step.truncated).any():
            return self._env.autoreset()
        self._lengths.append(self._taken)
        self._episode, self._taken = self._episode + 1, 0
        answer = self._timed_reset(self._env.autoreset)
        return self.begin() if answer is None else answer

    def begin(self) -> NDArray:
        """Begin the next episode whose reset succeeds."""
        answer = None
        while answer is None:
            self._episode, self._taken = self._episode + 1, 0
            lanes = range(self._env.spec.lanes)
            streams = [training_episodes(self._seed, lane, self._episode) for lane in lanes]
            answer = self._timed_reset(partial(self._env.reset, streams))
        return answer

    def _timed_reset(self, reset: Callable[[], NDArray]) -> NDArray | None:
        """Return what a reset returns; None: it failed."""
        self._watch("reset", self._episode, 0)
        began = perf_counter()
        try:
            obs = reset()
        except EnvError as error:
            self._fail(error)
            return None
        self._resets.append(perf_counter() - began)
        return obs

    def _fail(self, error: EnvError) -> None:
        self._failures, self._failure = self._failures + 1, error.report
        good, self._good = self._good, 0
        if self._tolerance.exhausted(good):
            raise error

    def cost(self, used: _Used, *, construct: float, memory: int) -> EnvCost:
        steps, count = np.array(self._steps), len(self._steps)
        row = (sum(self._steps) + sum(self._resets[self._extra :])) / count
        return EnvCost(
            spec=self._env.spec,
            wall=float(steps.mean()),
            row=row,
            cpu=row * used.cpu / used.wall,  # a share of the trial's time, applied to the env's time alone
            stolen=row * min(used.stolen / used.wall, MOST_STOLEN),
            fast=float(np.quantile(steps, 0.1)),
            median=float(np.median(steps)),
            slow=float(np.quantile(steps, 0.95)),
            longest=float(steps.max()),
            times=_thinned(steps),
            lengths=tuple(self._lengths),
            reset=sum(self._resets) / len(self._resets),
            construct=construct,
            memory=memory,
            children=len(_children(self._others)),
            steps=count,
            resets=len(self._resets),
            failures=self._failures,
            failure=self._failure,
        )


def _thinned(times: NDArray) -> tuple[float, ...]:
    """Return at most KEPT_TIMES quantiles of these numbers, scaled to the same mean."""
    count = min(len(times), KEPT_TIMES)
    kept = np.quantile(times, (np.arange(count) + 0.5) / count)
    return tuple((kept * (times.mean() / kept.mean())).tolist()) if kept.any() else tuple(kept.tolist())


def cpu_of(pid: int) -> float:
    """Return the processor seconds of a process by its clock, with Linux's clock number; 0 if the process has ended."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def _stolen(process: str) -> float:
    """Return the seconds that a thread of /proc was ready to run but did not run."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) * 1e-9
    return 0.0


def taken_from(pid: int) -> float:
    """Return the seconds that a process of one thread was ready to run while others had the processor."""
    return _stolen(str(pid))


def _memory(others: frozenset[int]) -> int:
    """Return the bytes of this process and its children, with their part of the memory shared with others."""
    total = 0
    for process in (psutil.Process(), *_children(others)):
        with suppress(psutil.Error):
            used = process.memory_full_info()
            total += getattr(used, "pss", used.uss)
    return total


def processor() -> str:
    """Return the processor's model, as far as the system reports it."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
