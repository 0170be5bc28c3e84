"""This module carries out a comparison: it plans and runs the trainings, computes the figures and
writes the files."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

from freewheel.collect.lockstep import LockstepConfig
from freewheel.collect.workers import WORKER_MEMORY
from freewheel.errors import FileError, MeasureError, UsageError
from freewheel.rollout.probe import usable_cores
from freewheel.run.advice.keeping_up import AT_ONCE, way_of
from freewheel.run.advice.policy_times import PolicyClock
from freewheel.run.advice.predictions import WAITS_FOR, ModeRate, predict, step_times
from freewheel.run.advice.throughput import Kind, PolicyTimes, StepTimes, Way, forecast
from freewheel.run.process import learner_threads
from freewheel.run.stopping.stop import Interrupted, Stop
from freewheel.sinks.formats import clock
from freewheel.timeline.chrome import read as read_timeline
from freewheel.timeline.model import Timeline
from freewheel_lab.bench.hardware import hardware
from freewheel_lab.bench.measure import TrainingRequest, measure
from freewheel_lab.compare import report, table
from freewheel_lab.compare.results import IdealSpeed, ResultRow, Results, ScalingResults, WorkAmount
from freewheel_lab.compare.summary import summarised
from freewheel_lab.compare.trainings.cases import Case, GivenOptions, SharedSettings, set_up
from freewheel_lab.compare.trainings.measuring import (
    LIMIT,
    SLACK,
    ComparisonProgress,
    MeasuringRounds,
    jobs,
    with_steps,
)
from freewheel_lab.compare.trainings.sizing import LEAST_UPDATES, START, WorkDemand, WorkSize, size
from freewheel_lab.compare.verdict import judged, variants
from freewheel_lab.compare.worker_scaling import MeasuredPoint, fit, scaled, way_with

RUNS = "runs"  # subfolder of the comparison
TRACED_UPDATES = 3  # minimum number of updates of a recorded training
TRACED_S = 2.0  # seconds of it that are shown
MOST_SPANS = 8_000  # spans of a timeline
PILOT_S = 300.0  # time limit in seconds of a pilot training, which is run if speeds cannot be predicted


@dataclass(frozen=True, kw_only=True)
class ComparisonRequest:
    """Holds what the user asked for."""

    given: GivenOptions
    modes: tuple[str, ...]
    budget_s: float
    repeats: int
    command: str
    scale: tuple[int, ...] = ()
    timelines: bool = True


@dataclass(frozen=True, kw_only=True)
class ComparisonPlan:
    """Holds the plan of a comparison before anything is trained."""

    request: ComparisonRequest
    setting: SharedSettings
    cases: tuple[Case, ...]  # includes variants
    predictions: Mapping[str, ModeRate]  # by label
    size: WorkSize
    ideal: IdealSpeed
    times: StepTimes | None  # times of the environment; None: it was not measured
    policy: PolicyTimes | None  # times of acting and learning; None: they were not measured

    @property
    def seeds(self) -> tuple[int, ...]:
        first = self.setting.plan.config.run.seed
        return tuple(range(first, first + self.request.repeats))

    @property
    def able(self) -> list[Case]:
        return [case for case in self.cases if case.plan is not None]

    @property
    def seconds(self) -> float:
        """Return the expected duration of all trainings, including those that are recorded for
        timelines."""
        recorded = len(self.setting.able) * (START + TRACED_S) if self.request.timelines else 0.0
        return self.size.duration(self.request.repeats) + recorded

    @property
    def title(self) -> str:
        config = self.setting.plan.config
        return f"{config.env.label}  {config.algo}"

    def results(self) -> Results:
        """Return the results as they are before the first training."""
        config = self.setting.plan.config
        rows = self.size
        work = WorkAmount(
            rows=rows.rows,
            updates=rows.updates,
            rows_per_update=rows.steps_per_env * self.setting.envs,
            envs=self.setting.envs,
            steps_per_env=rows.steps_per_env,
            warm_up=0 if rows.updates is None else rows.warm_up_rows * rows.updates // rows.rows,
            parts=rows.parts,
            seeds=self.seeds,
            notes=(*rows.notes, *self.setting.notes),
        )
        return Results(
            env=config.env.label,
            algo=config.algo,
            command=self.request.command,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            hardware={**hardware(), "device": self.setting.plan.device},
            work=work,
            ideal=self.ideal,
            budget_s=self.request.budget_s,
            repeats=self.request.repeats,
            modes=tuple(case.info() for case in self.cases),
        )

    def lines(self) -> list[str]:
        """Return the plan as text."""
        found = [
            f"{self.title}: {len(self.able)} of {len(self.cases)} modes and variants, {self.request.repeats} repeats"
        ]
        for case in self.cases:
            if case.plan is None:
                found.append(f"  {case.label:<24} skipped: {case.refused.splitlines()[0]}")
                continue
            one = self.predictions.get(case.label)
            rate = f"about {one.rate:,.0f} steps/s" if one is not None and one.rate else "speed unknown"
            if one is not None and one.forecast is not None:
                rate += f", waits for {WAITS_FOR[one.forecast.limit]}"
            layout = f"{case.workers} x {case.envs // case.workers} envs"
            found.append(f"  {case.label:<24} {layout:<14} {clock(self.size.seconds[case.label])} per repeat, {rate}")
        notes = (*self.size.notes, *self.setting.notes)
        trainings = self.request.repeats * len(self.able)
        scale = [WorkerScaling.of(self).line()] if self.request.scale else []
        return [*found, *(f"  {note}" for note in notes), f"{trainings} trainings, eta {clock(self.seconds)}", *scale]


def prepare(request: ComparisonRequest, report: Callable[[str], None], pilot_folder: Path | None) -> ComparisonPlan:
    """Measure the environment, predict every mode, and choose the amount of work. If nothing can be
    predict, run a pilot training in `pilot_folder`. None means that no training may be started."""
    setting = set_up(request.given, request.modes, report)
    cases = (*setting.cases, *_compile_variants(setting))
    times = step_times(setting.plan.config, setting.cost) if setting.cost.row > 0 else None
    predictions: dict[str, ModeRate] = {}
    policy: PolicyTimes | None = None
    if times is not None:
        report("measuring the policy and the learner ...")
        measure_once = PolicyClock()
        with learner_threads(setting.plan.config.run.machine.threads):
            for case in cases:
                if case.plan is not None:
                    predictions[case.label] = predict(case.plan, times, measure_once)
            policy = measure_once(setting.plan)
    rates = {
        case.label: predictions[case.label].rate if case.label in predictions else 0.0 for case in cases if case.plan
    }
    if not any(rates.values()) and pilot_folder is not None and setting.plan.config.run.limits.steps is None:
        report("running a pilot training to choose the amount of work ...")
        rate = _pilot(setting, pilot_folder)
        rates = dict.fromkeys(rates, rate)
    chosen = size(_demand(request, setting, rates))
    if not any(rates.values()):
        note = "speeds cannot be predicted for this run, so a pilot training decides how much work fits"
        chosen = replace(chosen, notes=(note,) if request.given.flags.get("steps") is None else chosen.notes)
    cases = tuple(with_steps(case, chosen.steps_per_env) for case in cases)
    comparison = ComparisonPlan(
        request=request,
        setting=setting,
        cases=cases,
        predictions=predictions,
        size=chosen,
        ideal=_ideal(setting, times),
        times=times,
        policy=policy,
    )
    if request.scale:
        WorkerScaling.of(comparison)  # raises its errors before anything is trained
    return comparison


def _demand(request: ComparisonRequest, setting: SharedSettings, rates: Mapping[str, float]) -> WorkDemand:
    config = setting.plan.config
    learner = config.learner
    given = config.sources.get("num_steps_per_env", "")
    lengths = setting.cost.lengths
    return WorkDemand(
        budget_s=request.budget_s,
        repeats=request.repeats,
        envs=setting.envs,
        steps_per_env=config.run.steps_per_env,
        rates=rates,
        steps=config.run.limits.steps,
        on_policy=learner.on_policy,
        fixed_steps_per_env=not given.startswith(("default", "algorithm")),
        starts=0 if learner.on_policy else learner.rows_before_update(setting.plan.learner_spec),
        episode_steps=sum(lengths) / len(lengths) if lengths else float(config.env.episode_limit or 0),
    )


def _ideal(setting: SharedSettings, times: StepTimes | None) -> IdealSpeed:
    """Return the speed of envs that never wait. Each steps all the time, as far as there are cores."""
    envs = setting.envs
    cores = usable_cores()
    cost = setting.cost
    formula = "min(envs / seconds of a step, cores / processor seconds of a step), resets included"
    if times is None:
        return IdealSpeed(steps_per_s=None, formula=formula, envs=envs, cores=cores)
    row = times
    places = envs
    if times.together:  # many envs in a process cost little more than one, so each core gets a process with its share
        places = min(cores, envs)
        row = times.beside(envs // places)
        formula = f"{formula}, for {places} processes with {envs // places} envs each"
    rate = min(places / row.row, cores / row.cpu if row.cpu > 0 else math.inf)
    return IdealSpeed(
        steps_per_s=rate,
        formula=f"{formula}: min({places} / {1e3 * row.row:.3g} ms, {cores} / {1e3 * row.cpu:.3g} ms)",
        envs=envs,
        cores=cores,
        row_s=times.row,
        cpu_s=times.cpu,
        step_median_s=cost.median,
        slowest_s=times.slowest_of(envs),
        episode_steps=sum(cost.lengths) / len(cost.lengths) if cost.lengths else None,
    )


def _compile_variants(setting: SharedSettings) -> list[Case]:
    """Return variants without CUDA graphs of a synchronous and of an asynchronous mode. There are
    none on a CPU."""
    if setting.plan.device == "cpu" or setting.plan.config.run.machine.compile == "off":
        return []
    found = variants([case.info() for case in setting.able])
    chosen = [case for case in setting.able if found is not None and case.label in found]
    return [case.variant(f"{case.label}, compile off", compile="off") for case in chosen]


def _pilot(setting: SharedSettings, folder: Path) -> float:
    """Run a short training in the first mode that can do it. Return half of its env steps/s,
    because the slowest mode may be slower."""
    plan = setting.plan
    failed = MeasureError("no mode accepts this run")
    rows = LEAST_UPDATES * plan.batch.rows
    if not plan.config.learner.on_policy:
        rows = 2 * plan.config.learner.rows_before_update(plan.learner_spec)
    for case in setting.able:
        argv = (*case.argv(steps=rows), *case.trusting)
        try:
            order = TrainingRequest(
                argv=argv, name=f"pilot-{case.label}", folder=folder, warm_up_rows=1, limit_s=PILOT_S
            )
            return measure(order).steps_per_s / 2
        except MeasureError as error:
            failed = error
    raise failed


def carry_out(comparison: ComparisonPlan, folder: Path, stop: Stop, progress: ComparisonProgress) -> Results:
    """Run all trainings. compare.json is written after each of them. A signal ends the comparison
    with the results so far."""
    began = time.monotonic()
    results = comparison.results()
    planned = jobs(comparison.able, comparison.seeds)
    rounds = MeasuringRounds(planned, comparison.size, folder / RUNS, stop, progress)
    workers = WorkerScaling.of(comparison) if comparison.request.scale else None
    timelines: dict[str, Any] = {}

    def now(ended: Literal["complete", "interrupted"] = "interrupted") -> Results:
        failed = tuple(replace(info, failed=rounds.failed.get(info.mode, info.failed)) for info in results.modes)
        found = replace(results, rows=tuple(rounds.rows), modes=failed, wall_s=time.monotonic() - began, ended=ended)
        if workers is not None:
            found = replace(found, scale=workers.scale())
        return judged(summarised(replace(found, timelines=dict(timelines))))

    def keep() -> None:
        now().write(folder)

    rounds.keep = keep
    try:
        rounds.run()
        if workers is not None:
            workers.measure(folder / RUNS, stop, progress, keep)
        if comparison.request.timelines:
            trace(comparison, rounds, timelines, progress)
    except Interrupted:
        stop.over = True
        return now()
    return now("complete")


def trace(
    comparison: ComparisonPlan, rounds: MeasuringRounds, found: dict[str, Any], progress: ComparisonProgress
) -> None:
    """Run a short training with --trace of every mode that has not failed. Their timelines are
    added to `found`. Their figures are not used, because recording costs time."""
    for case in comparison.setting.able:
        if case.label in rounds.failed:
            continue
        progress.say(f"timeline  {case.label}")
        rate = comparison.predictions[case.label].rate if case.label in comparison.predictions else 0.0
        rows_per_update = comparison.size.steps_per_env * comparison.setting.envs
        rows = min(comparison.size.of(case.label)[0], max(TRACED_UPDATES * rows_per_update, int(TRACED_S * rate)))
        sized = with_steps(case, comparison.size.steps_per_env)
        argv = (*sized.argv(seed=comparison.seeds[0], steps=rows, trace=True), *case.trusting)
        limit = LIMIT * comparison.size.slowest_s + SLACK
        order = TrainingRequest(
            argv=argv, name=f"{case.label}-timeline", folder=rounds.folder, warm_up_rows=1, limit_s=limit
        )
        try:
            measure(order, lambda _: rounds.stop.check())
            found[case.label] = _last_seconds(read_timeline(order.path)).to_json()
        except (MeasureError, FileError) as error:
            if rounds.stop.signal is not None:
                raise Interrupted from None
            progress.say(f"no timeline of {case.label}: {str(error).splitlines()[0]}")


def _last_seconds(timeline: Timeline) -> Timeline:
    """Return the end of a timeline, as long as a page can show."""
    shown = timeline.last(TRACED_S)
    seconds = TRACED_S
    while sum(len(row.spans) for row in shown.rows) > MOST_SPANS and seconds > 0.05:
        seconds /= 2
        shown = timeline.last(seconds)
    return shown


@dataclass
class WorkerScaling:
    """Runs the trainings of --scale, which have several numbers of workers with one env each."""

    comparison: ComparisonPlan
    points: Mapping[str, tuple[Case, Way]]  # by label
    size: WorkSize
    rows: list[ResultRow]
    failed: dict[str, str]

    @classmethod
    def of(cls, comparison: ComparisonPlan) -> Self:
        request = comparison.request
        rows_per_update = comparison.size.steps_per_env * comparison.setting.envs
        times = comparison.times
        policy = comparison.policy or AT_ONCE
        if times is None or comparison.setting.plan.config.env.batched:
            raise UsageError("--scale needs an environment of which each worker has one instance; leave it out")
        points = {}
        for case in comparison.setting.able:
            for workers in request.scale:
                if (kind := _kind(case)) is not None:
                    way = way_with(kind, workers, rows_per_update)
                    points[f"{case.label} x{workers}"] = (_with_workers(case, way), way)
        if not points:
            raise UsageError("--scale needs lockstep or a mode with workers; add one to --modes")
        rates = {label: forecast(way, times, policy, usable_cores()).rate for label, (_, way) in points.items()}
        demand = WorkDemand(
            budget_s=request.budget_s / len(request.scale),
            repeats=request.repeats,
            envs=1,
            steps_per_env=rows_per_update,
            rates=rates,
            fixed_steps_per_env=True,
        )
        return cls(comparison, points, size(demand), [], {})

    def line(self) -> str:
        """Return a line about the trainings to come."""
        count = self.comparison.request.repeats * len(self.points)
        eta = clock(self.size.duration(self.comparison.request.repeats))
        return f"{', '.join(map(str, self.comparison.request.scale))} workers: {count} trainings, eta {eta}"

    def measure(self, folder: Path, stop: Stop, progress: ComparisonProgress, keep: Callable[[], None]) -> None:
        cases = [replace(case, label=label) for label, (case, _) in self.points.items()]
        rounds = MeasuringRounds(jobs(cases, self.comparison.seeds), self.size, folder, stop, progress, keep)
        rounds.rows = self.rows
        rounds.failed = self.failed
        rounds.run()

    def scale(self) -> ScalingResults | None:
        """Return the results so far, or None if nothing has been measured."""
        if not self.rows or self.comparison.times is None:
            return None
        setting = self.comparison.setting
        points = [
            MeasuredPoint(
                case.mode, way, tuple(row for row in self.rows if row.mode == label), self.failed.get(label, "")
            )
            for label, (case, way) in self.points.items()
        ]
        law = fit(points, self.comparison.times, self.comparison.policy or AT_ONCE, usable_cores())
        memory = setting.cost.memory + WORKER_MEMORY
        return scaled(points, law, memory, self.comparison.size.steps_per_env * setting.envs)


def _kind(case: Case) -> Kind | None:
    """Return how a mode collects with several workers, or None if it has no workers."""
    assert case.plan is not None, "the mode accepts the run"
    if isinstance(case.plan.config.collector, LockstepConfig):
        return "barrier"
    way = way_of(case.plan)
    return way.kind if way is not None and case.plan.worker_config is not None else None


def _with_workers(case: Case, way: Way) -> Case:
    """Return the case with this number of workers and one env each."""
    own = {**case.own, "num_envs": way.lanes, "num_steps_per_env": way.steps}
    own |= {"placement": "processes"} if way.kind == "barrier" else {"workers": way.lanes}
    return replace(case, own={name: value for name, value in own.items() if name in case.own})


def write(results: Results, folder: Path) -> list[Path]:
    """Write compare.json, table.md, report.html and plots. Return the paths."""
    return [results.write(folder), table.write(results, folder), *report.write(results, folder)]
