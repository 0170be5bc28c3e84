"""Predicts the first rows and the first update of a run, and checks that its budget lasts until then."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import floor, log10

from freewheel.errors import UsageError
from freewheel.rollout.probe import usable_cores
from freewheel.run.advice.keeping_up import AT_ONCE, way_of
from freewheel.run.advice.throughput import StepTimes, forecast
from freewheel.run.plan import Plan

MARGIN = 2.0  # a run is refused if even this many times the predicted speed is too slow
SOON = 2.0  # seconds until the first update below which no remark is needed


@dataclass(frozen=True)
class Beginning:
    """The steps and rows until the first update of a run."""

    steps: int  # of each env, before the learner receives its first rows
    lanes: int
    rows: int | None  # that the first update takes; None: it takes a number of episodes
    rate: float | None  # env steps/s until then, at most; None: not known

    @property
    def seconds(self) -> tuple[float, float] | None:
        """Return the seconds until the first rows and until the first update; None: not known."""
        if self.rate is None or self.rows is None:
            return None
        delivered = self.steps * self.lanes
        return delivered / self.rate, max(delivered, self.rows) / self.rate

    def __str__(self) -> str:
        steps = f"{self.steps:,} step{'s' * (self.steps != 1)} of each env"
        told = f"the first rows come after {steps}, the first update after {self.rows:,} rows"
        return told if self.seconds is None else f"{told}: in about {' and '.join(map(_about, self.seconds))}"


def beginning_of(planned: Plan) -> Beginning:
    """Predict the beginning from the plan and the measured steps of its environment."""
    config, batch, way = planned.config, planned.batch, way_of(planned)
    rate = None
    if way is not None and not config.env.batched and planned.cost is not None and planned.cost.row > 0:
        rate = forecast(way, StepTimes.of(planned.cost), AT_ONCE, usable_cores()).rate
    rows = None if batch.episodes is not None else config.learner.rows_before_update(planned.learner_spec)
    return Beginning(config.collector.first_steps(batch), batch.lanes, rows, rate)


def checked(planned: Plan) -> Plan:
    """Return the plan with a remark on its beginning. UsageError if it would end before its first rows or update."""
    begins, config = beginning_of(planned), planned.config
    if begins.rows is None:
        return planned
    budget, named = config.run.budget, config.learner.starts_option
    starts = f"{named} takes {begins.rows:,} rows" if named else f"an update takes {begins.rows:,} rows"
    fewer = f"fewer {named}" if named else "a smaller --num-steps-per-env"
    # An on-policy learner finishes the update that it collects rows for.
    if budget.steps is not None and not config.learner.on_policy and begins.rows > budget.steps:
        raise UsageError(
            f"--steps {budget.steps:,} would end before the first update ({starts}): use more steps or {fewer}"
        )
    if budget.minutes is not None and begins.seconds is not None:
        delivered, learned = (seconds / MARGIN / 60 for seconds in begins.seconds)
        limit = f"--minutes {budget.minutes:g} would end before the first"
        if delivered > budget.minutes:
            when = f"{begins.steps:,} steps of each env take about {_about(begins.seconds[0])}"
            raise UsageError(f"{limit} rows ({when}): use a smaller --collection-batch-size or --num-steps-per-env")
        if learned > budget.minutes:
            raise UsageError(
                f"{limit} update ({starts}, in about {_about(begins.seconds[1])}): use {fewer}, or more time"
            )
    if config.learner.on_policy and (begins.seconds is None or begins.seconds[1] < SOON):
        return planned
    return replace(planned, remarks=(*planned.remarks, str(begins)))


def _about(seconds: float) -> str:
    """Write a duration with one digit, because a prediction is not exact."""
    value, unit = (seconds, "s") if seconds < 90 else (seconds / 60, "min") if seconds < 5400 else (seconds / 3600, "h")
    digits = floor(log10(value)) if value >= 0.1 else -1
    return f"{max(round(value, -digits), 0.1):g} {unit}"
