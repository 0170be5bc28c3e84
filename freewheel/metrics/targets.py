"""Targets of the key figures of a run: whether each figure meets its target, and if it does not, why.

Only `judge` decides this. The console, the terminal view and the live page show its result. Its input is a row of
metrics.jsonl and the set-up of the run, which is in the run directory as targets.json (`read`). A figure is "bad" only
if the user should act: workers are down, or wait while the learner waits too. Other missed targets are "unreachable".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from freewheel.errors import FileError
from freewheel.files.read import json_object, record
from freewheel.metrics.meter import MOST, PACE

FILE = "targets.json"  # in a run directory

QUEUE, BUFFER = (0.5, 0.8), (0.7, 0.9)  # target range of each share
GPU, CPU = 0.9, 0.8  # lower limit of each share
RATE = 0.9  # share of the rates without waiting
WAITING = 0.1  # share of the time up to which waiting is normal
STARTING = 10.0  # seconds of a run in which workers may be down because they are starting

State: TypeAlias = Literal["good", "bad", "unreachable", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The facts that decide which targets a run can reach. Readers of a run directory can load it."""

    mode: str
    algo: str
    workers: int  # processes or threads that act
    in_turn: bool  # environments and updates take turns, without a queue
    cores: int
    device: str  # of the learner
    worker_cores: float | None = None  # cores that a worker keeps busy while it does not wait for the learner
    rows_per_update: float | None = None  # None: it varies
    learning_starts: int = 0  # rows before the first update
    replay_rows: int | None = None  # capacity of the replay buffer; None: rows are used once
    replay_filled: int | None = None  # rows that it will hold at the end of the run; None: not known
    threads: int = 1  # of the learner
    log_every: float = 1.0  # seconds between two rows of metrics

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = FILE) -> Setup:
        """Parse JSON data. Unknown fields are ignored. FileError: the data is invalid."""
        known = {field.name for field in fields(cls)}
        return record(cls, {name: value for name, value in data.items() if name in known}, where)


@dataclass(frozen=True)
class Indicator:
    """A key figure and its target."""

    name: str  # of the metric
    label: str  # for people
    value: float | None  # a share, 0 to 1, or a rate per second
    low: float | None  # limits of the target; None: no such limit
    high: float | None
    state: State
    reason: str = ""  # one sentence; empty if the state is good

    @property
    def is_share(self) -> bool:
        return self.name.endswith("_util")


def read(run: Path) -> Setup | None:
    """Return the set-up of a run directory; None: it is missing or cannot be read."""
    try:
        return Setup.from_json(json_object(run / FILE), str(run / FILE))
    except FileError:
        return None


def judge(row: Mapping[str, Any], setup: Setup | None) -> tuple[Indicator, ...]:
    """Compare every key figure of a row of metrics with its target. Without a set-up, return the values only."""
    if setup is None:
        return tuple(
            Indicator(name, label, row.get(name), None, None, "unknown", "the set-up of this run is not known")
            for name, label in LABELS.items()
        )
    seen = _WaitShares.of(row, setup.workers)
    return (
        _collection(row, setup, seen),
        _updates(row, setup, seen),
        _queue(row, setup, seen),
        _buffer(row, setup),
        _gpu(row, setup, seen),
        _cpu(row, setup, seen),
    )


LABELS = {
    "steps_per_s": "collection rate",
    "updates_per_s": "update rate",
    "queue_util": "queue",
    "buffer_util": "buffer",
    "gpu_util": "GPU",
    "cpu_util": "CPU",
}


class _WaitShares(NamedTuple):
    """The times in which workers and learner wait, as shares."""

    workers_wait: float  # for the learner or for each other
    workers_down: float
    learner_waits: float
    learner_busy: float
    learner_held: float  # by an evaluation that it plays itself, or a checkpoint
    starting: bool

    @classmethod
    def of(cls, row: Mapping[str, Any], workers: int) -> _WaitShares:
        """Read the shares from a row. A worker that waits for its turn to act does not count as waiting."""
        waits = (row.get(f"time/worker_wait_{what}") or 0.0 for what in ("credit", "slot", "gate"))
        down, idle = (row.get(f"time/{name}") or 0.0 for name in ("worker_down", "learner_wait_data"))
        acting = min((row.get("workers/turns") or workers) / max(workers, 1), 1.0)
        wait = max(0.0, 1.0 - (1.0 - min(sum(waits), 1.0)) / acting)
        held = sum(row.get(f"time/learner_{what}") or 0.0 for what in ("eval", "save"))
        return cls(wait, down, idle, row.get("learner_busy") or 0.0, held, (row.get("wall_s") or STARTING) < STARTING)

    @property
    def free(self) -> float:
        """Return the factor by which the rates would grow if no worker waited."""
        return 1.0 / max(1.0 - self.workers_wait - self.workers_down, 0.01)

    @property
    def learner_limits(self) -> bool:
        return self.workers_wait > WAITING and self.learner_busy + self.learner_held >= self.workers_wait

    @property
    def learner_is_limit(self) -> str:
        held = f" and evaluates or saves {_percent(self.learner_held)}" if self.learner_held > WAITING else ""
        busy = f"it is busy {_percent(self.learner_busy)} of the time{held}"
        return f"the learner is the limit: {busy}, workers wait for it {_percent(self.workers_wait)}"

    @property
    def both_wait(self) -> bool:
        return min(self.workers_wait, self.learner_waits) > WAITING


Said: TypeAlias = tuple[State, str]
GOOD: Said = ("good", "")


def _indicator(
    row: Mapping[str, Any], name: str, low: float | None, high: float | None, otherwise: Said, unknown: str = ""
) -> Indicator:
    """Return "good" if the value is between its limits, else `otherwise`. A missing value is unknown."""
    value = row.get(name)
    if value is None:
        said: Said = ("unreachable", unknown) if unknown else ("unknown", "not measured yet")
    else:
        said = GOOD if (low is None or value >= low) and (high is None or value <= high) else otherwise
    return Indicator(name, LABELS[name], value, low, high, *said)


def _collection(row: Mapping[str, Any], setup: Setup, seen: _WaitShares) -> Indicator:
    """Compare with a free run, in which none of the workers waits."""
    rate = row.get("steps_per_s")
    low = None if not rate else RATE * rate * seen.free
    return _indicator(row, "steps_per_s", low, None, _why_slow(setup, seen))


def _why_slow(setup: Setup, seen: _WaitShares) -> Said:
    if seen.workers_down > seen.workers_wait:
        why = "they start" if seen.starting else "they die and are replaced"
        down = f"workers are down {_percent(seen.workers_down)} of the time: {why}"
        return "unreachable" if seen.starting else "bad", down
    if setup.in_turn:
        return "unreachable", f"{setup.mode} takes turns: environments rest while the learner learns"
    if seen.learner_limits:
        return "unreachable", seen.learner_is_limit
    if setup.mode == "batch":
        return "unreachable", f"batch waits for its slowest worker: {_percent(seen.workers_wait)} of the workers' time"
    waiting = f"workers wait {_percent(seen.workers_wait)} of the time"
    both = f"{waiting}, and so does the learner: the limit of rows under way is too low"
    return ("bad", both) if seen.both_wait else ("unreachable", waiting)


def _updates(row: Mapping[str, Any], setup: Setup, seen: _WaitShares) -> Indicator:
    """Compare with the updates for the rows of a free run. One update may be missing in the averaging window."""
    rate = row.get("steps_per_s")
    if setup.rows_per_update is None:
        why = "no target: updates differ in their number of rows"
        return Indicator("updates_per_s", LABELS["updates_per_s"], row.get("updates_per_s"), None, None, "unknown", why)
    over = max(setup.log_every, min(PACE, MOST * setup.log_every, row.get("wall_s") or PACE))
    low = None if not rate else max(0.0, RATE * rate * seen.free / setup.rows_per_update - 1.0 / over)
    otherwise = _why_slow(setup, seen)
    if seen.workers_wait <= WAITING >= seen.workers_down:
        busy = _percent(seen.learner_busy)
        otherwise = "unreachable", f"rows come faster than updates: the learner is busy {busy} of the time"
    if (row.get("env_steps") or 0) < setup.learning_starts:
        otherwise = "unreachable", f"learning begins after {setup.learning_starts:,} rows"
    return _indicator(row, "updates_per_s", low, None, otherwise)


def _queue(row: Mapping[str, Any], setup: Setup, seen: _WaitShares) -> Indicator:
    none = f"{setup.mode} takes turns: there is no queue" if setup.in_turn else ""
    value, (low, high) = row.get("queue_util"), QUEUE
    full = value is not None and value > high
    if full and seen.both_wait and seen.learner_waits > 0.5:
        said: Said = ("bad", "rows wait in the queue while the learner waits for rows and workers wait for the learner")
    elif full:
        said = "unreachable", f"{seen.learner_is_limit}; fewer workers would be enough"
    elif seen.learner_waits > WAITING:
        idle = f"it waits {_percent(seen.learner_waits)} of the time"
        said = "unreachable", f"the learner takes each fragment when it arrives: {idle}"
    else:
        said = "unreachable", "the learner keeps up: a shorter queue would be enough"
    return _indicator(row, "queue_util", low, high, said, unknown=none)


def _buffer(row: Mapping[str, Any], setup: Setup) -> Indicator:
    low, high = BUFFER
    if setup.replay_rows is None:
        why = f"{setup.algo.upper()} empties its rollout buffer at every update: it swings between 0 and 100 %"
        return Indicator("buffer_util", LABELS["buffer_util"], row.get("buffer_util"), low, high, "unreachable", why)
    filled = None if setup.replay_filled is None else min(setup.replay_filled / setup.replay_rows, 1.0)
    if (row.get("buffer_util") or 0.0) > high:
        said: Said = "unreachable", "a replay buffer that is full stays full: new rows replace the oldest"
    elif filled is not None and filled < low:
        said = "unreachable", f"the rows of this run fill {_percent(filled)} of {setup.replay_rows:,} at most"
    else:
        said = "unreachable", f"it still fills: it holds up to {setup.replay_rows:,} rows"
    return _indicator(row, "buffer_util", low, high, said)


def _gpu(row: Mapping[str, Any], setup: Setup, seen: _WaitShares) -> Indicator:
    none = "no GPU here: the learner computes on the CPU" if setup.device == "cpu" else ""
    why = "the GPU is faster than this work needs: larger minibatches or networks would use it"
    if seen.learner_waits > WAITING:
        idle = _percent(seen.learner_waits)
        why = f"the environments are the limit: the learner waits for rows {idle} of the time"
    return _indicator(row, "gpu_util", GPU, None, ("unreachable", why), unknown=none)


def _cpu(row: Mapping[str, Any], setup: Setup, seen: _WaitShares) -> Indicator:
    why = _why_idle(setup, seen, int(row.get("workers/turns") or setup.workers))
    return _indicator(row, "cpu_util", CPU, None, ("unreachable", why))


def _why_idle(setup: Setup, seen: _WaitShares, workers: int) -> str:
    learner = min(seen.learner_busy, 1.0) * setup.threads if setup.device == "cpu" else 0.0
    if setup.in_turn:
        at_once = min(max(setup.workers, setup.threads), setup.cores)
        if at_once < CPU * setup.cores:
            return f"{setup.mode} uses {at_once} of {setup.cores} cores at a time"
        return f"{setup.mode} takes turns: environments and learner wait for each other"
    if setup.worker_cores is not None:
        most = min(1.0, (workers * setup.worker_cores + learner) / setup.cores)
        used = f"use {_percent(most)} of the CPU at most"
        if most < CPU and setup.worker_cores < 0.5:
            return f"workers sleep: {workers} of them {used}"
        if most < CPU:
            return f"{workers} workers {used}: more would use the rest"
    return seen.learner_is_limit if seen.learner_limits else "workers sleep in step(), or other programs use the cores"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
