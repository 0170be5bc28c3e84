"""status.json: what each part of a running trainer is doing, for everybody who wants to see it.

A thread of the trainer writes it about once a second (reporter.py); here it is described and read.
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
from freewheel.transport.workers.place import call_of

STATUS = "status.json"
FORMAT = 1
Worker: TypeAlias = WorkerState  # as a row of a status
BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class LearnerStatus:
    doing: str  # a kind of core.LEARNER_TIME
    since_s: float
    waits_for: str | None = None
    stack: tuple[str, ...] = ()  # outermost first, where it has been doing the same for long


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
    limit_s: float | None = None  # seconds that it may take
    call: str | None = None  # of an environment, which has taken longest among those under way, ...
    call_s: float = 0.0  # ... for so many seconds, ...
    call_limit_s: float | None = None  # ... of so many that it may take


@dataclass(frozen=True, kw_only=True)
class StatusPart:
    """What goes on beside the learner."""

    doing: str
    since_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """When a status was written, and by whom."""

    time: float  # unix seconds, ...
    clock: float = 0.0  # ... and by CLOCK_MONOTONIC of ...
    boot: str = ""  # ... this start of a machine
    pid: int  # of the trainer


@dataclass(frozen=True, kw_only=True)
class Done:
    """How far a run is."""

    env_steps: int
    episodes: int
    updates: int
    best_eval: float | None


@dataclass(frozen=True, kw_only=True)
class Status:
    """One status.json, in which the values of stamp and done stand among the others."""

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
    beside: tuple[StatusPart, ...] = ()  # fits of models in threads or processes of their own
    saver: StatusPart | None = None  # a checkpoint that is being written in the background

    @property
    def age(self) -> float:
        """Seconds since it was written; 0 where that is not known, on another machine or since it was started again."""
        stamp = self.stamp
        return max(0.0, time.monotonic() - stamp.clock) if stamp.boot and stamp.boot == boot() else 0.0

    def to_json(self) -> str:
        rows = [vars(worker) for worker in self.workers]  # many, and made by hand they take half the time
        return json.dumps({**read.flat(self), "workers": rows}, default=vars, check_circular=False)


@functools.cache
def boot() -> str:
    """Tells apart every start of every machine; empty where that cannot be known."""
    with suppress(OSError):
        return BOOT.read_text().strip()
    return ""


def read_status(path: Path) -> Status:
    """The status in a run directory; FileError if there is none, or none that can be understood."""
    file = path / STATUS
    data = read.json_object(file)
    if data.get("format") != FORMAT:
        raise FileError(f"{file} has the format {read.show(data.get('format'))}, of another version of freewheel")
    return read.record(Status, _known(Status, data), str(file))


def _known(kind: Any, data: Any) -> Any:
    """Without what a later version of this format has added."""
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
    """What a learner without rows waits for."""
    if len(workers) == 1 and workers[0].lane is not None:
        one = workers[0]
        return f"lane {one.lane} of {env}, which is in {called(one)}"
    counts = Counter(worker.state for worker in workers)
    told = ", ".join(f"{count} in {state}" for state, count in counts.most_common())
    return f"rows of the environments ({told})" if told else "rows of the environments"


def called(worker: Worker) -> str:
    """The call of an environment that a worker is in, so that it can be repeated."""
    if worker.state not in ("construct", "reset", "step"):
        return worker.state
    if worker.seed is None:
        return {"construct": "its constructor"}.get(worker.state, f"{worker.state}()")
    return call_of(worker.state, worker.seed, worker.step or 0)
