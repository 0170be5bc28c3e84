"""What is known about a run: counters, windows, where the time went; the only place where a tensor becomes a float."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from freewheel.core import LEARNER_TIME, WORKER_TIME, Metrics, NDArray, RowCounts, Tick
from freewheel.rollout.probe import usable_cores

#: Totals that a learner reports as they stand.
COUNTS = ("real_data", "model_data", "agent_updates", "dynamics_updates")
WINDOW = 100  # finished episodes behind return_mean and length_mean


@dataclass(frozen=True)
class Budget:
    """When a run is done: at whichever limit comes first; without any it runs until it is stopped."""

    steps: int | None = None
    minutes: float | None = None
    episodes: int | None = None

    def progress(self, env_steps: int, wall_s: float, episodes: int) -> float:
        """How far the run has come, 0 to 1."""
        spent = ((env_steps, self.steps), (wall_s / 60, self.minutes), (episodes, self.episodes))
        done = (min(used / limit, 1.0) if limit > 0 else 1.0 for used, limit in spent if limit is not None)
        return max(done, default=0.0)


class Timeline:
    """One thread's time, cut at every start and end of a span: each second belongs to exactly one kind."""

    __slots__ = ("kind", "now", "outer", "seconds", "since")

    def __init__(self, kinds: tuple[str, ...], idle: str, now: Callable[[], float]) -> None:
        self.seconds = dict.fromkeys(kinds, 0.0)
        self.kind = idle
        self.outer: list[str] = []  # the kinds that wait for the present one to end
        self.now = now
        self.since = now()

    def cut(self) -> float:
        """Book the time since the last cut and return the present."""
        now = self.now()
        self.seconds[self.kind] += now - self.since
        self.since = now
        return now


class Span:
    """A `with` block of one kind; an inner span takes its time out of the outer one. May be entered again and again."""

    __slots__ = ("_kind", "_line")

    def __init__(self, line: Timeline, kind: str) -> None:
        self._line = line
        self._kind = kind

    def __enter__(self) -> None:
        line = self._line
        line.cut()
        line.outer.append(line.kind)
        line.kind = self._kind

    def __exit__(self, *exception: object) -> None:
        line = self._line
        line.cut()
        line.kind = line.outer.pop()


@dataclass
class _Interval:
    """What came in since the last row."""

    began: float
    cpu: float  # CPU seconds used by all our processes when it began
    learner: Mapping[str, float]  # learner seconds by kind when it began
    steps: int = 0
    episodes: int = 0
    updates: int = 0
    worker: NDArray = field(default_factory=lambda: np.zeros(len(WORKER_TIME), np.int64))  # ns by kind
    sums: dict[str, Any] = field(default_factory=dict)  # of update metrics: scalars of any library, on any device
    counts: dict[str, int] = field(default_factory=dict)
    lag_max: float | None = None

    def mean(self, key: str) -> float | None:
        return _finite(float(self.sums[key]) / self.counts[key]) if key in self.sums else None


class Meter:
    """Takes every tick of the loop, gives one row of metrics per interval and the totals at the end."""

    def __init__(
        self, workers: int, measures: Sequence[str] = (), now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._workers = workers
        self._measures: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in measures}
        self._learner = Timeline(LEARNER_TIME, "other", now)
        self._spans = {kind: Span(self._learner, kind) for kind in LEARNER_TIME}
        self._began = self._learner.since
        self._env_steps = 0
        self._episodes = 0
        self._updates = 0
        self._worker = np.zeros(len(WORKER_TIME), np.int64)
        self._played = [0.0, 0.0]  # steps and seconds of all finished episodes
        self._returns: deque[float] = deque(maxlen=WINDOW)
        self._lengths: deque[float] = deque(maxlen=WINDOW)
        self._lag_max: float | None = None
        self._counts: dict[str, int] = {}
        self._buffer: float | None = None  # how full a replay buffer is
        self._eval: float | None = None
        self._eval_measures: dict[str, float | None] = {}
        self._best: float | None = None
        self._interval = self._open(self._began)

    @property
    def wall_s(self) -> float:
        """Seconds since the run began."""
        return self._learner.now() - self._began

    @property
    def doing(self) -> str:
        """The kind of LEARNER_TIME that is running."""
        return self._learner.kind

    @property
    def episodes(self) -> int:
        return self._episodes

    def span(self, kind: str) -> Span:
        """`with meter.span("update"): ...` for a kind of LEARNER_TIME."""
        return self._spans[kind]

    def take(self, tick: Tick) -> None:
        """Book one turn of the loop."""
        interval = self._interval
        for chunk in tick.chunks:
            self._env_steps += chunk.rows
            self._episodes += len(chunk.episodes)
            interval.steps += chunk.rows
            interval.episodes += len(chunk.episodes)
            interval.worker += chunk.time
            for episode in chunk.episodes:
                self._returns.append(episode.ret)
                self._lengths.append(episode.length)
                self._played[0] += episode.length
                self._played[1] += episode.seconds
                for window, value in zip(self._measures.values(), episode.measures, strict=False):
                    window.append(value)
        if tick.metrics is not None:
            updates = int(tick.metrics.get("updates", 1))
            interval.updates += updates
            self._updates += updates
            self._learned(tick.metrics)

    def _learned(self, metrics: Metrics) -> None:
        interval = self._interval
        for key, value in metrics.items():
            if key in COUNTS:
                self._counts[key] = int(value)
            elif key == "buffer_util":
                self._buffer = float(value)
            elif key.startswith("loss/") or key == "lag_mean":
                # A new value, never a reference: a learner may overwrite its own tensors; and no wait for the device.
                interval.sums[key] = interval.sums.get(key, 0.0) + value
                interval.counts[key] = interval.counts.get(key, 0) + 1
        if "lag_max" in metrics:
            interval.lag_max = _greater(interval.lag_max, float(metrics["lag_max"]))
            self._lag_max = _greater(self._lag_max, interval.lag_max)

    def eval_result(self, mean: float, measures: Mapping[str, float] | None = None) -> None:
        """The mean greedy return of an evaluation: later rows carry the newest, the totals the best."""
        self._eval = _finite(float(mean))
        self._eval_measures = {f"eval/{name}": _finite(value) for name, value in (measures or {}).items()}
        self._best = _greater(self._best, self._eval)

    def row(self, rows: RowCounts, stats: Mapping[str, float | None], buffer_util: float | None) -> dict[str, Any]:
        """Close the interval: one line of metrics.jsonl."""
        now = self._learner.cut()
        interval, self._interval = self._interval, self._open(now)
        self._worker += interval.worker
        wall = now - interval.began
        busy = sum(self._learner.seconds[kind] - interval.learner[kind] for kind in ("observe", "update", "publish"))
        stepping = sum(int(interval.worker[WORKER_TIME.index(kind)]) for kind in ("step", "reset"))
        cpu = max(self._interval.cpu - interval.cpu, 0.0)  # where a child's time ends with it, the sum may shrink
        return {
            "wall_s": now - self._began,
            "env_steps": self._env_steps,
            "episodes": self._episodes,
            "updates": self._updates,
            "steps_per_s": _ratio(interval.steps, wall),
            "episodes_per_s": _ratio(interval.episodes, wall),
            "updates_per_s": _ratio(interval.updates, wall),
            "return_mean": _mean(self._returns),
            "length_mean": _mean(self._lengths),
            "lag_mean": interval.mean("lag_mean"),
            "lag_max": interval.lag_max,
            "queue_util": _finite(stats.get("queue_util")),
            "buffer_util": _finite(buffer_util if self._buffer is None else self._buffer),
            "cpu_util": _ratio(cpu, wall * usable_cores()),
            "gpu_util": _gpu_util(),
            "env_busy": _ratio(stepping, int(interval.worker.sum())),
            "learner_busy": _ratio(busy, wall),
            "produced": rows.produced,
            "trained": rows.trained,
            "queued": rows.queued,
            "open": rows.open,
            "dropped": dict(rows.dropped),
            **self._counts,
            **{f"measure/{name}": _mean([v for v in own if not math.isnan(v)]) for name, own in self._measures.items()},
            **({} if self._eval is None else {"eval_return": self._eval, **self._eval_measures}),
            **{key: interval.mean(key) for key in interval.sums if key.startswith("loss/")},
        }

    def shares(self) -> dict[str, dict[str, float]]:
        """Where every second of the run went; workers and learner each add to 1."""
        wall = self._learner.cut() - self._began
        worker = dict(zip(WORKER_TIME, ((self._worker + self._interval.worker) / 1e9).tolist(), strict=True))
        worker["other"] += max(self._workers * wall - sum(worker.values()), 0.0)
        return {"worker": _shares(worker), "learner": _shares(self._learner.seconds)}

    def totals(self) -> dict[str, Any]:
        """The whole run in numbers, for summary.json."""
        wall = self._learner.cut() - self._began
        return {
            "wall_s": wall,
            "env_steps": self._env_steps,
            "episodes": self._episodes,
            "updates": self._updates,
            "steps_per_s": _ratio(self._env_steps, wall),
            "episodes_per_s": _ratio(self._episodes, wall),
            "updates_per_s": _ratio(self._updates, wall),
            "return_mean": _mean(self._returns),
            "lag_max": self._lag_max,
            "best_eval": self._best,
            **self._counts,
            **self._eval_measures,
            "episodes_trained": {
                "count": self._episodes,
                "length_mean": _ratio(self._played[0], self._episodes),
                "seconds_mean": _ratio(self._played[1], self._episodes),
            },
        }

    def _open(self, now: float) -> _Interval:
        return _Interval(began=now, cpu=_cpu_seconds(), learner=dict(self._learner.seconds))


def _finite(value: float | None) -> float | None:
    """JSON has no NaN: what is not a number is null."""
    return float(value) if value is not None and math.isfinite(value) else None


def _ratio(part: float, whole: float) -> float | None:
    return _finite(part / whole) if whole > 0 else None


def _mean(values: Collection[float]) -> float | None:
    return _finite(sum(values) / len(values)) if values else None


def _greater(known: float | None, new: float | None) -> float | None:
    return new if known is None else known if new is None else max(known, new)


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    whole = math.fsum(seconds.values())
    return {kind: part / whole if whole > 0 else float(kind == "other") for kind, part in seconds.items()}


def _cpu_seconds() -> float:
    """CPU time of this process and all below it; the time of a child that ended passes to whoever waited for it."""
    own = psutil.Process()
    seconds = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            seconds += sum(process.cpu_times()[:4])  # user, system, and both of its ended children
        except psutil.Error:  # it ended meanwhile
            continue
    return seconds


def _gpu_util() -> float | None:
    """Busy share of the GPU, if this process uses one and can ask; torch is never imported for it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        return float(torch.cuda.utilization()) / 100
    except Exception:  # noqa: BLE001 - no NVML, no permission, a virtual device: whatever it is, the figure is unknown
        return None
