"""Trying an environment before training: random actions, and what a step and a reset cost in time, processor and memory."""

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
BRIEF = 0.05  # where nothing depends on how long a step takes
LONG = 10  # budgets that a first step must take to be the only one
ENOUGH_STEPS, ENOUGH_SHARE = 100, 1 / 15  # so many steps end it when this share of the budget is spent ...
CERTAIN = 0.05  # ... and the standard error of their mean is at most this share of it
KEPT_TIMES = 200  # of steps
COMPUTES = 0.5  # cores that an env must keep busy to be called computing
MOST_STOLEN = 0.9  # share of the time; beyond it nothing can be said

Phase: TypeAlias = Literal["constructor", "reset", "step", "close"]
PHASES: tuple[Phase, ...] = ("constructor", "reset", "step", "close")
CPU_INFO = Path("/proc/cpuinfo")
SURVEYED = -1  # the number of the episode that is begun, with seed 0, to see what a reset returns


@dataclass(frozen=True, kw_only=True)
class EnvCost:
    """What one environment costs: seconds and bytes, measured while random actions were played."""

    spec: EnvSpec  # of one lane
    wall: float  # mean seconds of a step, resets excluded
    row: float  # the same with the resets that these steps called for
    cpu: float  # processor seconds of a row, resets, threads and child processes included
    stolen: float = 0.0  # seconds of a row in which the env could have run but other processes had the processor
    fast: float = 0.0  # seconds that 9 of 10 steps took longer than; a busy machine does not change it much
    median: float = 0.0  # of the seconds of a step; with the others it shows how uneven steps are
    slow: float = 0.0  # seconds that 95 of 100 steps were faster than
    longest: float = 0.0
    times: tuple[float, ...] = ()  # of steps in rising order, evenly taken from all that were measured
    lengths: tuple[int, ...] = ()  # steps of the episodes that ended
    reset: float = 0.0  # mean seconds of a reset
    construct: float = 0.0  # seconds of the constructor and of what reading its spaces took
    memory: int = 0  # bytes that the env added to its process and holds in child processes
    children: int = 0  # processes that the env has started
    steps: int = 0  # that were measured
    resets: int = 0  # that were measured, the first one included
    failures: int = 0  # steps and resets that raised meanwhile
    failure: str = ""  # the report of the last of them
    closed: bool = True  # whether close() returned in time
    portable: bool = True  # whether it can be sent to other processes
    batched: bool = False  # whether many lanes in one process cost little more than one

    @property
    def own(self) -> float:
        """Mean seconds of a row where no other process takes the processor away."""
        return max(self.row - self.stolen, 0.0)

    @property
    def usual(self) -> float:
        """The same without the longest step, which may be a hiccup."""
        others = (self.wall * self.steps - self.longest) / (self.steps - 1) if self.steps > 1 else self.wall
        return min(self.own, others + self.row - self.wall)

    @property
    def duty(self) -> float:
        """The cores that it keeps busy while it steps: near 0 if it waits, 1 or more if it computes."""
        return self.cpu / self.own if self.own > 0 else 1.0

    @property
    def computes(self) -> bool:
        """Whether it keeps a core busy, itself or by its child processes, rather than waits."""
        return self.duty > COMPUTES


class Watch(Protocol):
    """Is told before every call of the environment."""

    def __call__(self, phase: Phase, episode: int, step: int) -> None: ...


def _unwatched(phase: Phase, episode: int, step: int) -> None:
    """Nobody supervises this process."""


_watching: ContextVar[Watch] = ContextVar("watching", default=_unwatched)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Environments that are made in this block tell `watch` what they do."""
    token = _watching.set(watch)
    try:
        yield
    finally:
        _watching.reset(token)


def constructing(lane: int) -> None:
    """Says that the environment of this lane is about to be made."""
    _watching.get()("constructor", lane, 0)


def _nothing(cost: EnvCost) -> None:
    """Nobody is told."""


def surveying() -> None:
    """Says that an env is about to be reset to see what it returns, which is part of making it."""
    _watching.get()("reset", SURVEYED, 0)


def random_actions(spec: EnvSpec, obs: NDArray, rng: np.random.Generator) -> NDArray:
    """An allowed action for every lane, uniform over the choices or over [-1, 1] in each column."""
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
    begun: Callable[[EnvCost], None] = _nothing,
) -> Iterator[EnvCost]:
    """Make an env of one lane and play random actions for about `budget` seconds but at least one step; close it on exit.

    Steps and resets that raise are counted, and a new episode begins; an env that does little else is refused with its error.
    With `most_steps`, it ends after so many steps even if time is left. `begun` is told what is known before the first step, with
    the processor seconds used until then.
    """
    others = frozenset(child.pid for child in psutil.Process().children())  # that are not the env's
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
    if kind is None or not issubclass(kind, SystemExit):  # the env ends its process: what it did then is to be reported
        watch("close", 0, 0)
        env.close()


@dataclass
class _Used:
    """Seconds by the clock, of processor, and in which others had the processor."""

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
    """The child processes and theirs, except these others and theirs. Looking for them takes milliseconds."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        if child.pid not in others:
            with suppress(psutil.Error):
                found += [child, *child.children(recursive=True)]
    return found


def _by_children(others: frozenset[int]) -> _Used:
    """Of child processes, also of those that have ended."""
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
        self._total = self._squares = 0.0  # of the seconds of steps
        self._lengths: list[int] = []
        self._extra = 0  # resets before the first step that counts
        self._failures, self._good = 0, 0
        self._tolerance = Tolerance(trusted_after=1)  # one that fails now and then, as workers bear it, is not refused
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
        """Whether more steps would hardly change the mean of their times."""
        total, squares, count = self._total, self._squares, len(self._steps)
        return squares / count - (total / count) ** 2 <= (CERTAIN * total) ** 2 / count

    def _advance(self, obs: NDArray) -> NDArray:
        """One step and, where the episode has ended, a reset; returns what to act on."""
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
        """Begin the next episode that can be begun."""
        answer = None
        while answer is None:
            self._episode, self._taken = self._episode + 1, 0
            lanes = range(self._env.spec.lanes)
            streams = [training_episodes(self._seed, lane, self._episode) for lane in lanes]
            answer = self._timed_reset(partial(self._env.reset, streams))
        return answer

    def _timed_reset(self, reset: Callable[[], NDArray]) -> NDArray | None:
        """What a reset returns; None: it failed."""
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
            cpu=row * used.cpu / used.wall,  # the time of our own calls is left out of both
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
    """At most KEPT_TIMES of these numbers, spread over them as they are, with their mean."""
    count = min(len(times), KEPT_TIMES)
    kept = np.quantile(times, (np.arange(count) + 0.5) / count)
    return tuple((kept * (times.mean() / kept.mean())).tolist()) if kept.any() else tuple(kept.tolist())


def cpu_of(pid: int) -> float:
    """Processor seconds of a process, by its clock (Linux numbers it so); 0 if it has ended."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def _stolen(process: str) -> float:
    """Seconds that a thread of /proc was ready to run and did not."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) * 1e-9
    return 0.0


def taken_from(pid: int) -> float:
    """Seconds that a process of one thread was ready to run while others had the processor."""
    return _stolen(str(pid))


def _memory(others: frozenset[int]) -> int:
    """Bytes of this process and its children, with their share of what they share with others."""
    total = 0
    for process in (psutil.Process(), *_children(others)):
        with suppress(psutil.Error):
            used = process.memory_full_info()
            total += getattr(used, "pss", used.uss)
    return total


def processor() -> str:
    """Its model, as far as the system tells."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
