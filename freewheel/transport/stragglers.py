"""Stragglers: how long each worker's steps, resets and episodes take, and who is far slower than the rest."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from freewheel.core import WORKER_TIME, Episode, NDArray
from freewheel.transport.shm.heartbeats import RESET, STEP, Heartbeats

WINDOW = 5.0  # seconds over which steps are averaged
SLOW = 10.0  # times the median of the others
NOTICE = 1.0  # seconds: a step that has not lasted so long yet says nothing, its worker may have lost the processor
BUSY = [WORKER_TIME.index("step"), WORKER_TIME.index("reset")]


class Stragglers:
    """Looks at counters that the workers keep anyway."""

    def __init__(self, heartbeats: Heartbeats, times: NDArray) -> None:
        self._heartbeats, self._times = heartbeats, times  # [W, len(WORKER_TIME)] ns, of all incarnations
        workers = len(times)
        self._past: deque[tuple[float, NDArray, NDArray]] = deque()
        self._named: set[int] = set()
        self._episodes = np.zeros((workers, 3))  # count, steps, seconds
        self._steps, self._busy = np.zeros(workers, np.int64), np.zeros(workers, np.int64)  # ns
        self._look()

    def take(self, worker: int, episodes: Sequence[Episode]) -> None:
        """Book a worker's finished episodes."""
        for episode in episodes:
            self._episodes[worker] += 1, episode.length, episode.seconds

    def slow(self) -> list[str]:
        """A line for every worker that has become slow since this was last asked."""
        self._look()
        mean = self._recent()
        known = mean > 0
        suspects = np.flatnonzero(mean > SLOW * mean[known].min()).tolist() if known.any() else []
        others = {worker: _median(np.delete(mean, worker)) for worker in suspects}
        slow = {worker for worker, median in others.items() if 0 < SLOW * median < mean[worker]}
        new, self._named = sorted(slow - self._named), slow
        return [
            f"worker {worker} is slow: {_seconds(mean[worker])} a step, the others {_seconds(others[worker])}"
            for worker in new
        ]

    def table(self) -> list[dict[str, Any]]:
        """Each worker's means over the whole run."""
        steps = np.maximum(self._heartbeats.memory["steps"], 1)
        step, reset = (self._times[:, kind] * 1e-9 for kind in BUSY)
        return [
            {
                "worker": worker,
                "steps": int(self._heartbeats.memory["steps"][worker]),
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
        self._align()
        return float(self._busy.sum() * 1e-9 / max(1, int(self._steps.sum())))

    def _align(self) -> None:
        """Time is booked when a fragment is closed: only then are steps counted, or the two would not belong together."""
        busy = self._times[:, BUSY].sum(axis=1)
        booked = busy != self._busy
        self._busy[booked], self._steps[booked] = busy[booked], self._heartbeats.memory["steps"][booked]

    def _look(self) -> None:
        self._align()
        now = time.monotonic()
        self._past.append((now, self._steps.copy(), self._busy.copy()))
        while len(self._past) > 2 and self._past[1][0] < now - WINDOW:
            self._past.popleft()

    def _recent(self) -> NDArray:
        """[W] seconds a step lately, or ever where none ended lately; one that is going on counts as long as it has lasted."""
        (_, steps_then, busy_then), (_, steps, busy) = self._past[0], self._past[-1]
        taken = steps - steps_then
        mean = np.where(taken > 0, (busy - busy_then) / np.maximum(taken, 1), busy / np.maximum(steps, 1)) * 1e-9
        phase, age = self._heartbeats.memory["phase"].copy(), self._heartbeats.age()
        lasting = np.where(((phase == STEP) | (phase == RESET)) & (age >= NOTICE), age, 0.0)
        return np.asarray(np.maximum(mean, lasting / (taken + 1)))


def _median(means: NDArray) -> float:
    """Of those that are known."""
    return float(np.median(means[means > 0])) if (means > 0).any() else 0.0


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
