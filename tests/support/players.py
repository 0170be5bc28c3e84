"""What plays in the processes of evaluations: without pytest, so that they start fast."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from freewheel.core import Decision, NDArray, Snapshot
from freewheel.envs.gym import GymConfig
from freewheel.run.evaluation.players import Rounds
from freewheel.seeding import tree
from tests.support.worlds import Identity

SEED, LIMIT = 11, 1000


class Constant:
    """Always chooses what its weights say; a policy without memory."""

    state_size, choice = 0, 0

    def act(self, obs: NDArray, rng: np.random.Generator, *, state: Any = None, greedy: bool = False) -> Decision:
        lanes = len(obs)
        return Decision(np.full(lanes, self.choice), np.zeros(lanes, np.float32), np.zeros((lanes, 0), np.float32))

    def load(self, snapshot: Snapshot) -> None:
        self.choice = snapshot.version


def rounds(lanes: int, env: type[Identity] = Identity, **args: Any) -> Callable[[], Rounds]:
    config = GymConfig(id=env.__name__, factory=env, args=args)
    return partial(Rounds, partial(config.make, range(lanes)), Constant, LIMIT)


def hang_in_c() -> None:
    """Wait for ever without giving the interpreter back, whatever signals come."""
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):
        library.pthread_mutex_lock(mutex)


class Sleeps(Identity):
    """Hangs in the call of an episode with the first seed, and uses the alarm for itself, as an environment may."""

    def __init__(self, where: str) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.where = where
        if where == "construct":
            hang_in_c()
        super().__init__()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.hangs = seed == tree(SEED, "eval", 0)
        if self.hangs and self.where == "reset":
            threading.Event().wait()
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        if self.hangs and self.where == "step" and self.count == 2:
            hang_in_c()
        return super().step(action)

    def close(self) -> None:
        if self.where == "close":
            hang_in_c()


class Spawns(Sleeps):
    """Starts two processes, one in a session of its own."""

    def __init__(self, where: str, folder: str) -> None:
        super().__init__(where)
        started = [subprocess.Popen(["sleep", "60"], start_new_session=new) for new in (False, True)]
        (Path(folder) / "pids").write_text(" ".join(str(process.pid) for process in started))
