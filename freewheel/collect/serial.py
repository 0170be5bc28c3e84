"""The serial collector, which acts in the caller's process; shared by the modes sequential and lockstep."""

from __future__ import annotations

import gc
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from time import perf_counter_ns
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from freewheel.collect.mode import ModeConfig, count
from freewheel.collect.quota import Quota
from freewheel.core import (
    CAUSES,
    WORKER_TIME,
    Array,
    BatchSpec,
    Chunk,
    Collector,
    Env,
    Episode,
    Failure,
    RowCounts,
    Snapshot,
)
from freewheel.errors import check_ranges
from freewheel.metrics.workers import WorkerState, own_environments
from freewheel.pacing.posted import Posted
from freewheel.rollout.factory import CollectSpec, MakeEnv, RunnerFactory
from freewheel.rollout.probe import EnvCost
from freewheel.rollout.runner import Runner
from freewheel.timeline.recording import SpanRecording
from freewheel.timeline.track import NoTrack, Ring, TurnTrack
from freewheel.transport.workers.heartbeats import kind as kind_of_report

WAIT_CREDIT = WORKER_TIME.index("wait-credit")
ENVS = "envs"  # the environments' row in the timeline
LONGEST = 64  # most steps of a chunk: time limits are checked after each chunk, and environments may be slow


class SerialConfig(ModeConfig, ABC):
    """Base of the configs of sequential and lockstep."""

    num_envs: int

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def needs_step_time(self) -> bool:
        return False

    def build(self, factory: RunnerFactory, spec: CollectSpec) -> Collector:
        lanes, steps = range(self.num_envs), spec.batch.steps
        if not spec.env.batched_on_device:
            runner = Runner(factory, lanes, env=self.place(factory.env, lanes))
            return SerialCollector(runner, Quota(steps, len(lanes), LONGEST, on_policy=spec.on_policy), spec.trace)
        from freewheel.rollout.device_runner import DeviceRunner

        own = spec.simulation
        simulation = DeviceRunner(factory, lanes, steps, own.compile, own.reserved_lanes, own.deliver_to)
        return SerialCollector(simulation, Quota(steps, len(lanes)), spec.trace)

    @abstractmethod
    def place(self, make: MakeEnv, lanes: range) -> Env: ...

    def planned(self, cost: EnvCost) -> Self:
        return self

    def plan_line(self) -> str:
        return f"{count(self.num_envs, 'env')} in this process"

    def first_steps(self, batch: BatchSpec) -> int:
        return min(LONGEST, batch.steps)

    @property
    def lanes(self) -> int:
        return self.num_envs


class SerialRunner(Protocol):
    """A Runner in this process, on numpy or on tensors."""

    produced: int
    open: int

    @property
    def out_of_space(self) -> int: ...
    @property
    def counted(self) -> list[int]: ...
    def load(self, snapshot: Snapshot) -> None: ...
    def spend(self, kind: int, ns: int) -> None: ...
    def unroll(self, steps: int) -> Chunk[Any]: ...
    def messages(self) -> Sequence[str]: ...
    def take_eval_episodes(self) -> list[Episode]: ...
    def take_failures(self) -> Sequence[Failure]: ...  # of the chunks since the last call
    def state_dict(self) -> dict[str, Array]: ...
    def load_state_dict(self, state: Mapping[str, Array]) -> None: ...
    def close(self) -> None: ...


class SerialCollector(Collector):
    """A Collector over one Runner: act, then learn, then act. The lag is 0 because nothing acts during an update.

    Rows that the quota of an update leaves out are dropped as stale.
    Objects made before the end of the first chunk are excluded from garbage collection, as in workers.
    """

    def __init__(self, runner: SerialRunner, quota: Quota, trace: SpanRecording | None = None) -> None:
        self._runner, self._quota = runner, quota
        self._posted = Posted()
        self._idle_since = perf_counter_ns()
        self._track = NoTrack() if trace is None else _traced(trace, runner)
        self._warm = self._acting = False
        self._lost = Counter[str]()  # rows lost to failed environments, by cause, and stale rows
        self._reports, self._told = list[str](), set[str]()  # failure reports to show, and the kinds already shown

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._waited()
        self._track.cut(perf_counter_ns(), self._runner.counted)
        if self._warm:
            gc.unfreeze()
        self._runner.close()

    def publish(self, snapshot: Snapshot, done: int) -> None:
        self._waited()
        self._runner.load(self._posted.post(snapshot)[-1])
        self._idle_since = perf_counter_ns()

    def collect(self, wait: bool) -> Sequence[Chunk[Any]]:
        if not wait:
            return ()
        self._waited()
        self._acting = True
        chunk = self._runner.unroll(self._quota.next)
        self._count_failures(self._runner.take_failures())
        self._track.taken(perf_counter_ns(), chunk.time.tolist())
        chunk, surplus = self._quota.take(chunk)
        if surplus:
            self._lost["stale"] += surplus
        if not self._warm:
            self._warm = True
            gc.freeze()
        self._idle_since, self._acting = perf_counter_ns(), False
        return (chunk,)

    def oldest(self) -> int | None:
        return None  # nothing is ever left open or queued between two calls

    def _count_failures(self, failures: Sequence[Failure]) -> None:
        """Count the lost rows, and report every kind of failure once."""
        for failure in failures:
            given_up = failure.cause == "quarantine"
            if not failure.in_reset and not given_up:
                self._lost[failure.cause] += 1
            if given_up:  # the failure itself has been reported
                self._reports.append(failure.report.split("\n", 1)[0])
            elif (about := kind_of_report(failure.report)) not in self._told:
                self._told.add(about)
                self._reports.append(failure.report)

    def rows(self) -> RowCounts:
        lost = self._lost
        produced = self._runner.produced + lost.total() - lost["stale"]
        return RowCounts(produced, open=self._runner.open, dropped=dict(lost))

    def stats(self) -> Mapping[str, float | None]:
        return {"queue_util": None}

    def workers(self) -> Sequence[WorkerState]:
        idle_since = None if self._acting else self._idle_since
        return [own_environments(self._runner.produced, idle_since, os.getpid())]

    def eval_episodes(self) -> list[Episode]:
        """Episodes of reserved lanes since the last call."""
        return self._runner.take_eval_episodes()

    def messages(self) -> Sequence[str]:
        reports, self._reports = self._reports, []
        return (*reports, *self._runner.messages())

    def summary(self) -> Mapping[str, Any]:
        return {"out_of_space": self._runner.out_of_space}

    def state_dict(self) -> dict[str, Array]:
        """Return the state as of the last delivered chunk."""
        lost = np.array([self._lost[cause] for cause in CAUSES], np.int64)
        return self._runner.state_dict() | self._posted.state() | self._quota.state() | {"lost": lost}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self._runner.load_state_dict(state)
        self._posted.restore(state)
        self._quota.restore(state, self._runner.produced)
        lost = np.asarray(state["lost"]).tolist() if "lost" in state else []  # missing in states saved before 0.2
        self._lost = Counter({cause: rows for cause, rows in zip(CAUSES, lost, strict=False) if rows})

    def _waited(self) -> None:
        now = perf_counter_ns()
        self._track.waited(WAIT_CREDIT, self._idle_since, now, self._runner.counted)
        self._runner.spend(WAIT_CREDIT, now - self._idle_since)


def _traced(trace: SpanRecording, runner: SerialRunner) -> TurnTrack:
    """Add this process's environments to the timeline; the track of a Runner is cut between two steps."""
    ring, now = Ring.private(), perf_counter_ns()
    trace.attach({ENVS: ring}, "envs")
    trace.latest = trace.number(ENVS, "envs")
    track = TurnTrack(ring, now)

    def stepped() -> None:
        if (now := perf_counter_ns()) >= track.due:
            track.cut(now, runner.counted)

    if isinstance(runner, Runner):
        runner.stepped = stepped
    return track
