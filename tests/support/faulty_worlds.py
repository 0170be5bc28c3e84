"""Environments whose rows can be checked, and ways to fail; they fail only in workers, never in a survey."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from itertools import cycle
from multiprocessing import current_process
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box, Discrete

from freewheel.core import NDArray
from tests.support.worlds import Toy

LOW, HIGH, LENGTH = 2**16, 2**15, 2**12  # what the columns of an observation are divided by: all exact in float32


def worker() -> int | None:
    """The worker number of this process; None outside workers."""
    match = re.fullmatch(r"freewheel-worker-(\d+)", current_process().name)
    return int(match[1]) if match else None


class Certified(Toy):
    """An episode of 6 to 25 steps, depending on the seed; a step takes `seconds`.

    Observation: the seed in two columns, and the step. Reward: (seed + step) mod 5, and 1 more for action 1. So a row
    with parts of different steps, lanes or episodes is detected.
    """

    def __init__(self, seconds: float = 0.001) -> None:
        super().__init__(length=6)
        self.observation_space, self.action_space = Box(0.0, 1.0, (3,), np.float32), Discrete(2)
        self.seconds = seconds

    def observe(self) -> NDArray:
        self.length = 6 + self.seed % 20
        return np.array([self.seed % LOW / LOW, self.seed // LOW / HIGH, self.count / LENGTH], np.float32)

    def judge(self, action: Any) -> float:
        if self.seconds:
            time.sleep(self.seconds)
        return float((self.seed + self.count) % 5 + action)


class WithoutTorch(Certified):
    """Cannot be made in a worker that has imported torch."""

    def __init__(self) -> None:
        assert worker() is None or "torch" not in sys.modules, "a worker has imported torch"
        super().__init__()


class NotInWorkers(Certified):
    """Raises in worker processes, and nowhere else."""

    def judge(self, action: Any) -> float:
        if worker() is not None:
            raise RuntimeError("this simulator has no licence for another process")
        return super().judge(action)


class ReusesArray(Certified):
    """Always returns the same array, and overwrites it before the next step."""

    def __init__(self, seconds: float = 0.001) -> None:
        super().__init__(seconds)
        self.buffer = np.zeros(3, np.float32)

    def observe(self) -> NDArray:
        self.buffer[:] = super().observe()
        return self.buffer

    def judge(self, action: Any) -> float:
        self.buffer[:] = -1.0
        return super().judge(action)


class Slow(Certified):
    """`factor` times as slow in worker `only`."""

    def __init__(self, seconds: float = 0.001, only: int = 0, factor: float = 100.0) -> None:
        super().__init__(seconds * (factor if worker() == only else 1.0))


def step_the_clock() -> None:
    """From now on the time of day of this process is an hour late or early, in turn."""
    real, hours = time.time, cycle([3600.0, -3600.0])
    time.time = lambda: real() + next(hours)


class Timewarped(Certified):
    """The time of day jumps in every process that has one."""

    def __init__(self) -> None:
        super().__init__()
        step_the_clock()


class StepTheClock:
    """A hook: the time of day jumps in the process of the run too."""

    def on_start(self, run: Any) -> None:
        step_the_clock()


class Leisurely(Certified):
    """Takes a quarter of a second for its constructor, its first reset after the survey, or its first step, in a worker."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where if worker() is not None else ""
        self._pause("constructor")

    def observe(self) -> NDArray:
        if self.seed:
            self._pause("step" if self.count else "reset")
        return super().observe()

    def _pause(self, where: str) -> None:
        if self.where == where:
            self.where = ""
            time.sleep(0.25)


class Faulty(Certified):
    """Fails in a worker: in all of them or `only` in one, in all of its envs, only in the first `envs` or only in `lane`.

    It fails at step `at` (0: in reset, -1: in its constructor) of every episode, of the one with seed `in_seed` or, given a
    `rate`, at any step with that probability. Given a `folder`, it fails as often as there are tokens (files named token-*) in
    it, each taken once, and notes when and where it failed in a file beside them.
    """

    made: ClassVar[int] = 0  # in this process

    def __init__(
        self,
        how: str = "raises",
        only: int | None = None,
        envs: int | None = None,
        lane: int | None = None,
        at: int = 3,
        rate: float | None = None,
        folder: str | None = None,
        in_seed: int | None = None,
        seconds: float = 0.001,
    ) -> None:
        super().__init__(seconds)
        self.in_seed = in_seed
        self.how: Callable[[Faulty, NDArray], Any] = HOW[how]
        self.at, self.rate, self.folder = at, rate, None if folder is None else Path(folder)
        mine = (envs is None or Faulty.made < envs) and lane in (None, Faulty.made)
        Faulty.made += 1
        self.enabled = mine and worker() is not None and only in (None, worker())
        self.infinite_reward = False  # the reward of this step
        self.token = 0
        if at == -1 and self._due(-1):
            self.how(self, np.zeros(3, np.float32))

    def observe(self) -> Any:
        observation = super().observe()
        return self.how(self, observation) if self._due(self.count) else observation

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        reward, self.infinite_reward = float("inf") if self.infinite_reward else reward, False
        return observation, reward, terminated, truncated, info

    def _due(self, step: int) -> bool:
        if not self.enabled or self.in_seed not in (None, self.seed):
            return False
        due = step == self.at if self.rate is None else step > 0 and self.np_random.random() < self.rate
        return due and (self.folder is None or self._take_token(self.folder))

    def _take_token(self, folder: Path) -> bool:
        for token in folder.glob("token-*"):
            try:
                token.unlink()
            except FileNotFoundError:  # another process took it
                continue
            self.token = int(token.name.partition("-")[2])
            note = folder / f".{token.name}"
            note.write_text(f"{worker()} {time.monotonic()} {os.getpid()}")
            note.rename(folder / f"used-{token.name}")  # atomic
            return True
        return False


def _raises(env: Faulty, observation: NDArray) -> NDArray:
    raise ValueError("boom")


def _raises_something_else(env: Faulty, observation: NDArray) -> NDArray:
    raise KeyError("bang") if env.count % 2 else ValueError("boom")


def _is_killed(env: Faulty, observation: NDArray) -> NDArray:
    os.kill(os.getpid(), signal.SIGKILL)
    return observation


def _crashes(env: Faulty, observation: NDArray) -> NDArray:
    ctypes.string_at(0)  # reads an invalid address
    return observation


def _exits(env: Faulty, observation: NDArray) -> NDArray:
    os._exit(7)


def _hangs(env: Faulty, observation: NDArray) -> NDArray:
    with contextlib.suppress(ValueError):  # not in the main thread, as in a Ray actor
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60.0)


def _grows(env: Faulty, observation: NDArray) -> NDArray:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 64 * 2**20, resource.RLIM_INFINITY))
    blocks = []
    while True:
        blocks.append(np.ones(2**20))


def _stops_with_the_lock(env: Faulty, observation: NDArray) -> NDArray:
    """Stopped while it holds the lock, as a worker that takes its next grant."""
    frame = sys._getframe()
    while "closes" not in frame.f_locals:
        assert frame.f_back is not None, "no worker here"
        frame = frame.f_back
    with frame.f_locals["self"]._shared.permits.lock:
        os.kill(os.getpid(), signal.SIGSTOP)
    return observation


def _sleeps(env: Faulty, observation: NDArray) -> NDArray:
    time.sleep(0.2)
    return observation


def _does_anything(env: Faulty, observation: NDArray) -> Any:
    how = env.np_random.choice(["raises", "is killed", "exits", "nan", "reward inf", "wrong shape", "None", "sleeps"])
    return HOW[how](env, observation)


def _invalid(env: Faulty, observation: NDArray) -> Any:
    """Every kind of invalid answer, by the number of the token."""
    return HOW[INVALID[env.token % len(INVALID)]](env, observation)


def _infinite_reward(env: Faulty, observation: NDArray) -> NDArray:
    env.infinite_reward = True
    return observation


HOW: dict[str, Callable[[Faulty, NDArray], Any]] = {
    "raises": _raises,
    "raises variously": _raises_something_else,
    "is killed": _is_killed,
    "crashes": _crashes,
    "exits": _exits,
    "hangs": _hangs,
    "grows": _grows,
    "stops with the lock": _stops_with_the_lock,
    "sleeps": _sleeps,
    "anything": _does_anything,
    "invalid answers": _invalid,
    "reward inf": _infinite_reward,
    "nan": lambda env, observation: np.full_like(observation, np.nan),
    "-inf": lambda env, observation: np.where(np.arange(3) == 1, np.float32(-np.inf), observation),
    "wrong shape": lambda env, observation: observation[:2],
    "one column": lambda env, observation: observation[:1],
    "None": lambda env, observation: None,
    "text": lambda env, observation: np.array(["a", "b", "c"]),
    "complex": lambda env, observation: observation + 1j,
}
INVALID = ("nan", "reward inf", "-inf", "wrong shape", "one column", "None", "text", "complex")
