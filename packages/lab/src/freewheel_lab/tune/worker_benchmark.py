"""A worker benchmark runs real workers for a short time without a learner. It measures the cost of
acting and of handing rows over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter, sleep, thread_time

import numpy as np

from freewheel.collect.mode import make_collector
from freewheel.core import WORKER_TIME, Snapshot
from freewheel.errors import EnvError
from freewheel.rollout.probe import cpu_of, taken_from
from freewheel.run.plan import Plan
from freewheel.transport.pool import WorkerPool

ENV = ("step", "reset")
ACT = ("infer",)
SEND = ("write", "load", "other")
AWAY = 0.01  # seconds between two polls for rows


@dataclass(frozen=True, kw_only=True)
class WorkerBenchmark:
    """Holds seconds per row, without the time in which other processes had the processor."""

    lanes: int  # lanes of each worker
    workers: int
    fragment: int  # steps of each lane that a worker handed over at once
    rows: int  # number of measured rows
    env: float  # seconds of steps and resets
    act: float  # seconds of choosing actions
    send: float  # seconds of writing rows and handing them over
    cpu: float  # processor seconds of all of these
    taken: float  # processor seconds of the side that took them

    @property
    def fragment_rows(self) -> int:
        return self.lanes * self.fragment


class _TimeIsUpError(Exception):
    """Raised when the time of a benchmark is over while it waits for rows."""


def benchmark_workers(planned: Plan, snapshot: Snapshot, seconds: float, limit: float) -> WorkerBenchmark | None:
    """Let the workers of a plan act for `seconds`. Return None if nothing came within `limit`
    seconds, which include the start. Raise EnvError if the env ends or hangs its process."""
    end = perf_counter() + limit

    def check() -> None:
        if perf_counter() > end:
            raise _TimeIsUpError

    spec = planned.collect_spec(snapshot, check)
    collector = make_collector(planned.config.collector, planned.runner_factory, spec)
    assert isinstance(collector, WorkerPool), "a mode with workers"
    with collector:
        counts = _RowCounter(collector, planned, snapshot, check)
        try:
            counts.take()  # the first fragments are not measured, because everything is still cold
            began = counts.begin()
            end = min(end, began + seconds)
            while perf_counter() < end:
                counts.take()
        except _TimeIsUpError:
            pass
        if (died := next((one for one in collector.workers() if one.deaths), None)) is not None:
            raise EnvError(f"{planned.config.env.label} died in a worker: {died.why}", "worker_death")
        return counts.result()


class _RowCounter:
    """Counts the rows that have come and the time that they took."""

    def __init__(self, collector: WorkerPool, planned: Plan, snapshot: Snapshot, check: Callable[[], None]) -> None:
        self._check = check
        self._collector = collector
        self._planned = planned
        self._snapshot = snapshot
        self._done = 0
        self._version = snapshot.version
        self._published = 0
        self._time = np.zeros(len(WORKER_TIME), np.int64)
        self._rows = 0
        self._cpu = 0.0
        self._stolen = 0.0
        self._taking = 0.0
        self._pids: list[int] = []
        collector.publish(snapshot, 0)

    def take(self) -> None:
        """Take the rows that have come, like a learner that is always busy, and publish a version
        for every batch."""
        sleep(AWAY)
        began = thread_time()
        while not (chunks := self._collector.collect(wait=False)):
            self._check()
            sleep(AWAY)
            began = thread_time()  # polling without a result is not part of the cost
        self._taking += thread_time() - began
        for chunk in chunks:
            self._time += chunk.time
            self._rows += chunk.rows
            self._done += chunk.rows
        if self._done - self._published >= self._planned.batch.rows:
            self._version = self._version + 1
            self._published = self._done
            self._collector.publish(replace(self._snapshot, version=self._version), self._done)

    def begin(self) -> float:
        """Start counting."""
        self._time[:] = 0
        self._rows = 0
        self._pids = [one.pid for one in self._collector.workers() if one.pid is not None]
        self._cpu, self._stolen = self._used()
        self._taking = 0.0
        return perf_counter()

    def _used(self) -> tuple[float, float]:
        """Return the processor seconds of the workers, and the seconds that other processes took
        from them."""
        return sum(map(cpu_of, self._pids)), sum(map(taken_from, self._pids))

    def result(self) -> WorkerBenchmark | None:
        rows = self._rows
        if not rows or not self._pids:
            return None
        cpu, stolen = (now - before for now, before in zip(self._used(), (self._cpu, self._stolen), strict=True))
        took = dict(zip(WORKER_TIME, (self._time * 1e-9).tolist(), strict=True))
        active = sum(took[kind] for kind in (*ENV, *ACT, *SEND))
        alone = max(0.1, 1.0 - stolen / active) if active > 0 else 1.0
        env, act, send = (alone * sum(took[kind] for kind in kinds) / rows for kinds in (ENV, ACT, SEND))
        config = self._planned.worker_config
        workers = self._planned.workers
        assert config is not None, "it has workers"
        return WorkerBenchmark(
            lanes=self._planned.spec.lanes // workers,
            workers=workers,
            fragment=config.fragment_steps(self._planned.batch),
            rows=rows,
            env=env,
            act=act,
            send=send,
            cpu=cpu / rows,
            taken=self._taking / rows,
        )
