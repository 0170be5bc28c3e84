"""This module measures trainings. Each one does a given amount of work in a separate process and
has a real run directory.

    measurement = measure(
        TrainingRequest(
            argv=("CartPole-v1", "--mode", "batch", "--steps", "20480"), name="batch-1", folder=out / "runs"
        )
    )
    measurement.steps_per_s

Rates cover the window from the end of the warm-up to the end of the last update. Start-up is
reported separately. Use `TrainingProcess` to show the progress of a training that is running.
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

POLL = 0.1  # seconds between two polls of the process
GRACE = 20.0  # seconds that the process has to stop cleanly before it is killed
OUTPUT = "output.txt"
SETTLED = 0.3  # share of a training after which all workers have begun
COUNTS = ("produced", "trained", "queued", "open")


@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """Describes a training to measure."""

    argv: tuple[str, ...]  # arguments of `freewheel train`; --steps is the work
    name: str  # name of the run directory
    folder: Path  # parent of the run directory
    warm_up_rows: int = 0  # rates begin with the first update that has trained on this many rows in total
    limit_s: float = 600.0  # the training is stopped after this time
    evaluate: bool = False  # keep the evaluations that `argv` asks for; otherwise there are none
    log_every: float = 0.5  # seconds between two points of the curve

    @property
    def path(self) -> Path:
        return self.folder / self.name

    @property
    def words(self) -> list[str]:
        """Return all arguments of the command."""
        own = ["--run", self.name, "--runs-dir", str(self.folder), "--checkpoint-every", "0"]
        return [*self.argv, *own, "--log-every", f"{self.log_every:g}", *([] if self.evaluate else ["--evals", "0"])]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Holds what was measured in one training."""

    startup_s: float | None  # from the start of the process to the first step of an env
    wall_s: float  # duration of the training without the start of the process
    window_s: float  # from the end of the warm-up to the end of the last update; rates cover this window
    window_rows: int  # rows trained on in the window; if whole episodes come in bursts, rows collected in it
    rows: int  # all rows trained on (on-policy) or stored in the replay buffer
    updates: int
    episodes: int
    steps_per_s: float
    episodes_per_s: float | None  # steps/s divided by the mean length of the episodes that ended in the window
    updates_per_s: float
    return_final: float | None
    curve: tuple[tuple[float, int, float | None], ...]  # wall_s, env_steps, return_mean
    lag_mean: float | None
    lag_max: float | None
    memory_mb: float | None  # maximum of the trainer and the workers together
    cpu_util: float | None  # mean over the window, of all cores that may be used
    gpu_util: float | None
    produced: int
    trained: int
    queued: int
    open: int
    dropped: Mapping[str, int]
    shares: Mapping[str, Mapping[str, float]]  # shares of the time of "worker" and "learner", by kind
    path: str  # path of the run directory

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(order: TrainingRequest, watch: Callable[[TrainingProcess], None] = lambda _: None) -> Measurement:
    """Run a training to its end. `watch` is called about ten times a second. An exception that
    `watch` raises stops the training at once.

    Raise MeasureError if the training fails or takes too long.
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
    """A measured training that is running."""

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
        """Return the seconds since the process was started."""
        return time.monotonic() - self._since

    @property
    def newest(self) -> Mapping[str, Any]:
        """Return the newest row of the metrics, or an empty mapping if there is none."""
        return newest_row(self.order.path / "metrics.jsonl")

    def ended(self) -> bool:
        """Return whether the training has ended. A training whose time is over is stopped here."""
        if self._code is None and (code := self._process.poll()) is not None:
            self._end(code)
        elif self._code is None and self.seconds > self.order.limit_s:
            self._late = True
            self.close()
        return self._code is not None

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        if self._code is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def close(self) -> None:
        """Stop the training. The process is gone when this method returns."""
        if self._code is not None:
            return
        self.signal(signal.SIGTERM)
        try:
            code = self._process.wait(GRACE)
        except BaseException as error:
            self._process.kill()
            code = self._process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):  # for example a second signal
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
        """Return the measurement of a training that has ended. Raise MeasureError if it failed."""
        path = self.order.path
        if self._late:
            raise MeasureError(f"the training did not end within {self.order.limit_s:.0f} s; see {path}")
        summary = _object(path / "summary.json")
        if self._code not in (DONE, DEGRADED):
            raise MeasureError(summary.get("error") or self._last_words())
        noted = _object(path / FILE)
        marks = noted.get("marks") or []
        rows = _rows(path / "metrics.jsonl")
        first = next((mark for mark in marks if mark[1] >= self.order.warm_up_rows), None)
        if first is None or first is marks[-1]:
            raise MeasureError(f"the training made {len(marks)} updates, which are too few to measure; see {path}")
        stepped = summary.get("first_step_s")
        startup = None if stepped is None else noted["began"] - self._since + stepped
        found = _measured(first, marks[-1], summary, rows, startup)
        return _as_collected(found, rows, marks[-1][0]) if noted.get("whole_episodes") else found

    def _last_words(self) -> str:
        output = self.order.path / OUTPUT
        lines = (output if output.is_file() else self._output).read_text(errors="replace").splitlines()
        reports = [line.removeprefix("freewheel: ") for line in lines if line.startswith("freewheel: ")]
        return next(iter([*reports, *lines[-1:]]), f"the training ended with exit code {self._code}")


def _measured(
    first: Sequence[float], last: Sequence[float], summary: Row, rows: Sequence[Row], startup: float | None
) -> Measurement:
    """Compute the figures from the marks at both ends of the window, the summary and the rows of
    metrics."""
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
    """Return the measurement with the rate at which rows were collected, if that rate is lower.
    When workers send whole episodes, all of them may send at about the same time. A training that
    lasts only a few episodes then trains on them faster than they are collected."""
    known = [(row["wall_s"], row["produced"]) for row in rows if row["wall_s"] <= end and row["produced"]]
    later = [one for one in known if one[0] >= SETTLED * end]
    if len(later) < 2:
        return found
    began, before = later[0]
    ended, after = later[-1]
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
    """Read a JSON object that the training has written. The result is empty if there is none."""
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
