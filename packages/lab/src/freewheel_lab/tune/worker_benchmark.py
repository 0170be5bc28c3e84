"""A rehearsal: real workers act for a moment, and nobody learns. What acting costs, and handing rows over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter, sleep, thread_time

import numpy as np

from freewheel.core import WORKER_TIME, Snapshot
from freewheel.errors import EnvError
from freewheel.rollout.probe import cpu_of, taken_from
from freewheel.run.plan import Plan
from freewheel.transport.pool import WorkerPool

ENV, ACT, SEND = ("step", "reset"), ("infer",), ("write", "load", "other")
AWAY = 0.01  # seconds between two looks for rows


@dataclass(frozen=True, kw_only=True)
class WorkerBenchmark:
    """Seconds of a row, without the time that other processes had the processor."""

    lanes: int  # of a worker
    workers: int
    fragment: int  # steps of each lane that a worker handed over at once
    rows: int  # that were measured
    env: float  # of steps and resets
    act: float  # of choosing actions
    send: float  # of writing rows and handing them over
    cpu: float  # of the processor, for all of these
    taken: float  # of the processor that took them

    @property
    def fragment_rows(self) -> int:
        return self.lanes * self.fragment


class _TimeIsUpError(Exception):
    """The time of a rehearsal is over while it waits for rows."""


def benchmark_workers(planned: Plan, snapshot: Snapshot, seconds: float, limit: float) -> WorkerBenchmark | None:
    """Let the workers of a plan act for so long; None if nothing came within the limit, in seconds, which includes its start.
    EnvError if the env ends or hangs its process."""
    end = perf_counter() + limit

    def check() -> None:
        if perf_counter() > end:
            raise _TimeIsUpError

    spec = planned.collect_spec(snapshot, check)
    collector = planned.config.collector.build(planned.runner_factory, spec)
    assert isinstance(collector, WorkerPool), "a mode with workers"
    with collector:
        counts = _RowCounter(collector, planned, snapshot, check)
        try:
            counts.take()  # the first fragments, while everything is still cold
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
    """What has come, and what it took."""

    def __init__(self, collector: WorkerPool, planned: Plan, snapshot: Snapshot, check: Callable[[], None]) -> None:
        self._check = check
        self._collector, self._planned, self._snapshot = collector, planned, snapshot
        self._done, self._version, self._published = 0, snapshot.version, 0
        self._time, self._rows = np.zeros(len(WORKER_TIME), np.int64), 0
        self._cpu = self._stolen = self._taking = 0.0
        self._pids: list[int] = []
        collector.publish(snapshot, 0)

    def take(self) -> None:
        """Take what has come in the meantime, as a learner does that is always busy; publish a version for every batch."""
        sleep(AWAY)
        began = thread_time()
        while not (chunks := self._collector.collect(wait=False)):
            self._check()
            sleep(AWAY)
            began = thread_time()  # to look for rows in vain is not part of what they cost
        self._taking += thread_time() - began
        for chunk in chunks:
            self._time += chunk.time
            self._rows += chunk.rows
            self._done += chunk.rows
        if self._done - self._published >= self._planned.batch.rows:
            self._version, self._published = self._version + 1, self._done
            self._collector.publish(replace(self._snapshot, version=self._version), self._done)

    def begin(self) -> float:
        """Count from here."""
        self._time[:], self._rows = 0, 0
        self._pids = [one.pid for one in self._collector.workers() if one.pid is not None]
        self._cpu, self._stolen = self._used()
        self._taking = 0.0
        return perf_counter()

    def _used(self) -> tuple[float, float]:
        """Processor seconds of the workers, and seconds that others took from them."""
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
        config, workers = self._planned.worker_config, self._planned.workers
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
