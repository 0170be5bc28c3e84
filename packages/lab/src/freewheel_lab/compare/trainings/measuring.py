"""This module runs the trainings of a comparison and shows their progress. In each repeat all modes
take turns, and each repeat begins with another mode."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from freewheel.errors import MeasureError
from freewheel.run.stopping.stop import Interrupted, Stop
from freewheel.sinks.formats import clock
from freewheel_lab.bench.measure import Measurement, TrainingProcess, TrainingRequest, measure
from freewheel_lab.compare.results import ResultRow
from freewheel_lab.compare.summary import rates
from freewheel_lab.compare.trainings.cases import Case
from freewheel_lab.compare.trainings.sizing import START, WorkSize
from freewheel_lab.plots.numbers import number

LIMIT = 5.0  # a training is stopped after this many times the expected seconds
SLACK = 120.0  # plus this many seconds
EVERY = 0.5  # seconds between two updates of the display, because drawing costs time that is measured
POINTS = 40  # points of a curve
FINEST = 0.2  # minimum seconds between two points
COARSEST = 2.0  # maximum seconds between two points


@dataclass(frozen=True)
class MeasuringJob:
    """Describes one training to run."""

    case: Case
    repeat: int
    seed: int

    @property
    def name(self) -> str:
        label = "".join(sign if sign.isalnum() else "-" for sign in self.case.label).strip("-")
        return f"{label}-r{self.repeat}"


def jobs(cases: Sequence[Case], seeds: Sequence[int]) -> list[MeasuringJob]:
    """Return all trainings in order. Each repeat has all cases and begins with another one. A
    machine that is slow for a minute then does not always slow down the same case."""
    found = []
    for turn, seed in enumerate(seeds):
        start = turn % len(cases)
        found += [MeasuringJob(case, turn + 1, seed) for case in [*cases[start:], *cases[:start]]]
    return found


@dataclass
class MeasuringRounds:
    """Runs the trainings and holds their results and failures."""

    jobs: Sequence[MeasuringJob]
    size: WorkSize
    folder: Path  # parent of the run directories
    stop: Stop
    display: ComparisonProgress
    keep: Callable[[], None] = lambda: None  # called after every training
    rows: list[ResultRow] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    done: int = 0  # number of jobs that have ended
    _took: dict[str, list[float]] = field(default_factory=dict)  # seconds of whole trainings, by case

    def run(self) -> None:
        """Run all trainings. A signal raises Interrupted when the present training has ended."""
        for position, job in enumerate(self.jobs, start=1):
            if job.case.label not in self.failed:
                self._one(job, position)

    def expected(self, job: MeasuringJob) -> float:
        """Return the expected seconds of a training, including start-up."""
        if known := self._took.get(job.case.label):
            return sum(known) / len(known)
        return self.size.seconds.get(job.case.label, self.size.slowest_s) + START

    def left(self, spent: float = 0.0) -> float:
        """Return the seconds until all trainings have ended, if the present one has run for `spent`
        seconds."""
        rest = [job for job in self.jobs[self.done :] if job.case.label not in self.failed]
        if not rest:
            return 0.0
        return max(self.expected(rest[0]) - spent, 0.0) + sum(self.expected(job) for job in rest[1:])

    def _one(self, job: MeasuringJob, position: int) -> None:
        began = time.monotonic()
        row = None
        problem = ""

        def watch(training: TrainingProcess) -> None:
            self.stop.check()
            self.display.training(self, job, training)

        try:
            row = row_of(measure(self._order(job), watch), job)
            self.rows.append(row)
            self._took.setdefault(job.case.label, []).append(time.monotonic() - began)
        except MeasureError as error:
            if self.stop.signal is not None:
                raise Interrupted from None
            problem = str(error).strip()
            self.failed[job.case.label] = problem
        self.done = position
        self.display.ended(self, job, row, problem)
        self.keep()

    def _order(self, job: MeasuringJob) -> TrainingRequest:
        expected = self.size.seconds.get(job.case.label, self.size.slowest_s)
        every = min(max(expected / POINTS, FINEST), COARSEST)
        rows, warm_up_rows = self.size.of(job.case.label)
        return TrainingRequest(
            argv=(*job.case.argv(seed=job.seed, steps=rows), *job.case.trusting),
            name=job.name,
            folder=self.folder,
            warm_up_rows=warm_up_rows,
            limit_s=LIMIT * self.size.slowest_s + SLACK,
            evaluate="evals" in job.case.given.flags,
            log_every=every,
        )


def row_of(found: Measurement, job: MeasuringJob) -> ResultRow:
    """Return a measurement together with the job that it belongs to."""
    case = job.case
    labels = {"repeat": job.repeat, "mode": case.label, "seed": job.seed, "workers": case.workers, "envs": case.envs}
    return ResultRow(**{**vars(found), **labels})


def with_steps(case: Case, steps: int) -> Case:
    """Return the case with this number of steps of each env in an update, if the case has that
    option."""
    return replace(case, own={**case.own, "num_steps_per_env": steps}) if "num_steps_per_env" in case.own else case


class ComparisonProgress:
    """Shows the progress on standard error: a panel on a terminal, otherwise a line for each
    training."""

    def __init__(self, title: str) -> None:
        from freewheel.files.terminal import Terminal

        self._title = title
        self._console = Terminal(stderr=True)
        self._live = None
        self._next = 0.0
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def training(self, rounds: MeasuringRounds, job: MeasuringJob, training: TrainingProcess) -> None:
        if self._live is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY
            self._live.update(self._panel(rounds, job, training), refresh=True)

    def ended(self, rounds: MeasuringRounds, job: MeasuringJob, row: ResultRow | None, problem: str) -> None:
        prefix = f"{rounds.done:3d}/{len(rounds.jobs)}  repeat {job.repeat}  {job.case.label:<12}"
        if row is None:
            self.say(f"{prefix}  failed: {problem.splitlines()[0] if problem else 'no reason was given'}")
            return
        started = "" if row.startup_s is None else f"  start-up {row.startup_s:.1f} s"
        self.say(f"{prefix}  {row.steps_per_s:>10,.0f} steps/s{started}  eta {clock(rounds.left())}")

    def _panel(self, rounds: MeasuringRounds, job: MeasuringJob, training: TrainingProcess) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        newest = training.newest
        state = "starting"
        if newest:
            share = min(1.0, newest["env_steps"] / rounds.size.of(job.case.label)[0])
            state = f"{share:4.0%}  {number(newest['steps_per_s'])} steps/s now"
        head = f"{self._title}  training {rounds.done + 1} of {len(rounds.jobs)}  eta {clock(rounds.left(training.seconds))}"
        table = Table.grid(padding=(0, 2), pad_edge=True)
        for label in dict.fromkeys(one.case.label for one in rounds.jobs):
            own = [row for row in rounds.rows if row.mode == label]
            speed = "  ".join(number(rate) for rate in rates(own).values()) if own else ""
            here = label == job.case.label
            now = f"repeat {job.repeat}  {state}" if here else "failed" if label in rounds.failed else ""
            table.add_row(
                Text(label, "bold" if here else ""), Text(speed), Text(now, "red" if label in rounds.failed else "dim")
            )
        return Group(Text(head), table)
