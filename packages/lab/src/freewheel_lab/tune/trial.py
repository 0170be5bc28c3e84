"""This module runs the best settings for real, as short trainings in separate processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from multiprocessing.util import get_temp_dir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from freewheel.config import flags
from freewheel.config.resolve import Config
from freewheel.errors import MeasureError
from freewheel.files.reach import typed
from freewheel.run.advice.predictions import words
from freewheel_lab.bench.measure import Measurement, TrainingRequest, measure
from freewheel_lab.tune.search import TuningCandidate

WARM_UP = 2  # updates of a trial before the window
FEWEST = 5  # minimum updates of a trial
WARM_UP_SHARE = 0.2  # minimum share of a trial's rows that is not counted
STARTING = 5.0  # approximate seconds until a training has begun
LONGEST = 6.0  # a trial is stopped after this many times its expected duration
OWN = ("steps", "minutes", "episodes", "run", "runs_dir", "evals", "log_every", "checkpoint_every", "sinks")


@dataclass(frozen=True)
class TuningTrial:
    """Holds a setting and the result of a training with it."""

    candidate: TuningCandidate
    measured: Measurement | None
    failed: str = ""  # why it could not be measured

    @property
    def rate(self) -> float | None:
        """Return env steps/s."""
        return None if self.measured is None else self.measured.steps_per_s

    @property
    def error(self) -> float | None:
        """Return the relative error of the prediction. 0.1 means that it was 10 % too high."""
        return None if self.rate is None else self.candidate.forecast.rate / self.rate - 1

    def to_json(self) -> dict[str, Any]:
        lag = None if self.measured is None else self.measured.lag_mean
        return {
            "options": self.candidate.options,
            "predicted": self.candidate.forecast.rate,
            "measured": self.rate,
            "error": self.error,
            "lag_predicted": self.candidate.forecast.lag,
            "lag_measured": lag,
            "memory_mb": None if self.measured is None else self.measured.memory_mb,
            "failed": self.failed or None,
        }


def command_words(config: Config, options: dict[str, Any]) -> list[str]:
    """Return the arguments of `freewheel train` for a run in which these options replace its own."""
    others = replace(config, sources={name: source for name, source in config.sources.items() if name not in options})
    line = words(others)
    for name, value in options.items():
        line += [flags.as_flag(name), *flags.tokens(value)]
    return line


def expected_s(candidate: TuningCandidate, seconds: float) -> float:
    """Return the approximate duration of a trial with its start."""
    return STARTING + _rows(candidate, seconds) / candidate.forecast.rate


def _rows(candidate: TuningCandidate, seconds: float) -> int:
    """Return the rows of whole updates that take about this long, with a minimum that can be
    measured."""
    each = candidate.plan.batch.rows if candidate.plan.batch.episodes is None else 1000
    return each * max(FEWEST, ceil(candidate.forecast.rate * seconds / each))


def run_trial(candidate: TuningCandidate, seconds: float, *, seed: int = 0, trust: bool = False) -> TuningTrial:
    """Train with a setting for about this many seconds. A failure is part of the result."""
    rows = _rows(candidate, seconds)
    plan = candidate.plan
    own = {name: source for name, source in plan.config.sources.items() if name not in OWN}
    line = command_words(replace(plan.config, sources=own), candidate.options)
    warm = max(WARM_UP * plan.batch.rows, int(WARM_UP_SHARE * rows))
    with TemporaryDirectory(prefix="tune-", dir=get_temp_dir()) as folder:
        order = TrainingRequest(
            argv=(*line, "--steps", str(rows), "--seed", str(seed), *(["--trust"] if trust else [])),
            name="trial",
            folder=typed(Path(folder)),
            warm_up_rows=warm,
            limit_s=STARTING * LONGEST + LONGEST * rows / candidate.forecast.rate,
        )
        try:
            return TuningTrial(candidate, measure(order))
        except MeasureError as error:
            return TuningTrial(candidate, None, str(error).splitlines()[0])
