"""Measured trainings: a given amount of work in a process of its own, with a real run directory, timed.

    measurement = measure(Order(argv=("CartPole-v1", "--mode", "batch", "--steps", "20480"), name="batch-1", folder=out / "runs"))
    measurement.steps_per_s

Rates are over the window from the end of the warm-up to the end of the last update; start-up is told apart. `Training` is the
same under way, for those who show its progress.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from freewheel.errors import DEGRADED, DONE, MeasureError
from freewheel.files.read import newest_row
from freewheel.transport import command
from freewheel_lab.bench.training_main import FILE

Row: TypeAlias = Mapping[str, Any]

POLL = 0.1  # seconds between two looks at the process
GRACE = 20.0  # seconds to end in good order, then it is killed
OUTPUT = "output.txt"
SETTLED = 0.3  # of a training: by then all workers have begun
COUNTS = ("produced", "trained", "queued", "open")


@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """A training to be measured."""

    argv: tuple[str, ...]  # what follows `freewheel train`; --steps is the work
    name: str  # of its run directory
    folder: Path  # that holds it
    warm_up_rows: int = 0  # rates begin with the first update that has trained on so many rows in all
    limit_s: float = 600.0  # it is ended after this
    evaluate: bool = False  # whether evaluations are left as `argv` has them; else there are none
    log_every: float = 0.5  # seconds between two points of the curve

    @property
    def path(self) -> Path:
        return self.folder / self.name

    @property
    def words(self) -> list[str]:
        """The whole command."""
        own = ["--run", self.name, "--runs-dir", str(self.folder), "--checkpoint-every", "0"]
        return [*self.argv, *own, "--log-every", f"{self.log_every:g}", *([] if self.evaluate else ["--evals", "0"])]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What was measured in one training."""

    startup_s: float | None  # from the start of the process to the first step of an env
    wall_s: float  # of the training, without the start of the process
    window_s: float  # from the end of the warm-up to the end of the last update: rates are over this
    window_rows: int  # trained on in the window; where whole episodes come in bursts, collected in it
    rows: int  # trained on (on-policy) or stored in the replay buffer, in all
    updates: int
    episodes: int
    steps_per_s: float
    episodes_per_s: float | None  # steps/s over the mean length of the episodes that ended in the window
    updates_per_s: float
    return_final: float | None
    curve: tuple[tuple[float, int, float | None], ...]  # wall_s, env_steps, return_mean
    lag_mean: float | None
    lag_max: float | None
    memory_mb: float | None  # of trainer and workers together, at most
    cpu_util: float | None  # of all cores that may be used; mean of the window
    gpu_util: float | None
    produced: int
    trained: int
    queued: int
    open: int
    dropped: Mapping[str, int]
    shares: Mapping[str, Mapping[str, float]]  # of the time of "worker" and "learner", by kind
    path: str  # of the run directory

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(order: TrainingRequest, watch: Callable[[TrainingProcess], None] = lambda _: None) -> Measurement:
    """Run a training to its end. `watch` is called about ten times a second; what it raises ends the training at once.

    MeasureError if the training fails or takes too long.
    """
    training = TrainingProcess(order)
    try:
        while not training.ended():
            watch(training)
            time.sleep(POLL)
    finally:
        training.close()
    return training.result()


class TrainingProcess:
    """A measured training under way."""

    def __init__(self, order: TrainingRequest) -> None:
        self.order = order
        order.folder.mkdir(parents=True, exist_ok=True)
        self._output = order.folder / f".{order.name}.out"
        self._since = time.monotonic()
        self._process: subprocess.Popen[bytes] = command.start(
            "freewheel_lab.bench.training_main", order.words, self._output
        )
        self._code: int | None = None
        self._late = False

    @property
    def seconds(self) -> float:
        """Since its process was started."""
        return time.monotonic() - self._since

    @property
    def newest(self) -> Mapping[str, Any]:
        """The newest row of its metrics, or none."""
        return newest_row(self.order.path / "metrics.jsonl")

    def ended(self) -> bool:
        """Whether it has ended, by itself or because its time is over."""
        if self._code is None and (code := self._process.poll()) is not None:
            self._end(code)
        elif self._code is None and self.seconds > self.order.limit_s:
            self._late = True
            self.close()
        return self._code is not None

    def signal(self, number: int) -> None:
        """Pass a signal on."""
        if self._code is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def close(self) -> None:
        """Nothing of it runs when this returns."""
        if self._code is not None:
            return
        self.signal(signal.SIGTERM)
        try:
            code = self._process.wait(GRACE)
        except BaseException as error:
            self._process.kill()
            code = self._process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):  # a second signal
                self._end(code)
                raise
        self._end(code)

    def _end(self, code: int) -> None:
        self._code = code if code >= 0 else 128 - code
        if self.order.path.is_dir():
            os.replace(self._output, self.order.path / OUTPUT)
        else:
            self._output = self._output.rename(self.order.folder / f"{self.order.name}.{OUTPUT}")

    def result(self) -> Measurement:
        """What was measured, after its end; MeasureError if it failed."""
        path = self.order.path
        if self._late:
            raise MeasureError(f"it did not end within {self.order.limit_s:.0f} s; see {path}")
        summary = _object(path / "summary.json")
        if self._code not in (DONE, DEGRADED):
            raise MeasureError(summary.get("error") or self._last_words())
        noted = _object(path / FILE)
        marks, rows = noted.get("marks") or [], _rows(path / "metrics.jsonl")
        first = next((mark for mark in marks if mark[1] >= self.order.warm_up_rows), None)
        if first is None or first is marks[-1]:
            raise MeasureError(f"it made {len(marks)} updates, too few to be measured; see {path}")
        stepped = summary.get("first_step_s")
        startup = None if stepped is None else noted["began"] - self._since + stepped
        found = _measured(first, marks[-1], summary, rows, startup)
        return _as_collected(found, rows, marks[-1][0]) if noted.get("whole_episodes") else found

    def _last_words(self) -> str:
        output = self.order.path / OUTPUT
        lines = (output if output.is_file() else self._output).read_text(errors="replace").splitlines()
        reports = [line.removeprefix("freewheel: ") for line in lines if line.startswith("freewheel: ")]
        return next(iter([*reports, *lines[-1:]]), f"it ended with exit code {self._code}")


def _measured(
    first: Sequence[float], last: Sequence[float], summary: Row, rows: Sequence[Row], startup: float | None
) -> Measurement:
    """From the marks at both ends of the window, the summary, and the rows of metrics."""
    seconds, count, updates, episodes, steps = (after - before for before, after in zip(first, last, strict=True))
    inside = [row for row in rows if first[0] < row["wall_s"] <= last[0]] or list(rows)
    length = steps / episodes if episodes else (last[4] / last[3] if last[3] else None)
    rate = count / seconds
    memory = [row["memory/trainer_mb"] + row["memory/workers_mb"] for row in rows]
    return Measurement(
        startup_s=startup,
        wall_s=summary["wall_s"],
        window_s=seconds,
        window_rows=int(count),
        rows=summary["trained"],
        updates=summary["updates"],
        episodes=summary["episodes"],
        steps_per_s=rate,
        episodes_per_s=rate / length if length else None,
        updates_per_s=updates / seconds,
        return_final=summary["return_mean"],
        curve=tuple((row["wall_s"], row["env_steps"], row["return_mean"]) for row in rows),
        lag_mean=_mean(inside, "lag_mean"),
        lag_max=summary["lag_max"],
        memory_mb=max(memory, default=None),
        cpu_util=_mean(inside, "cpu_util"),
        gpu_util=_mean(inside, "gpu_util"),
        **{name: summary[name] for name in COUNTS},
        dropped=summary["dropped"],
        shares=summary["shares"],
        path=summary["path"],
    )


def _as_collected(found: Measurement, rows: Sequence[Row], end: float) -> Measurement:
    """Where whole episodes are handed over, all workers may hand over theirs at about the same time, and a training that lasts
    only a few episodes trains on them faster than they come. Then the rate is that at which rows were collected."""
    known = [(row["wall_s"], row["produced"]) for row in rows if row["wall_s"] <= end and row["produced"]]
    later = [one for one in known if one[0] >= SETTLED * end]
    if len(later) < 2:
        return found
    (began, before), (ended, after) = later[0], later[-1]
    rate = (after - before) / (ended - began)
    if not 0 < rate < found.steps_per_s:
        return found
    slower = rate / found.steps_per_s
    return replace(
        found,
        window_s=ended - began,
        window_rows=int(after - before),
        steps_per_s=rate,
        episodes_per_s=None if found.episodes_per_s is None else found.episodes_per_s * slower,
        updates_per_s=found.updates_per_s * slower,
    )


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return statistics.fmean(values) if values else None


def _object(path: Path) -> Row:
    """A JSON object that the training has written; empty if there is none."""
    try:
        found: Row = json.loads(path.read_text())
        return found
    except (OSError, ValueError):
        return {}


def _rows(path: Path) -> list[Row]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        return []
