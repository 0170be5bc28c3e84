"""Stragglers: how long each worker's steps, resets and episodes take, and which workers are much slower than the rest."""

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
NOTICE = 1.0  # seconds: a running step counts only when it has lasted this long; the worker may have lost the processor
BUSY = [WORKER_TIME.index("step"), WORKER_TIME.index("reset")]


class Stragglers:
    """Statistics from the counters in shared memory."""

    def __init__(self, heartbeats: Heartbeats, times: NDArray) -> None:
        self._heartbeats, self._times = heartbeats, times  # [W, len(WORKER_TIME)] ns, of all incarnations
        workers = len(times)
        self._past: deque[tuple[float, NDArray, NDArray]] = deque()
        self._named: set[int] = set()
        self._episodes = np.zeros((workers, 3))  # count, steps, seconds
        self._steps, self._busy = np.zeros(workers, np.int64), np.zeros(workers, np.int64)  # ns
        self._look()

    def take(self, worker: int, episodes: Sequence[Episode]) -> None:
        """Count a worker's finished episodes."""
        for episode in episodes:
            self._episodes[worker] += 1, episode.length, episode.seconds

    def slow(self) -> list[str]:
        """A line for every worker that has become slow since the last call."""
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
        """All episodes that ended, including those whose rows were dropped: shows whether long ones are missing in training."""
        count, steps, seconds = self._episodes.sum(axis=0).tolist()
        means = {"length_mean": steps / count, "seconds_mean": seconds / count} if count else {}
        return {"count": int(count), "length_mean": None, "seconds_mean": None} | means

    def mean_step(self) -> float:
        """Seconds of a step, resets included, over all workers and the whole run; 0 before the first fragment."""
        self._align()
        return float(self._busy.sum() * 1e-9 / max(1, int(self._steps.sum())))

    def _align(self) -> None:
        """Workers add their time when they close a fragment; read their step counts only then, so that both match."""
        busy = self._times[:, BUSY].sum(axis=1)
        changed = busy != self._busy
        self._busy[changed], self._steps[changed] = busy[changed], self._heartbeats.memory["steps"][changed]

    def _look(self) -> None:
        self._align()
        now = time.monotonic()
        self._past.append((now, self._steps.copy(), self._busy.copy()))
        while len(self._past) > 2 and self._past[1][0] < now - WINDOW:
            self._past.popleft()

    def _recent(self) -> NDArray:
        """[W] mean seconds of recent steps, or of all steps where none is recent; a running step counts with its age."""
        (_, steps_then, busy_then), (_, steps, busy) = self._past[0], self._past[-1]
        taken = steps - steps_then
        mean = np.where(taken > 0, (busy - busy_then) / np.maximum(taken, 1), busy / np.maximum(steps, 1)) * 1e-9
        phase, age = self._heartbeats.memory["phase"].copy(), self._heartbeats.age()
        lasting = np.where(((phase == STEP) | (phase == RESET)) & (age >= NOTICE), age, 0.0)
        return np.asarray(np.maximum(mean, lasting / (taken + 1)))


def _median(means: NDArray) -> float:
    """Of the known means, which are above 0."""
    return float(np.median(means[means > 0])) if (means > 0).any() else 0.0


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
