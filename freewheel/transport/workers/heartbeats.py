"""Heartbeats in shared memory: each worker's phase, its start, progress and reports; and a search for slow workers."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from freewheel.core import WORKER_TIME, Episode, NDArray
from freewheel.errors import cut
from freewheel.rollout.probe import Phase
from freewheel.transport.clock import TICK, clock
from freewheel.transport.shm.memory import SharedArrays
from freewheel.transport.workers.call_tracker import call_of

PHASES = ("construct", "reset", "step", "wait")
CONSTRUCT, RESET, STEP, WAIT = range(4)
TURN = 0.5  # seconds: the longest wait of a worker before it updates its heartbeat
UNKNOWN = -1  # a seed
NO_LANES_LEFT = 4  # exit code of a worker that has given up all its lanes
REPORT_BYTES = 16384  # of a report, which is often an environment's traceback; longer ones are cut
KIND = 500  # characters that identify the kind of a report
REPORTS = 8  # unread reports of a worker; one more replaces the oldest
NUMBERS = re.compile(r"(?<!\S)(?<!lane )\S*\d\S*")


def kind(report: str) -> str:
    """Return the beginning of a report's last line, without numbers: reports of one kind are shown once."""
    return NUMBERS.sub("#", report.rstrip().rsplit("\n", 1)[-1][:KIND])


class Heartbeats:
    """The heartbeats of all workers. While a worker runs, only that worker writes its values."""

    def __init__(self, workers: int, lanes: int, name: str = "") -> None:
        """`lanes`: of each worker. `name`: of the environment, for messages."""
        self._name, self._lanes = name, lanes
        each = ((workers,), "i8")
        self.memory = SharedArrays(
            {
                "phase": each,
                "since": each,  # CLOCK_MONOTONIC ns
                "steps": each,  # of all incarnations
                "kind": each,  # of wait, in the phase WAIT: an index of WORKER_TIME, ...
                "idle": each,  # ... and ns, when it began
                "died": each,  # ns, when the previous incarnation died, ...
                "died_in": each,  # ... and its phase then
                "ready": each,  # ns, when the present incarnation had begun its first episodes
                "out_of_space": each,  # rows with an observation outside its space, of all incarnations
                "peak": each,  # kB, the largest use of memory
                "lane": each,  # which lane of the worker is being called, from 0
                "seed": ((workers, lanes), "i8"),  # of each lane's present episode
                "before": ((workers, lanes), "i8"),  # steps of the worker before that episode
                "begun": ((workers, lanes), "i8"),  # episodes begun by each lane, over all incarnations
                "reported": each,  # twice the number of reports; odd while one is being written
                "reports": ((workers, REPORTS, REPORT_BYTES), "u1"),
                "stop": ((1,), "i8"),
            }
        )
        self.memory["seed"][:] = UNKNOWN
        self._stepped, self._seen = np.zeros(workers, np.int64), np.zeros(workers)  # for `call_age`

    def enter(self, worker: int, phase: int) -> None:
        self.memory.numbers["since"][worker] = time.monotonic_ns()
        self.memory.numbers["phase"][worker] = phase

    def wait(self, worker: int, kind: int, began: int) -> None:
        """Note that a wait of this kind, which began at this time (ns), continues."""
        self.memory.numbers["kind"][worker], self.memory.numbers["idle"][worker] = kind, began
        self.enter(worker, WAIT)

    def report(self, worker: int, text: str) -> None:
        encoded = text.encode(errors="backslashreplace")
        if len(encoded) > REPORT_BYTES:
            encoded = cut(text, REPORT_BYTES - 100).encode(errors="backslashreplace")
        content = np.frombuffer(encoded[:REPORT_BYTES], np.uint8)
        reported = self.memory["reported"]
        reported[worker] |= 1  # already odd if the previous incarnation died while it wrote a report
        buffer = self.memory["reports"][worker, reported[worker] // 2 % REPORTS]
        buffer[:] = 0
        buffer[: len(content)] = content
        reported[worker] += 1

    def reports(self, worker: int, since: int) -> Iterator[str]:
        """Yield the worker's reports from this number on that are not overwritten yet."""
        count = int(self.memory["reported"][worker]) // 2
        for number in range(max(since, count - REPORTS), count):
            yield bytes(self.memory["reports"][worker, number % REPORTS]).rstrip(b"\0").decode(errors="replace")

    def last_report(self, worker: int) -> str:
        return "".join(self.reports(worker, int(self.memory["reported"][worker]) // 2 - 1))

    def age(self) -> NDArray:
        """[W] seconds since each worker entered its phase, without those in which this process was stopped."""
        return self._age(self.memory["since"] * 1e-9)

    def waited(self) -> NDArray:
        """[W] seconds since the present wait of each waiting worker began."""
        return self._age(self.memory["idle"] * 1e-9)

    def call_age(self) -> NDArray:
        """[W] as `age`, but if a worker has several lanes, since this method first saw it step its present lane. If
        several threads call this, one of them may see that one call later."""
        stepped = self.memory["steps"] * self._lanes + self.memory["lane"]
        moved = stepped != self._stepped
        self._stepped[moved], self._seen[moved] = stepped[moved], time.monotonic()
        since = self.memory["since"] * 1e-9
        return self._age(np.maximum(since, self._seen) if self._lanes > 1 else since)

    def call(self, worker: int) -> str:
        """Describe a worker's call, so that the user can repeat it; empty if it is not known."""
        memory, lane = self.memory, int(self.memory["lane"][worker])
        phase, seed = PHASES[memory["phase"][worker]], int(memory["seed"][worker, lane])
        if phase == "wait" or (seed == UNKNOWN and phase != "construct") or not self._name:
            return ""
        return f"{call_of(phase, seed, self.step(worker))} (lane {worker * self._lanes + lane} of {self._name})"

    def step(self, worker: int) -> int:
        """Return which step of its episode a worker makes now or next; 0 in a reset."""
        memory, lane = self.memory, int(self.memory["lane"][worker])
        if memory["phase"][worker] == RESET:
            return 0
        return int(memory["steps"][worker] - memory["before"][worker, lane]) + 1

    def _age(self, since: NDArray) -> NDArray:
        now = time.monotonic_ns() * 1e-9
        age = now - since
        for began, ended in clock.not_counted(now):
            age -= (min(ended, now) - np.maximum(began, since)).clip(min=0.0)
        return np.asarray(age)

    @property
    def stopping(self) -> bool:
        return bool(self.memory.numbers["stop"][0])

    def stop(self) -> None:
        self.memory["stop"][0] = 1

    def close(self) -> None:
        self.memory.close()


class LaneCalls:
    """Records which call of which lane a worker makes, for core.Env.watch. Implements rollout.probe.Watch for the
    construction of lanes."""

    def __init__(self, heartbeats: Heartbeats, worker: int, lanes: range) -> None:
        self._heartbeats, self._worker, self._first, memory = heartbeats, worker, lanes.start, heartbeats.memory
        self.lane, self._steps = memory.cells("lane", worker), memory.cells("steps", worker)
        self._seeds, self._before = memory.cells("seed", worker), memory.cells("before", worker)

    def __call__(self, phase: Phase, episode: int, step: int) -> None:
        """Note the construction of a lane: `episode` is its number. The first one is also reset, once, with seed 0."""
        if phase == "reset":
            self.reset(0, 0)
            return
        self.lane[0] = episode - self._first
        self._heartbeats.enter(self._worker, CONSTRUCT)

    def reset(self, lane: int, seed: int) -> None:
        self.lane[0], self._seeds[lane], self._before[lane] = lane, seed, self._steps[0]
        self._heartbeats.enter(self._worker, RESET)


WINDOW = 5.0  # seconds over which steps are averaged
SLOW = 10.0  # times the median of the others
NOTICE = 1.0  # seconds: a shorter running step does not count, because the worker may have lost the processor
PAUSE_ERROR = int(2 * TICK * 1e9)  # ns: the error of the length of a pause
BUSY = [WORKER_TIME.index("step"), WORKER_TIME.index("reset")]


class Stragglers:
    """Statistics of workers, from the counters in shared memory."""

    def __init__(self, heartbeats: Heartbeats, times: NDArray) -> None:
        self._heartbeats, self._times = heartbeats, times  # [W, len(WORKER_TIME)] ns, of all incarnations
        workers = len(times)
        self._past: deque[tuple[float, NDArray, NDArray]] = deque()
        self._named: set[int] = set()
        self._episodes = np.zeros((workers, 3))  # count, steps, seconds
        self._steps, self._busy = np.zeros(workers, np.int64), np.zeros(workers, np.int64)  # ns
        self._counted = np.zeros(
            workers, np.int64
        )  # ns of step and reset as the workers have counted them, with pauses
        self._pauses = len(clock.pauses)  # pauses that were processed
        self._asleep: list[list[int]] = [
            [] for _ in range(workers)
        ]  # ns of pauses that may be in the time that each adds next
        self._look()

    def close(self) -> None:
        """Keep a copy of the last times and release their memory."""
        self._times = self._times.copy()

    def take(self, worker: int, episodes: Sequence[Episode]) -> None:
        """Count a worker's finished episodes."""
        for episode in episodes:
            self._episodes[worker] += 1, episode.length, episode.seconds

    def slow(self) -> list[str]:
        """Return a line for every worker that has become slow since the last call."""
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
        """Return each worker's means over the whole run."""
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
        """Return means of all ended episodes, dropped ones included: they show whether training lacks long episodes."""
        count, steps, seconds = self._episodes.sum(axis=0).tolist()
        means = {"length_mean": steps / count, "seconds_mean": seconds / count} if count else {}
        return {"count": int(count), "length_mean": None, "seconds_mean": None} | means

    def mean_step(self) -> float:
        """Return the mean seconds of a step, resets included, over the whole run; 0 before the first fragment."""
        self._align()
        return float(self._busy.sum() * 1e-9 / max(1, int(self._steps.sum())))

    def _align(self) -> None:
        """Workers add their time when they close a fragment. Read their step counts only then, so that both match.

        A worker's time contains pauses of the whole run, which are subtracted.
        """
        if clock.behind(time.monotonic()):
            return
        for pause in clock.pauses[self._pauses :]:
            for pending in self._asleep:
                pending.append(int(pause.seconds * 1e9))
            self._pauses += 1
        counted = self._times[:, BUSY].sum(axis=1)
        added = counted - self._counted
        changed = added > 0
        slept = np.array([_slept(*one) for one in zip(self._asleep, added.tolist(), strict=True)])
        self._counted, self._busy = counted, self._busy + added - slept
        self._steps[changed] = self._heartbeats.memory["steps"][changed]

    def _look(self) -> None:
        self._align()
        now = time.monotonic()
        self._past.append((now, self._steps.copy(), self._busy.copy()))
        while len(self._past) > 2 and self._past[1][0] < now - WINDOW:
            self._past.popleft()

    def _recent(self) -> NDArray:
        """[W] mean seconds of recent steps, or of all steps if none is recent. A running step counts with its age. The
        possible rest of a pause in a worker's time does not count."""
        (since, steps_then, busy_then), (_, steps, busy) = self._past[0], self._past[-1]
        taken, left = steps - steps_then, PAUSE_ERROR * sum(pause.ended > since for pause in clock.pauses)
        spent = np.maximum(busy - busy_then - left, 0)
        mean = np.where(taken > 0, spent / np.maximum(taken, 1), busy / np.maximum(steps, 1)) * 1e-9
        phase, age = self._heartbeats.memory["phase"].copy(), self._heartbeats.age()
        lasting = np.where(((phase == STEP) | (phase == RESET)) & (age >= NOTICE), age, 0.0)
        return np.asarray(np.maximum(mean, lasting / (taken + 1)))


def _slept(pending: list[int], added: int) -> int:
    """Return how much of a worker's added time was pauses: all that fit in. Remove these and earlier ones."""
    slept = done = 0
    for number, pause in enumerate(pending, 1):
        if pause - PAUSE_ERROR < added - slept:
            slept, done = slept + min(pause, added - slept), number
    del pending[:done]
    return slept


def _median(means: NDArray) -> float:
    """Return the median of the known means, which are above 0."""
    return float(np.median(means[means > 0])) if (means > 0).any() else 0.0


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
