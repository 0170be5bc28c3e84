"""Stragglers: how long each worker's steps, resets and episodes take, and who is far slower than the rest."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from freewheel.core import WORKER_TIME, Episode, NDArray
from freewheel.transport.pulse import RESET, STEP, Pulse

WINDOW = 5.0  # seconds over which steps are averaged
SLOW = 10.0  # times the median of all workers
BUSY = [WORKER_TIME.index("step"), WORKER_TIME.index("reset")]


class Stragglers:
    """Looks at counters that the workers keep anyway."""

    def __init__(self, pulse: Pulse, times: NDArray) -> None:
        self._pulse, self._times = pulse, times  # [W, len(WORKER_TIME)] ns, of all incarnations
        workers = len(times)
        self._past: deque[tuple[float, NDArray, NDArray]] = deque()
        self._named: set[int] = set()
        self._episodes = np.zeros((workers, 3))  # count, steps, seconds
        self._look()

    def take(self, worker: int, episodes: Sequence[Episode]) -> None:
        """Book a worker's finished episodes."""
        for episode in episodes:
            self._episodes[worker] += 1, episode.length, episode.seconds

    def slow(self) -> list[str]:
        """A line for every worker that has become slow since this was last asked."""
        self._look()
        mean = self._recent()
        median = float(np.median(mean))
        slow = set(np.flatnonzero(mean > SLOW * median).tolist()) if median > 0 else set()
        new, self._named = sorted(slow - self._named), slow
        return [
            f"worker {worker} is slow: {_seconds(mean[worker])} a step, the others {_seconds(median)}" for worker in new
        ]

    def table(self) -> list[dict[str, Any]]:
        """Each worker's means over the whole run."""
        steps = np.maximum(self._pulse.memory["steps"], 1)
        step, reset = (self._times[:, kind] * 1e-9 for kind in BUSY)
        return [
            {
                "worker": worker,
                "steps": int(self._pulse.memory["steps"][worker]),
                "step_s": float(step[worker] / steps[worker]),
                "reset_s": float(reset[worker] / max(count, 1)),
                "episodes": int(count),
                "episode_s": float(seconds / count) if count else None,
            }
            for worker, (count, _, seconds) in enumerate(self._episodes.tolist())
        ]

    def produced(self) -> dict[str, float | None]:
        """All episodes that ended, whatever became of their rows: against these, one sees whether long ones are missing."""
        count, steps, seconds = self._episodes.sum(axis=0).tolist()
        means = {"length_mean": steps / count, "seconds_mean": seconds / count} if count else {}
        return {"count": int(count), "length_mean": None, "seconds_mean": None} | means

    def mean_step(self) -> float:
        """Seconds of a step, resets included, over all workers and the whole run; 0 before the first fragment."""
        steps = int(self._pulse.memory["steps"].sum())
        return float(self._times[:, BUSY].sum() * 1e-9 / steps) if steps else 0.0

    def _look(self) -> None:
        now = time.monotonic()
        self._past.append((now, self._pulse.memory["steps"].copy(), self._times[:, BUSY].sum(axis=1)))
        while len(self._past) > 2 and self._past[1][0] < now - WINDOW:
            self._past.popleft()

    def _recent(self) -> NDArray:
        """[W] seconds a step lately; a step that is still going on counts as long as it has lasted."""
        (_, steps_then, busy_then), (_, steps, busy) = self._past[0], self._past[-1]
        taken = np.maximum(steps - steps_then, 1)
        mean = (busy - busy_then) * 1e-9 / taken
        at_it = np.isin(self._pulse.memory["phase"], (STEP, RESET))
        return np.asarray(np.maximum(mean, np.where(at_it, self._pulse.age() / taken, 0.0)))


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
