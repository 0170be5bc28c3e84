"""The best settings run for real: short trainings in processes of their own."""

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
from freewheel.run.advice.prospects import words
from freewheel_lab.bench.measure import Measurement, TrainingRequest, measure
from freewheel_lab.tune.search import TuningCandidate

WARM_UP, FEWEST = 2, 5  # updates of a trial before the window, and in all
WARM_UP_SHARE = 0.2  # of the rows of a trial that are not counted, at least
STARTING = 5.0  # seconds until a training has begun, about
LONGEST = 6.0  # times as long as expected, then it is ended
OWN = ("steps", "minutes", "episodes", "run", "runs_dir", "evals", "log_every", "checkpoint_every", "sinks")


@dataclass(frozen=True)
class TuningTrial:
    """A setting, and what a training with it made."""

    candidate: TuningCandidate
    measured: Measurement | None
    failed: str = ""  # why it could not be measured

    @property
    def rate(self) -> float | None:
        """Env steps/s."""
        return None if self.measured is None else self.measured.steps_per_s

    @property
    def error(self) -> float | None:
        """How far the prediction was off: 0.1 is a tenth too much."""
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
    """What follows `freewheel train` for a run with these options in place of its own."""
    others = replace(config, sources={name: source for name, source in config.sources.items() if name not in options})
    line = words(others)
    for name, value in options.items():
        line += [flags.as_flag(name), *flags.tokens(value)]
    return line


def expected_s(candidate: TuningCandidate, seconds: float) -> float:
    """About how long a trial takes, its start included."""
    return STARTING + _rows(candidate, seconds) / candidate.forecast.rate


def _rows(candidate: TuningCandidate, seconds: float) -> int:
    """Whole updates that take about so long, and never too few to be measured."""
    each = candidate.plan.batch.rows if candidate.plan.batch.episodes is None else 1000
    return each * max(FEWEST, ceil(candidate.forecast.rate * seconds / each))


def run_trial(candidate: TuningCandidate, seconds: float, *, seed: int = 0, trust: bool = False) -> TuningTrial:
    """Train with a setting for about so many seconds; a failure is told in the result."""
    rows, plan = _rows(candidate, seconds), candidate.plan
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
