"""The present call of an environment, in shared memory: if its process hangs or dies, an error can name the call."""

from __future__ import annotations

import time
from typing import NamedTuple

from freewheel.rollout.factory import Timeouts
from freewheel.rollout.probe import PHASES, Phase
from freewheel.transport.clock import clock
from freewheel.transport.shm.memory import SharedArrays

CLOSE_LIMIT = 5.0  # seconds for close(), at most
FLAGS = {"constructor": "construct", "reset": "reset", "step": "step"}  # --construct-timeout and so on
CELLS = ("phase", "since", "episode", "step", "good")  # since: CLOCK_MONOTONIC ns; good: steps that returned


class At(NamedTuple):
    """A call of an environment that has not returned yet, as far as the reader knows."""

    phase: Phase
    age: float  # seconds, without those in which the reader was stopped
    episode: int
    step: int  # within the episode, from 1
    good: int  # steps that returned before

    def limit(self, timeouts: Timeouts) -> float:
        """Return the seconds that the call may take."""
        return float(getattr(timeouts, FLAGS[self.phase])) if self.phase in FLAGS else CLOSE_LIMIT

    def called(self, seed: int) -> str:
        """Describe the call; `seed` is the seed of its episode."""
        return call_of(self.phase, seed, self.step)

    def overdue(self, timeouts: Timeouts, seed: int) -> str:
        """Describe a call that takes too long."""
        remedy = (
            f"; is it waiting for something? --{FLAGS[self.phase]}-timeout allows more" if self.phase in FLAGS else ""
        )
        return f"did not return within {self.limit(timeouts):g} s from {self.called(seed)}{remedy}"


def call_of(phase: str, seed: int, step: int) -> str:
    """Describe a call of an environment, so that the user can repeat it."""
    if phase == "step":
        return f"step {step} of the episode with seed {seed}"
    return f"reset() with seed {seed}" if phase == "reset" else "close()" if phase == "close" else "its constructor"


class CallTracker:
    """Cells that one process writes before every call, in less than a microsecond. Implements rollout.probe.Watch."""

    def __init__(self) -> None:
        self._memory = SharedArrays(dict.fromkeys(CELLS, ((1,), "i8")))

    def __call__(self, phase: Phase, episode: int, step: int) -> None:
        cells = self._memory.numbers
        cells["good"][0] += PHASES[cells["phase"][0]] == "step" and (phase != "step" or step > 1)
        cells["since"][0] = time.monotonic_ns()
        cells["episode"][0], cells["step"][0], cells["phase"][0] = episode, step, PHASES.index(phase)

    def read(self) -> At:
        cells = {name: cell[0] for name, cell in self._memory.numbers.items()}
        age = clock.age(cells["since"] * 1e-9)
        return At(PHASES[cells["phase"]], age, cells["episode"], cells["step"], cells["good"])

    def close(self) -> None:
        self._memory.close()
