"""status.json: what each part of a running trainer is doing.

A thread of the trainer writes it about once a second (reporter.py). This module defines and reads the format.
"""

from __future__ import annotations

import functools
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, TypeAlias, get_args

from freewheel.errors import FileError
from freewheel.files import read
from freewheel.metrics.workers import WorkerState
from freewheel.transport.workers.call_tracker import call_of

STATUS = "status.json"
FORMAT = 1
Worker: TypeAlias = WorkerState  # as a row of a status
BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class LearnerStatus:
    doing: str  # a kind of core.LEARNER_TIME
    since_s: float
    waits_for: str | None = None
    stack: tuple[str, ...] = ()  # outermost first; empty unless it has been doing the same for long


@dataclass(frozen=True, kw_only=True)
class Queue:
    fragments: float | None = None
    util: float | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluatorStatus:
    doing: str  # idle or plays
    since_s: float = 0.0
    ended: int = 0
    episodes: int = 0
    limit_s: float | None = None  # time limit of the evaluation in seconds
    call: str | None = None  # the environment call in progress that has taken the longest
    call_s: float = 0.0  # seconds that this call has taken so far
    call_limit_s: float | None = None  # time limit of this call in seconds


@dataclass(frozen=True, kw_only=True)
class StatusPart:
    """An activity in parallel to the learner."""

    doing: str
    since_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """The time at which a status was written, and the process that wrote it."""

    time: float  # unix seconds
    clock: float = 0.0  # the same time by CLOCK_MONOTONIC, which is valid for `boot` only
    boot: str = ""  # id of this start of the machine
    pid: int  # the trainer


@dataclass(frozen=True, kw_only=True)
class Done:
    """The progress of a run."""

    env_steps: int
    episodes: int
    updates: int
    best_eval: float | None


@dataclass(frozen=True, kw_only=True)
class Status:
    """The content of status.json. There the fields of `stamp` and `done` are at the top level."""

    format: int
    stamp: Stamp = field(metadata=read.PART)
    run: str
    env: str
    wall_s: float
    state: str  # running or ended
    log_every: float
    done: Done = field(metadata=read.PART)
    learner: LearnerStatus
    queue: Queue
    evaluator: EvaluatorStatus | None
    workers: tuple[Worker, ...]
    beside: tuple[StatusPart, ...] = ()  # fits of models in separate threads or processes
    saver: StatusPart | None = None  # a checkpoint that is written in the background

    @property
    def age(self) -> float:
        """Seconds since the status was written; 0 if unknown, on another machine or after a reboot."""
        stamp = self.stamp
        return max(0.0, time.monotonic() - stamp.clock) if stamp.boot and stamp.boot == boot() else 0.0

    def to_json(self) -> str:
        rows = [vars(worker) for worker in self.workers]  # `vars` halves the time for many workers
        return json.dumps({**read.flat(self), "workers": rows}, default=vars, check_circular=False)


@functools.cache
def boot() -> str:
    """Return an id that is unique to this start of the machine; empty if there is none."""
    with suppress(OSError):
        return BOOT.read_text().strip()
    return ""


def read_status(path: Path) -> Status:
    """Return the status in a run directory. FileError: it is missing or cannot be parsed."""
    file = path / STATUS
    data = read.json_object(file)
    if data.get("format") != FORMAT:
        raise FileError(f"{file} has the format {read.show(data.get('format'))}, from another version of freewheel")
    return read.record(Status, _known(Status, data), str(file))


def _known(kind: Any, data: Any) -> Any:
    """Drop the fields that a later version of this format has added."""
    if isinstance(data, list):
        return [_known(kind, item) for item in data]
    if not isinstance(data, Mapping):
        return data
    inner = {
        name: next((one for one in (hint, *get_args(hint)) if is_dataclass(one)), None)
        for name, hint in read.hints_of(kind).items()
    }
    kept = {name: value for name, value in data.items() if name in inner}
    return {name: value if inner[name] is None else _known(inner[name], value) for name, value in kept.items()}


def waits_for_rows(workers: Sequence[Worker], env: str) -> str:
    """Describe what a learner without rows waits for."""
    if len(workers) == 1 and workers[0].lane is not None:
        one = workers[0]
        return f"lane {one.lane} of {env}, which is in {called(one)}"
    counts = Counter(worker.state for worker in workers)
    told = ", ".join(f"{count} in {state}" for state, count in counts.most_common())
    return f"rows of the environments ({told})" if told else "rows of the environments"


def called(worker: Worker) -> str:
    """Describe the environment call that a worker is in, so that it can be repeated."""
    if worker.state not in ("construct", "reset", "step"):
        return worker.state
    if worker.seed is None:
        return {"construct": "its constructor"}.get(worker.state, f"{worker.state}()")
    return call_of(worker.state, worker.seed, worker.step or 0)
