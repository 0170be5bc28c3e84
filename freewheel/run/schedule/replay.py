"""Replays a recorded run: it learns again, bit for bit, from its config and its schedule."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.util import get_temp_dir
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from freewheel.collect.mode import make_collector
from freewheel.core import Executor, Learner, MakeExecutor, Tick
from freewheel.errors import FileError, SetupError
from freewheel.files import read
from freewheel.files.reach import typed
from freewheel.learn.spec import Services, make_learner
from freewheel.loop import Source, loop
from freewheel.metrics.meter import Meter
from freewheel.pacing.episode_queue import EpisodeOrder
from freewheel.run import process
from freewheel.run.checkpoints.checkpoint import fingerprint_of
from freewheel.run.hooks import Hooks, Run, find_hooks
from freewheel.run.learners.devices import placed
from freewheel.run.naming import SUMMARY, Result, RunName
from freewheel.run.plan import Plan, nothing
from freewheel.run.planning import Report, arrange, silent, survey_env
from freewheel.run.saved import RunDirectory, SavedRun, open_run
from freewheel.run.schedule.answers import Answers, EndOfSchedule
from freewheel.run.schedule.collector import ComparedCollector, DifferenceError, ReplayCollector
from freewheel.run.schedule.log import FILE, Check, Schedule, describe
from freewheel.run.schedule.recorder import versions
from freewheel.timeline.trainer_tracks import WatchedExecutor

REPORT_EVERY = 2.0  # seconds


@dataclass(frozen=True)
class ScheduleReplay:
    """The result of a replay: how far it came, and whether it was identical."""

    path: Path  # of the run
    difference: str  # the first difference; empty: everything replayed is identical
    note: str  # why the replay did not reach the end of the run; empty: it did
    env_steps: int
    updates: int
    fragments: int  # of workers, found equal
    checks: int  # fingerprints of the weights, found equal
    weights_sha256: str  # at the end of the replay
    out: Path | None = None  # where the weights were written

    @property
    def identical(self) -> bool:
        return not self.difference

    def lines(self) -> list[str]:
        """Return the result as lines of text."""
        reached = f"step {self.env_steps:,}, update {self.updates:,}"
        fragments = f"{self.fragments:,} fragments and " * bool(self.fragments)
        lines = [
            f"identical up to {reached}: {fragments}{self.checks} fingerprints of the weights"
            if self.identical
            else f"DIFFERENT after {reached}: {self.difference}"
        ]
        lines += [self.note] if self.note else []
        lines += [f"weights_sha256 {self.weights_sha256}"] if self.identical else []
        return [*lines, *([f"weights in {self.out}"] if self.out is not None else [])]


@dataclass(frozen=True, kw_only=True)
class Until:
    """The step or update at which a replay stops early."""

    steps: int | None = None
    updates: int | None = None

    def reached(self, env_steps: int, updates: int) -> str:
        """Return the reason to stop; empty: continue."""
        if self.steps is not None and env_steps >= self.steps:
            return f"stopped at step {env_steps:,} as asked"
        return f"stopped at update {updates:,} as asked" if self.updates is not None and updates >= self.updates else ""


def replay(
    run: str | os.PathLike[str] | Result | SavedRun,
    *,
    until: Until | None = None,
    out: Path | None = None,
    inline: bool = False,
    hooks: Sequence[object] = (),
    report: Report = silent,
) -> ScheduleReplay:
    """Replay a recorded run; nothing is written into its directory.

    out: a new directory for the final weights of the replay. inline: environments run in this process, for a debugger.
    hooks: the hooks that the run was given in Python; the hooks in its config are called anyway.
    """
    saved = run if isinstance(run, SavedRun) else open_run(run, use="train")
    if not (saved.path / FILE).is_file():
        raise SetupError(f"{saved.path} has no {FILE}; record one with freewheel train ... --record-schedule")
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(TemporaryDirectory(dir=get_temp_dir()))) / saved.path.name
        name = RunName(typed(folder.parent), folder.name, exact=True).claim()
        report(f"opening {saved.config.env.label} ...")
        planned = _plan(saved, name)
        machine = planned.config.run.machine
        stack.enter_context(process.learner_threads(machine.threads))
        found = [*find_hooks(planned.config.run.hooks), *find_hooks(hooks)]
        done = _ReplayedRun(saved, planned, until or Until(), found, report)
        return done.run(inline=inline, keep=out is not None)


def _plan(saved: SavedRun, name: RunName) -> Plan:
    """Return the run's plan. All numbers are in the config except the limits, which may have been raised since."""
    config, device = placed(saved.config)
    config = replace(config, run=replace(config.run, limits=describe(saved.path / FILE).limits))
    return arrange(config, survey_env(config), name, device)


class _ReplayedRun:
    def __init__(self, saved: SavedRun, planned: Plan, until: Until, hooks: Sequence[object], report: Report) -> None:
        self._saved, self._plan, self._until, self._report = saved, planned, until, report
        collector, batch = planned.config.collector, planned.batch
        longest = max(batch.steps, getattr(collector, "collection_batch_size", None) or 32)
        self._schedule = Schedule(saved.path / FILE, workers=planned.workers, most_steps=longest)
        self._hooks_given = hooks
        self._meter = Meter(planned.workers, planned.spec.measures, gpus=planned.gpus)
        self._turn = self._checks = 0
        self._collector: ReplayCollector | None = None

    def run(self, *, inline: bool, keep: bool) -> ScheduleReplay:
        planned = self._plan
        self._report(self._title())
        with process.executors(planned.config, planned.device) as executors, ExitStack() as stack:
            with_workers = planned.worker_config is not None
            answers = self._workers(inline, stack) if with_workers else Answers(self._schedule)
            services = Services(executors=_ReplayedExecutors(executors, answers))
            learner = make_learner(planned.config.learner, replace(planned.learner_spec, services=services))
            source = self._collector or self._compared(learner, answers, stack)
            difference = note = ""
            try:
                note = self._loop(source, learner, answers)
            except DifferenceError as error:
                difference = f"{error}\n{self._suspects()}"
            sha256 = fingerprint_of(learner)
            if keep:
                directory = RunDirectory(planned, self._report)
                directory.keep()
                self._save(directory, learner)
        return ScheduleReplay(
            path=self._saved.path,
            difference=difference,
            note=note,
            env_steps=self._meter.done["env_steps"],
            updates=self._meter.done["updates"],
            fragments=0 if self._collector is None else self._collector.fragments,
            checks=self._checks,
            weights_sha256=sha256,
            out=planned.path if keep else None,
        )

    def _title(self) -> str:
        config, outline = self._plan.config, self._schedule.outline
        parts = [f"replaying {self._saved.path}: {config.env.label} {config.algo} {config.mode}"]
        if outline.acts:
            parts.append(f"{outline.acts.total():,} fragments of {len(outline.acts)} worker processes")
        if outline.last is not None:
            parts.append(f"{outline.last.env_steps:,} steps")
        return ", ".join(parts)

    def _workers(self, inline: bool, stack: ExitStack) -> Answers:
        planned = self._plan
        lanes, seed = planned.spec.lanes, planned.config.run.seed
        order = EpisodeOrder(seed, lanes) if planned.config.collector.whole_episodes else None
        context = planned.config.run.contexts
        made = ReplayCollector(self._schedule, planned.runner_factory, lanes // planned.workers, context, order)
        made.inline, made.modules = inline, planned.worker_spec.modules
        self._collector = stack.enter_context(made)
        return made.answers

    def _compared(self, learner: Learner, answers: Answers, stack: ExitStack) -> Source:
        planned = self._plan
        spec = planned.collect_spec(learner.snapshot(), nothing)
        collector = stack.enter_context(make_collector(planned.config.collector, planned.runner_factory, spec))
        return ComparedCollector(collector, answers)

    def _loop(self, source: Source, learner: Learner, answers: Answers) -> str:
        """Replay until the end of the run or the requested stop; return why it ended before the end of the run."""
        planned = self._plan
        directory = RunDirectory(planned, self._report)
        save = partial(self._save, directory, learner)
        hooks = Hooks(self._hooks_given, Run(planned, learner, self._meter, save))
        hooks.start()
        self._compare(learner, answers)
        told = monotonic()
        try:
            for tick in loop(
                source,
                learner,
                self._meter,
                max_lag=planned.max_lag,
                contexts=lambda: hooks.run.contexts,
                before_publishing=hooks.publishing,
            ):
                self._turn += 1
                self._meter.take(tick)
                hooks.turn(tick)
                self._compare(learner, answers)
                if reason := self._until.reached(tick.env_steps, self._meter.done["updates"]):
                    return reason
                if monotonic() > told + REPORT_EVERY:
                    told = monotonic()
                    self._report(self._progress(tick))
                last = self._schedule.outline.last
                if answers.end not in (None, "failed") and last is not None and self._turn >= last.turn:
                    return self._why_resumed()
        except EndOfSchedule:
            return self._why_short()
        raise AssertionError("the loop never ends by itself")

    def _progress(self, tick: Tick) -> str:
        last, updates = self._schedule.outline.last, self._meter.done["updates"]
        of = f" of {last.env_steps:,}" if last is not None else ""
        return f"  step {tick.env_steps:,}{of}, update {updates:,}: identical so far ({self._checks} fingerprints)"

    def _compare(self, learner: Learner, answers: Answers) -> None:
        """Compare the weights with the fingerprints recorded after this turn."""
        for check in answers.checks(self._turn):
            if check.turn != self._turn:
                raise DifferenceError(f"the loop behaved differently before turn {self._turn}")
            if check.version != learner.version or check.sha256 != fingerprint_of(learner):
                raise DifferenceError(self._other_weights(check))
            self._checks += 1

    def _other_weights(self, check: Check) -> str:
        if not check.turn:
            return "the weights differ before the first update"
        since = f"{self._checks} earlier fingerprints agree" if self._checks else "it is the first one recorded"
        return f"the weights differ at step {check.env_steps:,}, version {check.version} ({since})"

    def _suspects(self) -> str:
        """Return possible reasons for a difference."""
        here, about = versions(), self._schedule.about
        there = vars(about)
        others = [f"{name} {there[name]} (here {here[name]})" for name in here if there[name] != here[name]]
        if (missing := about.hooks - len(self._hooks_given)) > 0:
            others.append(f"{missing} more hooks, given in Python: freewheel.replay(run, hooks=[...])")
        equal = f"{self._checks} fingerprints of the weights"
        equal += f" and {self._collector.fragments:,} fragments" if self._collector is not None else ""
        return f"it was recorded with {', '.join(others)}" if others else f"before that, {equal} are identical"

    def _why_resumed(self) -> str:
        """Return a note if the run was resumed after the recorded session."""
        try:
            steps = read.json_object(self._saved.path / SUMMARY).get("env_steps")
        except FileError:
            return ""
        went_on = isinstance(steps, int) and steps > self._meter.done["env_steps"]
        return f"the run was resumed after this, up to step {steps:,}; only session 1 is recorded" if went_on else ""

    def _why_short(self) -> str:
        outline = self._schedule.outline
        if outline.cut:
            return f"the schedule ends here: {outline.cut}"
        if outline.end == "failed":
            return "the run failed after this"
        return "the schedule ends here: the run was killed, or its disk failed"

    def _save(self, directory: RunDirectory, learner: Learner) -> Path | None:
        return directory.save(self._meter.done["env_steps"], learner.snapshot())


class _ReplayedExecutors:
    """Makes executors that return their results at the recorded polls. Implements core.MakeExecutor."""

    def __init__(self, make: MakeExecutor, answers: Answers) -> None:
        self._make, self._answers, self._made = make, answers, 0

    def __call__(self, build: Callable[[], Callable[[Any], Any]], what: str) -> Executor:
        number, self._made = self._made, self._made + 1
        return _ReplayedExecutor(self._make(build, what), lambda: self._answers.poll(number))


class _ReplayedExecutor(WatchedExecutor):
    def __init__(self, executor: Executor, poll: Callable[[], bool]) -> None:
        super().__init__(executor)
        self._poll = poll

    def result(self, wait: float = 0.0) -> Any:
        if not self._poll():
            return None
        while (found := self.executor.result(LOOK)) is None:
            pass
        return found


LOOK = 0.2  # seconds of one wait, so that an interrupt is noticed
