"""Writes the status of a run from a separate thread of its trainer, even while the training is stuck.

Each write replaces the file atomically. The training never waits for it: a blocked disk delays only this thread.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Self

from freewheel.core import Collector, Executor, MakeExecutor
from freewheel.files import disk
from freewheel.metrics.meter import Meter
from freewheel.metrics.workers import WorkerState, own_environments
from freewheel.rollout.call_state import SINCE, cells
from freewheel.run.checkpoints.saver import Saver
from freewheel.run.evaluation.schedule import EvaluationSchedule
from freewheel.run.live.status import (
    FORMAT,
    STATUS,
    Done,
    EvaluatorStatus,
    LearnerStatus,
    Queue,
    Stamp,
    Status,
    StatusPart,
    boot,
    waits_for_rows,
)
from freewheel.transport.background import RepeatedCall

EVERY = 1.0  # seconds between two writes
WINDOW = 5.0  # seconds over which a worker's steps are counted
LONG = 2.0  # seconds in one activity from which on the learner's stack is shown
FRAMES = 16  # innermost frames of the stack that are shown, at most
PATIENCE = 0.5  # seconds that the end of a run waits for the thread, which may be in the middle of writing
WHY = {
    "wait-credit": "the learner: enough rows are under way until its next update",
    "wait-slot": "a free place in its queue: the learner has not read what is there",
    "wait-gate": "the other workers: the learner needs their older rows before its next update",
    "lost": "nothing: it was given up",
    "pending": "room on the cluster: it has too few free CPUs for another worker",
}


class LiveStatus:
    """Writes the status of a run while its block runs. The trainer sets `collector` and `schedule` when they exist."""

    def __init__(self, path: Path, env: str, meter: Meter, log_every: float) -> None:
        self._path, self._env, self._meter, self._log_every = path, env, meter, log_every
        self.collector: Collector | None = None
        self.schedule: EvaluationSchedule | None = None
        self.saver: Saver | None = None
        self.beside: KnownExecutors | None = None
        self._deaths: dict[int, int] = {}  # of each worker, at the last status
        self._past: deque[tuple[float, Mapping[int, int]]] = deque()  # (time, steps by worker) of earlier statuses
        self._main = threading.get_ident()
        self._thread: RepeatedCall | None = None

    def __enter__(self) -> Self:
        self._main = threading.get_ident()
        self._thread = RepeatedCall("status", self._write, EVERY)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Write the last status. A thread that ends a stuck run may call this too."""
        thread, self._thread = self._thread, None
        if thread is not None and thread.close(PATIENCE):
            self._write("ended")

    def _write(self, state: str = "running") -> None:
        with suppress(Exception):  # an error of the disk, or of a part of the run that is being closed
            disk.show(self._path / STATUS, self.now(state).to_json().encode())

    def now(self, state: str = "running") -> Status:
        """Return the present status. Any thread may call it, but only one at a time."""
        meter, schedule = self._meter, self.schedule
        workers = self._workers() if state == "running" else ()
        best = None if schedule is None else schedule.candidate
        return Status(
            format=FORMAT,
            stamp=Stamp(time=time.time(), clock=time.monotonic(), boot=boot(), pid=os.getpid()),
            run=self._path.name,
            env=self._env,
            wall_s=meter.wall_s,
            state=state,
            log_every=self._log_every,
            done=Done(**meter.done, best_eval=None if best is None else best.score.mean),
            learner=self._learner(workers),
            queue=self._queue(),
            evaluator=_evaluator(schedule),
            workers=workers,
            beside=() if self.beside is None else self.beside.parts(),
            saver=_saver(self.saver),
        )

    def _workers(self) -> tuple[WorkerState, ...]:
        """Return the worker states. A worker that died since the last status is down once, even if replaced."""
        collector = self.collector
        states: Sequence[WorkerState] = ()
        if collector is not None:
            with suppress(KeyError):  # its memory has just been freed
                states = collector.workers()
        elif cells[SINCE]:
            states = [own_environments(pid=os.getpid())]
        rates = self._rates({state.worker: state.steps for state in states})
        before, self._deaths = self._deaths, {state.worker: state.deaths for state in states}
        return tuple(
            _told(state, rates[state.worker], down=state.deaths > before.get(state.worker, 0)) for state in states
        )

    def _rates(self, steps: Mapping[int, int]) -> dict[int, float]:
        if not steps:
            return {}
        now = time.monotonic()
        self._past.append((now, steps))
        while len(self._past) > 2 and self._past[1][0] <= now - WINDOW:
            self._past.popleft()
        then, earlier = self._past[0]
        seconds = max(now - then, 1e-9)
        return {
            worker: round(max(0, count - earlier.get(worker, count)) / seconds, 2) for worker, count in steps.items()
        }

    def _learner(self, workers: Sequence[WorkerState]) -> LearnerStatus:
        doing, since = self._meter.doing, self._meter.doing_s
        stack = _stack(sys._current_frames().get(self._main)) if since > LONG else ()
        return LearnerStatus(doing=doing, since_s=since, waits_for=self._waits_for(doing, workers), stack=stack)

    def _waits_for(self, doing: str, workers: Sequence[WorkerState]) -> str | None:
        if doing == "wait-data":
            return waits_for_rows(workers, self._env)
        if doing == "wait-model":
            return "the fit of a model, which runs in parallel"
        if doing == "eval" and (found := _evaluator(self.schedule)) is not None and found.doing == "plays":
            return f"an evaluation, of which {found.ended} of {found.episodes} episodes have ended"
        return "the disk: a checkpoint is being written" if doing == "save" else None

    def _queue(self) -> Queue:
        found: Mapping[str, float | None] = {}
        if self.collector is not None:
            with suppress(KeyError):
                found = self.collector.stats()
        return Queue(fragments=found.get("queue/fragments"), util=found.get("queue_util"))


def _told(state: WorkerState, rate: float, *, down: bool) -> WorkerState:
    """Add the rate and what the worker waits for. down: it died after the last status."""
    if down and state.state != "lost":
        state = replace(state, state="down", since_s=state.died_s or 0.0)
    state.steps_per_s, state.waits_for = rate, WHY.get(state.state)
    if state.state == "down":
        state.waits_for = f"its replacement: it {state.why or 'has ended'}"
    elif state.state == "lost" and state.why:
        state.waits_for = f"{state.waits_for}, because it {state.why}"
    return state


def _evaluator(schedule: EvaluationSchedule | None) -> EvaluatorStatus | None:
    if schedule is None or not schedule.active:
        return None
    found = schedule.under_way
    if found is None:
        return EvaluatorStatus(doing="idle")
    told = EvaluatorStatus(
        doing="plays", since_s=found.since_s, limit_s=found.limit_s, ended=found.ended, episodes=found.episodes
    )
    call = found.call
    return told if call is None else replace(told, call=call.what, call_s=call.seconds, call_limit_s=call.limit)


def _saver(saver: Saver | None) -> StatusPart | None:
    found = None if saver is None else saver.under_way
    return None if found is None else StatusPart(doing=f"writes the checkpoint of step {found[0]:,}", since_s=found[1])


class KnownExecutors:
    """Makes executors and reports which of them are busy in parallel to the learner. Implements core.MakeExecutor."""

    def __init__(self, make: MakeExecutor) -> None:
        self._make, self._made = make, list[tuple[str, Executor]]()
        self._since: dict[int, float] = {}  # when each was first seen busy

    def __call__(self, build: Callable[[], Callable[[Any], Any]], what: str) -> Executor:
        executor = self._make(build, what)
        self._made.append((what, executor))
        return executor

    def parts(self) -> tuple[StatusPart, ...]:
        """Return the executors that are busy. Only one thread may call it."""
        now, busy = time.monotonic(), [(what, executor) for what, executor in list(self._made) if executor.busy]
        self._since = {id(executor): self._since.get(id(executor), now) for _, executor in busy}
        return tuple(StatusPart(doing=what, since_s=now - self._since[id(executor)]) for what, executor in busy)


def _stack(frame: FrameType | None) -> tuple[str, ...]:
    """Return the innermost places in the code, outermost first."""
    lines: list[str] = []
    while frame is not None and len(lines) < FRAMES:
        code = frame.f_code
        lines.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return tuple(reversed(lines))
