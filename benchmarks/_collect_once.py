"""One collector and one learner in this process, for a warm-up and a window: one JSON object on standard output.

They are built and looped over as `freewheel train` does it, with its ledger and its metrics row every second, but without a run
directory. The window begins and ends with the end of an update, so that both ends lie in the same phase.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any
from unittest import mock

import numpy as np
import psutil

from benchmarks._attendants import Arrivals, Killer, Loads, memory_kb
from benchmarks._counting import Counting
from freewheel.config.resolve import from_options
from freewheel.core import WORKER_TIME, Chunk, Collector, Episode, Learner, NDArray, RowCounts, Snapshot, Tick
from freewheel.errors import LedgerError
from freewheel.ledger import balance
from freewheel.loop import loop
from freewheel.metrics.meter import Meter
from freewheel.run.plan import Plan
from freewheel.run.process import learner_threads, lower_priority
from freewheel.transport.pool import WorkerPool
from freewheel.transport.shm.wire import SharedMemoryWire
from freewheel.transport.wire import Fragment

BUSY = ("observe", "update", "publish")
try:
    PLANNING: Any = importlib.import_module("freewheel.run.planning")
except ModuleNotFoundError:  # commits in which the plan and its making were one module
    PLANNING = importlib.import_module("freewheel.run.plan")
SLACK = 60.0  # seconds beyond what was asked after which a run counts as stalled


class StalledError(Exception):
    """Nothing has moved for too long."""


@dataclass(frozen=True)
class Order:
    """What to measure."""

    options: Mapping[str, Any]  # as freewheel.train takes them, env included
    warm_s: float
    window_s: float  # at least
    window_rows: int = 0  # produced in the window, at least
    limit_s: float = 0.0  # after which a run is stalled; 0: a good deal longer than it should take
    learner: str = "ppo"  # or none: Counting
    cores: int = 0  # use only so many; 0: all
    kills: Sequence[tuple[float, int]] = ()  # seconds after the window began, worker
    loads: bool = False  # see how long new weights take to arrive
    all_present: bool = False  # the window begins when every worker has delivered rows

    @property
    def limit(self) -> float:
        return self.limit_s or self.warm_s + 3 * self.window_s + SLACK


@dataclass(frozen=True)
class Reading:
    """All counters at one moment."""

    at: float
    rows: RowCounts  # of both parties
    version: int
    learner_s: Mapping[str, float]  # by kind
    learner_cpu: float
    worker_cpu: float
    worker_ns: NDArray  # [len(WORKER_TIME)]
    episodes: int
    played: NDArray  # [1 + measures] steps of these episodes, and the sums of what they measured


class Measurement:
    """A run while it is looked at."""

    def __init__(self, order: Order, planned: Plan, learner: Learner, collector: Collector) -> None:
        self.order, self.planned, self.learner, self.collector = order, planned, learner, collector
        self.meter = Meter(workers=planned.workers)
        self.lag_max = 0.0
        self.balances = 0  # times that the ledger was checked
        self.errors: list[str] = []  # what it had to complain of
        self.longest_wait = self._waited = 0.0
        self._worker_ns = np.zeros(len(WORKER_TIME), np.int64)
        self._episodes, self._played = 0, np.zeros(1 + len(planned.spec.measures))
        self._next_log = 1.0
        self._delivered: set[int] = set()  # workers

    @property
    def warm(self) -> bool:
        present = not self.order.all_present or len(self._delivered) >= self.planned.workers
        return present and self.meter.wall_s >= self.order.warm_s

    def finished(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            self._episodes += 1
            self._played += episode.length, *episode.measures

    def waited(self, seconds: float, chunks: Sequence[Chunk[Any]]) -> None:
        """The learner has asked for chunks and was given these after so long."""
        self._waited += seconds
        self.longest_wait = max(self.longest_wait, self._waited)
        if chunks:
            self._waited = 0.0

    def take(self, tick: Tick) -> None:
        self.meter.take(tick)
        for chunk in tick.chunks:
            self._worker_ns += chunk.time
            self._delivered.add(chunk.origin.worker)
        if tick.metrics is not None:
            self.lag_max = max(self.lag_max, float(tick.metrics["lag_max"]))
        if self.meter.wall_s >= self._next_log:  # what a run does every second, it does here too
            self.meter.row(self.balanced(), self.collector.stats(), self.learner.buffer_util)
            self.collector.messages()
            self._next_log = self.meter.wall_s + 1.0

    def balanced(self) -> RowCounts:
        ours, theirs = self.collector.rows(), self.learner.rows()
        self.balances += 1
        try:
            return balance(ours, theirs)
        except LedgerError as error:
            self.errors.append(str(error))
            return RowCounts(produced=ours.produced, trained=theirs.trained, dropped={**ours.dropped, **theirs.dropped})

    def read(self) -> Reading:
        return Reading(
            at=perf_counter(),
            rows=self.balanced(),
            version=self.learner.version,
            learner_s={kind: share * self.meter.wall_s for kind, share in self.meter.shares()["learner"].items()},
            learner_cpu=process_time(),
            worker_cpu=_cpu_below(),
            worker_ns=self._worker_ns.copy(),
            episodes=self._episodes,
            played=self._played.copy(),
        )

    def enough(self, first: Reading) -> bool:
        if perf_counter() - first.at < self.order.window_s:
            return False
        return self.collector.rows().produced - first.rows.produced >= self.order.window_rows

    def figures(self, first: Reading, last: Reading) -> dict[str, Any]:
        """What happened between two readings."""
        window, updates = last.at - first.at, last.version - first.version
        rows = last.rows.produced - first.rows.produced
        seconds = {kind: last.learner_s[kind] - first.learner_s[kind] for kind in last.learner_s}
        worker_ns = last.worker_ns - first.worker_ns
        return {
            "window_s": window,
            "rows": rows,
            "rows_per_s": rows / window,
            "trained_per_s": (last.rows.trained - first.rows.trained) / window,
            "updates": updates,
            "updates_per_s": updates / window,
            "update_s": seconds["update"] / updates if updates else None,
            "learner_busy": sum(seconds[kind] for kind in BUSY) / window,
            "learner_time": {kind: part / window for kind, part in seconds.items()},
            "worker_time": dict(zip(WORKER_TIME, (worker_ns / max(1, worker_ns.sum())).tolist(), strict=True)),
            "learner_cpu_s": last.learner_cpu - first.learner_cpu,
            "worker_cpu_s": last.worker_cpu - first.worker_cpu,
            "episodes": last.episodes - first.episodes,
            **self._shares(first, last),
        }

    def _shares(self, first: Reading, last: Reading) -> dict[str, float]:
        """How much of the time that workers had went into the steps that were drawn for them.

        Only whole episodes say what was drawn for them; rows of others count as the mean.
        """
        if "drawn_s" not in self.planned.spec.measures:
            return {}
        ended, drawn, slept = (last.played - first.played).tolist()
        rows, window = last.rows.produced - first.rows.produced, last.at - first.at
        actors = getattr(self.planned.config.collector, "workers", self.planned.spec.lanes)
        mean = float(self.planned.config.env.args["mean"])
        return {
            "drawn_s": drawn + (rows - ended) * mean,
            "share": (drawn + (rows - ended) * mean) / (actors * window),
            "share_rows": rows * mean / (actors * window),
            "overshoot": slept / drawn - 1 if drawn else 0.0,
        }


def measure(order: Order) -> dict[str, Any]:
    if order.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: order.cores])
    began = perf_counter()
    options = {"minutes": 600.0, "evals": 0, **order.options}
    planned = PLANNING.plan(from_options(options.pop("env"), options))
    plan_s = perf_counter() - began
    yields = planned.yields == "learner" if PLANNING.__name__.endswith("planning") else planned
    with learner_threads(planned.config.run.machine.threads), lower_priority(yields):
        learner = planned.config.learner.build(planned.learner_spec)
        if order.learner == "none":
            learner = Counting(learner.snapshot(), planned.batch.rows, planned.max_lag)
        row = {"plan_s": plan_s, "mode": planned.config.mode, "workers": planned.workers, "lanes": planned.spec.lanes}
        return row | {"rows_per_update": planned.batch.rows, "learner": order.learner} | _run(order, planned, learner)


def _run(order: Order, planned: Plan, learner: Learner) -> dict[str, Any]:
    deadline = perf_counter() + order.limit

    def waiting() -> None:
        if perf_counter() > deadline:
            raise StalledError

    with ExitStack() as stack:
        build = planned.config.collector.build(
            planned.runner_factory, planned.collect_spec(learner.snapshot(), waiting)
        )
        wire = build.wire if isinstance(build, WorkerPool) and isinstance(build.wire, SharedMemoryWire) else None
        arrivals = stack.enter_context(Arrivals(wire)) if wire is not None else None
        collector = stack.enter_context(build)
        run = Measurement(order, planned, learner, collector)
        row = _watch(run, wire, waiting)
        row["started_s"] = arrivals.seconds if arrivals else None
    rows, report = run.balanced(), collector.summary()
    row |= {"produced": rows.produced, "dropped": dict(rows.dropped), "lag_max": run.lag_max}
    row |= {"ledger": "; ".join(run.errors) or "exact", "balances": run.balances, "longest_wait_s": run.longest_wait}
    row |= {"return_mean": run.meter.totals()["return_mean"], "restarts": report.get("worker_restarts", 0)}
    return row | {"workers_lost": report.get("workers_lost", 0)}


def _watch(run: Measurement, wire: SharedMemoryWire | None, waiting: Callable[[], None]) -> dict[str, Any]:
    """Loop until the window is over; what was seen."""
    row: dict[str, Any] = {"stalled": False}
    with ExitStack() as stack:
        stack.enter_context(_looking(run, wire))
        loads = stack.enter_context(_loading(run.collector, wire)) if run.order.loads and wire else None
        killer = Killer(wire, run.order.kills, lambda: run.learner.version) if run.order.kills and wire else None
        first, begun = None, run.read()
        try:
            for tick in loop(run.collector, run.learner, run.meter, max_lag=run.planned.max_lag):
                run.take(tick)
                waiting()
                if first is None and tick.metrics is not None and run.warm:
                    first, run.longest_wait = run.read(), 0.0
                    if killer is not None:
                        stack.enter_context(killer)
                elif first is not None and tick.metrics is not None and run.enough(first):
                    break
        except StalledError:
            row["stalled"] = True
        row |= run.figures(first or begun, run.read())
        if wire is not None:
            row["pss_kb"] = memory_kb(wire)
        if loads is not None:
            row["loads"] = {"median_s": loads.median, "last_s": loads.last, "overtaken": loads.overtaken}
        if killer is not None:
            row |= {"kills": killer.kills, "back_s": killer.back}
            row["updates_after_kills"] = run.learner.version - killer.updates_at_last
    return row


@contextmanager
def _looking(run: Measurement, wire: SharedMemoryWire | None) -> Iterator[None]:
    """Every episode that ends is seen, whatever becomes of its rows; and every wait of the learner's."""
    collect = run.collector.collect

    def timed(wait: bool) -> Sequence[Chunk[Any]]:
        began = perf_counter()
        chunks = collect(wait)
        run.waited(perf_counter() - began, chunks)
        if wire is None:
            for chunk in chunks:
                run.finished(chunk.episodes)
        return chunks

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(run.collector, "collect", timed))
        if wire is not None:
            note = wire.note_episodes

            def seen(fragment: Fragment) -> None:
                run.finished(fragment.episodes)
                note(fragment)

            stack.enter_context(mock.patch.object(wire, "note_episodes", seen))
        yield


@contextmanager
def _loading(collector: Collector, wire: SharedMemoryWire) -> Iterator[Loads]:
    publish = collector.publish
    with Loads(wire) as loads:

        def timed(snapshot: Snapshot, done: int) -> None:
            loads.published(snapshot.version)
            publish(snapshot, done)

        with mock.patch.object(collector, "publish", timed):
            yield loads


def _cpu_below() -> float:
    """CPU seconds of all processes below this one, the ended ones among them."""
    seconds = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it ended meanwhile
            seconds += sum(process.cpu_times()[:4])
    return seconds


def main() -> None:
    order = Order(**json.loads(sys.argv[1]))
    print(json.dumps({"order": json.loads(sys.argv[1]), **measure(order)}))


if __name__ == "__main__":
    main()
