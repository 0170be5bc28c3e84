"""The meter: counters, windows and time shares of a run. Only the meter converts tensors of metrics to floats."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, SupportsFloat

import numpy as np

from freewheel.core import LEARNER_TIME, WORKER_TIME, Chunk, Metrics, NDArray, RowCounts, Tick
from freewheel.metrics.load import GPU_METRICS, gpu_util, usage
from freewheel.metrics.names import COUNTS, WORKING, describe
from freewheel.rollout.probe import usable_cores

ABOUT_EVAL = ("eval_return", "eval/return_std", "eval/step")  # the summary has these under other names
PACE, MOST = 10.0, 100  # averaging window of rates: seconds, and rows of metrics, at most
WINDOW = 100  # episodes in return_mean, length_mean and the measures, at most
STEPPING = ("step", "infer", "write")  # kinds of a worker's time from its first step on
LEAST, PART = 10, 10  # ... but only the newest 1 / PART of all, at least LEAST: older policies played the others


@dataclass(frozen=True)
class Budget:
    """The limits of a run, which ends at the first one it reaches. Without limits it runs until it is stopped."""

    steps: int | None = None
    minutes: float | None = None
    episodes: int | None = None

    def progress(self, env_steps: int, wall_s: float, episodes: int) -> float:
        """Return the progress of the run, 0 to 1."""
        spent = ((env_steps, self.steps), (wall_s / 60, self.minutes), (episodes, self.episodes))
        done = (min(used / limit, 1.0) if limit > 0 else 1.0 for used, limit in spent if limit is not None)
        return max(done, default=0.0)


class LearnerTime:
    """The learner's time, split at the start and end of every span. Each second belongs to exactly one kind."""

    __slots__ = ("began", "kind", "now", "outer", "record", "seconds", "since")

    def __init__(self, now: Callable[[], float]) -> None:
        self.seconds, self.kind = dict.fromkeys(LEARNER_TIME, 0.0), "other"
        self.outer: list[str] = []  # the enclosing kinds, which continue when the present one ends
        self.now, self.since = now, now()
        self.began = self.since  # when the present kind began
        self.record: Callable[[str, float, float], None] | None = None  # called with a kind, its begin and its end

    def cut(self) -> float:
        """Count the time since the last cut for the present kind. Return the present time."""
        now = self.now()
        self.seconds[self.kind] += now - self.since
        if self.record is not None:
            self.record(self.kind, self.since, now)
        self.since = now
        return now


class MeterSpan:
    """A reusable `with` block for one kind of time. The time of an inner span does not count for the outer one."""

    __slots__ = ("_kind", "_line")

    def __init__(self, line: LearnerTime, kind: str) -> None:
        self._line, self._kind = line, kind

    def __enter__(self) -> None:
        line = self._line
        line.began = line.cut()
        line.outer.append(line.kind)
        line.kind = self._kind

    def __exit__(self, *exception: object) -> None:
        self._line.began = self._line.cut()
        self._line.kind = self._line.outer.pop()


@dataclass
class _Interval:
    """The counters when the last row was closed, and all metrics since then."""

    began: float
    cpu_s: float  # CPU seconds of all processes of the run at `cpu_since`
    cpu_since: float  # later than `began` in the first interval of a resumed run
    learner: Mapping[str, float]  # learner seconds by kind
    worker: NDArray = field(default_factory=lambda: np.zeros(len(WORKER_TIME), np.int64))  # ns by kind
    sums: dict[str, Any] = field(default_factory=dict)  # of update metrics: scalars of any library, on any device
    counts: dict[str, int] = field(default_factory=dict)
    greatest: dict[str, float] = field(default_factory=dict)
    logged: dict[str, list[float]] = field(default_factory=dict)  # by hooks: sum and count

    def logged_means(self) -> dict[str, float | None]:
        return {name: _finite(total / count) for name, (total, count) in self.logged.items()}


class Meter:
    """Counts every tick of the loop, and returns one row of metrics per interval and the totals at the end."""

    def __init__(
        self,
        workers: int,
        measures: Sequence[str] = (),
        now: Callable[[], float] = time.perf_counter,
        gpus: Sequence[str] = (),
    ) -> None:
        """gpus: the learner's GPU, if it has one, and the simulator's GPU if that is a different one."""
        self._workers, self._gpus = workers, gpus
        self._measures: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in measures}
        self._learner = LearnerTime(now)
        self._spans = {kind: MeterSpan(self._learner, kind) for kind in LEARNER_TIME}
        self._began = self._learner.since
        self.done = dict.fromkeys(("env_steps", "episodes", "updates"), 0)
        self._worker = np.zeros(len(WORKER_TIME), np.int64)
        self._played = np.zeros(2)  # total steps and seconds of all finished episodes
        self._returns, self._lengths = deque[float](maxlen=WINDOW), deque[float](maxlen=WINDOW)
        self._lag_max: float | None = None
        self._latest: dict[str, float | None] = {}  # newest values of the metrics whose aggregate is "last"
        self._eval: dict[str, float | None] = {}
        self._logged: dict[str, float | None] = {}  # newest values of all metrics that hooks have logged
        self._taken: set[str] = set()  # names in rows so far, without those that hooks have logged
        self._first_step: float | None = None  # seconds after the begin of the run
        self._training: float | None = None  # seconds of training when the loop had ended
        self._interval = self._next_interval(self._began)
        self._counted = deque([(0.0, dict(self.done))], MOST)  # seconds and counts of the newest rows

    def begin(self) -> None:
        """Begin the run and its time now. Time that was measured before does not count."""
        line = self._learner
        line.seconds |= dict.fromkeys(LEARNER_TIME, 0.0)
        self._began = line.since = line.now()
        self._interval = self._next_interval(self._began)
        self._counted = deque([(0.0, dict(self.done))], MOST)

    def spare(self, seconds: float) -> None:
        """Exclude this many seconds before now from the time of the run."""
        line = self._learner
        line.cut()
        line.seconds[line.kind] -= seconds
        self._began += seconds
        self._interval.began += seconds

    def record(self, told: Callable[[str, float, float], None]) -> None:
        """Call `told` for every span of the learner from now on, with its kind, begin and end in seconds."""
        self._learner.cut()
        self._learner.record = told

    @property
    def present(self) -> tuple[str, float, float]:
        """Return the unfinished span: its kind, its begin, and the present time. Any thread may read it."""
        line = self._learner
        return line.kind, line.since, line.now()

    @property
    def wall_s(self) -> float:
        """Return the seconds since the run began."""
        return self._learner.now() - self._began

    @property
    def doing(self) -> str:
        """Return the present kind of LEARNER_TIME."""
        return self._learner.kind

    @property
    def doing_s(self) -> float:
        """Return the seconds since the present kind began."""
        return max(0.0, self._learner.now() - self._learner.began)

    @property
    def episodes(self) -> int:
        return self.done["episodes"]

    @property
    def longest(self) -> int | None:
        """Return the steps of the longest of the last 100 episodes; None: no episode has ended."""
        return int(max(self._lengths)) if self._lengths else None

    def span(self, kind: str) -> MeterSpan:
        """Return the span of a kind of LEARNER_TIME: `with meter.span("update"): ...`."""
        return self._spans[kind]

    def take(self, tick: Tick) -> None:
        """Count one turn of the loop."""
        if self._first_step is None and tick.chunks:
            self._first_step = self._began_to_step(tick.chunks)
        for chunk in tick.chunks:
            self.done["env_steps"] += chunk.rows
            self.done["episodes"] += len(chunk.episodes)
            self._interval.worker += chunk.time
            for episode in chunk.episodes:
                self._returns.append(episode.ret)
                self._lengths.append(episode.length)
                self._played += (episode.length, episode.seconds)
                for window, value in zip(self._measures.values(), episode.measures, strict=False):
                    window.append(value)
        if tick.metrics is not None:
            self.done["updates"] += int(tick.metrics.get("updates", 1))
            self._learned(tick.metrics)

    def add(self, env_steps: int, episodes: int, played: Sequence[tuple[float, float]] = ()) -> None:
        """Count the work of other learners. played: returns and lengths of their latest episodes."""
        self.done["env_steps"] += env_steps
        self.done["episodes"] += episodes
        for ret, length in played:
            self._returns.append(ret)
            self._lengths.append(length)

    def end_training(self) -> None:
        """Fix the training time. Only the last evaluations and checkpoints follow."""
        self._training = self._training_s()

    def _training_s(self) -> float:
        """Return the seconds since the first step that were not spent on evaluations and checkpoints."""
        spent = self._learner.cut() - self._began - (self._first_step or 0.0)
        return max(0.0, spent - self._learner.seconds["eval"] - self._learner.seconds["save"])

    def _began_to_step(self, chunks: Sequence[Chunk[Any]]) -> float:
        """Estimate when the first steps began, from the chunk that took longest: it has waited least since its end."""
        took = max(sum(chunk.time[WORKER_TIME.index(kind)] for kind in STEPPING) for chunk in chunks) / 1e9
        return max(0.0, self.wall_s - float(took))

    def _learned(self, metrics: Metrics) -> None:
        interval = self._interval
        for name, value in metrics.items():
            if name == "updates":
                continue
            metric = describe(name)
            if metric is None or metric.aggregate == "mean":
                # The sum is a new value, because a learner may overwrite its tensors. It does not wait for the device.
                interval.sums[name] = interval.sums.get(name, 0.0) + value
                interval.counts[name] = interval.counts.get(name, 0) + 1
            elif metric.aggregate == "max":
                interval.greatest[name] = max(interval.greatest.get(name, -math.inf), float(value))
            else:
                self._latest[name] = value if isinstance(value, int) else _finite(float(value))
        if "lag_max" in interval.greatest:
            self._lag_max = _greater(self._lag_max, interval.greatest["lag_max"])

    def log(self, name: str, value: SupportsFloat) -> None:
        """Log a metric of the user as a mean over the interval. ValueError: the name is invalid or taken."""
        number, own = float(value), self._interval.logged.get(name)
        if own is None:
            if not isinstance(name, str) or not name:
                raise ValueError(f"the name of a metric must be a non-empty string, not {name!r}")
            if describe(name) is not None or name in self._taken:
                raise ValueError(
                    f"the metric name '{name}' is reserved: log your metric as 'my/{name}' or under another name"
                )
            own = self._interval.logged[name] = [0.0, 0]
        own[0] += number
        own[1] += 1

    def eval_result(self, mean: float, measures: Mapping[str, float] | None = None) -> None:
        """Keep the mean greedy return of an evaluation for all later rows."""
        value = _finite(float(mean))
        found = {f"eval/{name}": _finite(measure) for name, measure in (measures or {}).items()}
        self._eval = {} if value is None else {"eval_return": value, **found}

    def row(self, rows: RowCounts, stats: Mapping[str, float | None], buffer_util: float | None) -> dict[str, Any]:
        """Close the interval and return one row of metrics.jsonl."""
        now, used = self._learner.cut(), usage()
        interval = self._interval
        self._interval = self._next_interval(now, used.cpu_s)
        self._worker += interval.worker
        wall = now - interval.began
        learner = {kind: seconds - interval.learner[kind] for kind, seconds in self._learner.seconds.items()}
        worker = dict(zip(WORKER_TIME, interval.worker.tolist(), strict=True))
        row = {
            "wall_s": now - self._began,
            **self.done,
            **self._pace(now - self._began, rows.produced),
            **self._recent(),
            "lag_mean": None,
            "lag_max": None,
            "queue_util": None,
            "buffer_util": _finite(buffer_util),
            # The sum shrinks if the time of an ended child is lost.
            "cpu_util": _ratio(max(used.cpu_s - interval.cpu_s, 0.0), (now - interval.cpu_since) * usable_cores()),
            "gpu_util": None,
            **{name: gpu_util(device) for name, device in zip(GPU_METRICS, self._gpus, strict=False)},
            "env_busy": _ratio(worker["step"] + worker["reset"], sum(worker.values())),
            "learner_busy": _ratio(sum(learner[kind] for kind in WORKING), wall),
            **asdict(rows),
            **{name: _finite(value) for name, value in stats.items()},
            **self._latest,
            **{name: _finite(float(total) / interval.counts[name]) for name, total in interval.sums.items()},
            **{name: _finite(value) for name, value in interval.greatest.items()},
            **{f"measure/{name}": _mean(self._newest(own)) for name, own in self._measures.items()},
            **self._eval,
            **_times("learner", learner, wall),
            **_times("worker", worker, sum(worker.values())),
            "memory/trainer_mb": used.trainer_mb,
            "memory/workers_mb": used.workers_mb,
        }
        self._taken.update(row)
        own = interval.logged_means()
        self._logged |= own
        return row | own

    def _pace(self, wall: float, produced: int) -> dict[str, float | None]:
        """Return the rates over the last seconds. Steps count when they are taken, not when a fragment is delivered."""
        counts, known = {**self.done, "env_steps": produced}, self._counted
        while len(known) > 1 and known[1][0] <= wall - PACE:
            known.popleft()
        since, before = known[0]
        known.append((wall, counts))
        return _rates({name: max(count - before[name], 0) for name, count in counts.items()}, wall - since)

    def _next_interval(self, now: float, cpu_s: float | None = None) -> _Interval:
        used = usage().cpu_s if cpu_s is None else cpu_s
        return _Interval(now, used, now, dict(self._learner.seconds))

    def state(self) -> dict[str, Any]:
        """Return the state that a later session resumes from, for JSON."""
        wall, interval = self._learner.cut() - self._began, self._interval
        return {
            "wall_s": wall,
            "learner_s": dict(self._learner.seconds),
            "worker_ns": self._worker.tolist(),
            "done": dict(self.done),
            "counted": list(self._counted),
            "played": self._played.tolist(),
            "returns": [_number(value) for value in self._returns],
            "lengths": list(self._lengths),
            "measures": {name: [_number(value) for value in window] for name, window in self._measures.items()},
            "first_step_s": self._first_step,
            "lag_max": self._lag_max,
            "latest": dict(self._latest),
            "eval": dict(self._eval),
            "logged": dict(self._logged),
            "taken": sorted(self._taken),
            "interval": {
                "began_s": interval.began - self._began,
                "learner_s": dict(interval.learner),
                "worker_ns": interval.worker.tolist(),
                "sums": {name: _number(total) for name, total in interval.sums.items()},
                "counts": dict(interval.counts),
                "greatest": {name: _number(value) for name, value in interval.greatest.items()},
                "logged": {name: [_number(total), count] for name, (total, count) in interval.logged.items()},
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of an earlier session, as if no time had passed. Call this before the first tick."""
        line, interval = self._learner, state["interval"]
        now = line.cut()
        self._began = now - state["wall_s"]
        line.seconds |= state["learner_s"]
        self._worker[:] = state["worker_ns"]
        self.done |= state["done"]
        earlier = state.get("counted") or [(interval["began_s"], interval["done"])]  # the format of earlier versions
        self._counted = deque(((wall, counts) for wall, counts in earlier), MOST)
        self._played[:] = state["played"]
        self._returns.extend(map(float, state["returns"]))
        self._lengths.extend(state["lengths"])
        for name, window in state["measures"].items():
            if name in self._measures:
                self._measures[name].extend(map(float, window))
        self._lag_max, self._latest, self._eval = state["lag_max"], dict(state["latest"]), dict(state["eval"])
        self._first_step = state.get("first_step_s", 0.0)  # earlier versions did not save it
        self._logged, self._taken = dict(state["logged"]), set(state["taken"])
        self._interval = _Interval(
            began=self._began + interval["began_s"],
            cpu_s=usage().cpu_s,
            cpu_since=now,
            learner=dict(interval["learner_s"]),
            worker=np.array(interval["worker_ns"], np.int64),
            sums={name: float(total) for name, total in interval["sums"].items()},
            counts=dict(interval["counts"]),
            greatest={name: float(value) for name, value in interval["greatest"].items()},
            logged={name: [float(total), count] for name, (total, count) in interval["logged"].items()},
        )

    def _newest(self, window: deque[float]) -> list[float]:
        """Return the part of a window that rows show. NaN marks an episode without the measure."""
        shown = min(WINDOW, max(LEAST, self.episodes // PART))
        return [value for value in list(window)[-shown:] if not math.isnan(value)]

    def _recent(self) -> dict[str, float | int | None]:
        """Return the means over the latest training episodes, and the number of these."""
        returns, lengths = list(self._returns), self._newest(self._lengths)
        return {
            "return_mean": _mean(returns[-len(lengths) :]),
            "return_episodes": len(lengths),
            "length_mean": _mean(lengths),
        }

    def shares(self) -> dict[str, dict[str, float]]:
        """Return the shares of time of the whole run. Those of workers and of the learner each add up to 1."""
        wall = self._learner.cut() - self._began
        worker = dict(zip(WORKER_TIME, ((self._worker + self._interval.worker) / 1e9).tolist(), strict=True))
        worker["other"] += max(self._workers * wall - sum(worker.values()), 0.0)
        return {"worker": _shares(worker), "learner": _shares(self._learner.seconds)}

    def totals(self) -> dict[str, Any]:
        """Return the totals of the run for summary.json."""
        wall = self._learner.cut() - self._began
        length, seconds = (_ratio(total, self.episodes) for total in self._played.tolist())
        return {
            "wall_s": wall,
            "training_s": self._training_s() if self._training is None else self._training,
            **self.done,
            **_rates(self.done, wall),
            **self._recent(),
            "first_step_s": self._first_step,
            "lag_max": self._lag_max,
            **{name: value for name, value in self._latest.items() if name in COUNTS},
            **{name: value for name, value in self._eval.items() if name not in ABOUT_EVAL},
            **({"logged": logged} if (logged := self._logged | self._interval.logged_means()) else {}),
            "episodes_trained": {"count": self.episodes, "length_mean": length, "seconds_mean": seconds},
        }


def _rates(done: Mapping[str, int], wall: float) -> dict[str, float | None]:
    return {f"{name.removeprefix('env_')}_per_s": _ratio(count, wall) for name, count in done.items()}


def _times(party: str, spent: Mapping[str, float], whole: float) -> dict[str, float | None]:
    return {f"time/{party}_{kind.replace('-', '_')}": _ratio(part, whole) for kind, part in spent.items()}


def _finite(value: float | None) -> float | None:
    """Return the value; None if it is not finite, because JSON has no NaN."""
    return float(value) if value is not None and math.isfinite(value) else None


def _ratio(part: float, whole: float) -> float | None:
    return _finite(part / whole) if whole > 0 else None


def _number(value: SupportsFloat) -> float | str:
    """Return a number for JSON, as text if it is not finite."""
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _mean(values: Collection[float]) -> float | None:
    return _finite(sum(values) / len(values)) if values else None


def _greater(known: float | None, new: float | None) -> float | None:
    return new if known is None else known if new is None else max(known, new)


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    whole = math.fsum(seconds.values())
    return {kind: part / whole if whole > 0 else float(kind == "other") for kind, part in seconds.items()}
