"""Environments whose rows follow from their seeds, and whose times do not: to be recorded and replayed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

import freewheel
from freewheel.core import Metrics, NDArray
from tests.support.faulty_worlds import worker
from tests.support.worlds import Conditioned, Toy

KILLED, REPLACED = "dead", "replaced"  # files: a process was killed, and another one has begun after that


class Uneven(Toy):
    """Episodes of 5 to 14 steps with random observations; steps take random times, which no seed sets, up to a millisecond.

    fails: how often a step raises, decided by the episode's generator. A file `kill-*` in `folder` kills the worker that finds
    it. While there is a file `slow`, a step of some episodes takes long. drifts: an episode whose seed divides by 5 gets another
    reward at its third step each time.
    """

    def __init__(self, box: bool = False, fails: float = 0.0, folder: str = "", drifts: bool = False) -> None:
        super().__init__(length=5)
        self.observation_space = Box(-1.0, 1.0, (3,), np.float32)
        self.action_space = Box(-1.0, 1.0, (2,), np.float32) if box else Discrete(3)
        self.fails, self.drifts = fails, drifts
        self.folder = Path(folder) if folder else None
        self.times = np.random.default_rng()

    def observe(self) -> NDArray:
        self.length = 5 + self.seed % 10
        return self.np_random.uniform(-1.0, 1.0, 3).astype(np.float32)

    def judge(self, action: Any) -> float:
        if self.folder is not None and worker() is not None:
            self._suffer(self.folder)
        time.sleep(self.times.random() * 1e-3)
        if self.np_random.random() < self.fails:
            raise ValueError("boom")
        unlike = time.perf_counter() % 1.0 if self.drifts and self.seed % 5 == 0 and self.count == 2 else 0.0
        return float(np.sum(action)) / (1 + self.count) + unlike

    def _suffer(self, folder: Path) -> None:
        if self.seed % 16 == 0 and self.count == 2 and (folder / "slow").exists():
            time.sleep(0.15)
        if self.count == 4:
            be_killed(folder)


class Told(Conditioned):
    """Receives contexts, and is killed as Uneven is. After a kill the others are slow until a new process has begun."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)
        if worker() is not None and (self.folder / KILLED).exists():
            (self.folder / REPLACED).touch()

    def judge(self, action: Any) -> float:
        if worker() is not None:
            be_killed(self.folder)
            if (self.folder / KILLED).exists() and not (self.folder / REPLACED).exists():
                time.sleep(0.005)
        return super().judge(action)


def be_killed(folder: Path) -> None:
    for token in folder.glob("kill-*"):
        try:
            token.unlink()
        except FileNotFoundError:  # another worker took it
            continue
        (folder / KILLED).touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Curriculum:
    """A hook that changes the contexts and the learning rate as the run goes on. It fails the run at the update `fails`, and
    lets a worker be killed at the update `kills`."""

    def __init__(self, fails: int | None = None, kills: int | None = None, folder: Path = Path()) -> None:
        self.fails, self.kills, self.folder = fails, kills, folder

    def on_update(self, run: freewheel.Run, metrics: Metrics) -> None:
        run.learning_rate = 1e-3 / (1 + run.version)
        if len(run.contexts):
            run.contexts = [[run.version, 1.0], [0.5, run.version]]
        if run.version == self.fails:
            raise ArithmeticError("enough")
        if run.version == self.kills:
            (self.folder / "kill-1").touch()
