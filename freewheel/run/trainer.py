"""Training: a Config in, a finished run directory out."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from freewheel.config.resolve import Config
from freewheel.core import Collector, GraphedLearner, Learner, RowCounts, Sink, Snapshot, Tick
from freewheel.errors import FreewheelError
from freewheel.learn.spec import Services
from freewheel.ledger import balance, settle
from freewheel.loop import loop
from freewheel.metrics.meter import Meter
from freewheel.run import process
from freewheel.run.advice.prospects import closing
from freewheel.run.evaluation.place import open_evaluator, reserved_lanes
from freewheel.run.evaluation.schedule import LATE, Around, Evaluation, EvaluationSchedule, Verdict
from freewheel.run.hooks import Hooks, Run, find_hooks
from freewheel.run.plan import Plan, plan, print_line, silent
from freewheel.run.process import Interrupted, Stop, TimeUp, WrappedEnv, import_torch
from freewheel.run.saved import RunDirectory
from freewheel.sinks.sink import RunInfo, chosen
from freewheel.transport.executors import SerialExecutor

DEGRADED = 3  # exit code: finished, but workers were lost for good


@dataclass(frozen=True)
class Result:
    """A finished run."""

    path: Path
    summary: Mapping[str, Any]

    @property
    def exit_code(self) -> int:
        return int(self.summary["exit_code"])


def check(config: Config) -> Plan:
    """The plan of a run, after everything that could refuse it has been tried; nothing is started or written."""
    chosen(config.run.output.sinks)
    find_hooks(config.run.hooks)
    planned = plan(config)
    planned.config.learner.build(replace(planned.learner_spec, services=Services(executors=SerialExecutor)))
    return planned


def run(config: Config, *, quiet: bool = False, hooks: Sequence[object] = (), sinks: Sequence[Sink] = ()) -> Result:
    """Train. However it ends, the run directory is complete and nothing is left running; failures are raised after that.

    `hooks` are called, and `sinks` written to, in addition to those that the config names.
    """
    own, stop = [*find_hooks(config.run.hooks), *find_hooks(hooks)], Stop()
    with stop.listening():
        return _run(config, stop, own, quiet=quiet, sinks=sinks)


def _run(config: Config, stop: Stop, hooks: Sequence[object], *, quiet: bool, sinks: Sequence[Sink]) -> Result:
    entries = chosen(config.run.output.sinks)
    planned = plan(config, silent if quiet else print_line, meanwhile=import_torch)
    config = planned.config
    process.keep_freed_memory()
    with (
        process.learner_threads(config.run.machine.threads),
        process.lower_priority(planned),
        process.executors(planned) as executors,
    ):
        services = Services(executors=executors, while_waiting=stop.check)
        learner = config.learner.build(replace(planned.learner_spec, services=services))
        stop.begin()
        planned = replace(planned, name=planned.name.claim())
        directory = RunDirectory(planned.path, planned.policy, planned.spec)
        directory.write("config.json", config.to_json())
        info = RunInfo(
            path=planned.path,
            title=f"{config.env.label}  {config.algo}  {config.mode}",
            budget=config.run.budget,
            algorithm=config.algo,
            mode=config.mode,
            quiet=quiet,
            console=config.run.output.console,
        )
        opened = [sink for entry in entries if (sink := entry.open(info)) is not None]
        return _Trainer(planned, learner, directory, [*opened, *sinks], stop, hooks).train()


class _Trainer:
    """What happens beside the loop: logging, evaluating, saving, stopping."""

    def __init__(
        self,
        planned: Plan,
        learner: Learner,
        folder: RunDirectory,
        sinks: list[Sink],
        stop: Stop,
        hooks: Sequence[object],
    ) -> None:
        self._plan, self._learner, self._directory, self._sinks = planned, learner, folder, sinks
        self._stop = stop
        self._options, self._budget = planned.config.run, planned.config.run.budget
        self._meter = Meter(planned.workers, planned.spec.measures)
        self._hooks = Hooks(hooks, Run(planned, learner, self._meter, folder))
        self._collector: Collector | None = None
        self._next_log = self._options.output.log_every
        self._fallback = ""  # why updates are not replayed from CUDA graphs
        self._schedule: EvaluationSchedule | None = None
        self._verdict: Verdict | None = None
        self._steps, self._stats = 0, dict[str, float | None]()  # delivered rows, and the collector's last figures
        self._turn = 0.0  # seconds of the loop's last turn

    def train(self) -> Result:
        failure: BaseException | None = None
        with self._stop.listening():
            try:
                with process.learner_stream(self._plan.device):
                    ended = self._run()
            except Interrupted:
                ended = "interrupted"
            except BaseException as error:  # noqa: BLE001 - raised again after the summary is written
                ended, failure = "failed", error
            self._stop.over = True
            with self._meter.span("save"):
                folder, sha256 = self._directory.save(self._meter.done["env_steps"], self._learner.snapshot())
            ended, failure = self._hooks.end(folder, ended, failure, self._stop)
            summary = self._finish(ended, failure, sha256)
        if failure is not None:
            raise failure
        return Result(self._plan.path, summary)

    def _run(self) -> str:
        """Train until the budget is spent; returns why it ended."""
        planned = self._plan
        self._hooks.start()
        self._note(*planned.config.notes)
        self._note(*(planned.init.warnings if planned.init is not None else ()))
        self._note(*filter(None, [planned.defaults_line]))
        self._note(*planned.remarks, f"starting {planned.actors}")
        factory = planned.runner_factory
        if planned.worker_config is None and not planned.spec.batched_on_device:
            make, guard = planned.config.env.make, self._stop.guard
            factory = replace(
                factory, make=lambda *lanes, **where: WrappedEnv(guard(make)(*lanes, **where), guard, guard)
            )
        spec = planned.collect_spec(self._learner.snapshot(), self._stop.check)
        spec = replace(spec, context=self._hooks.run.contexts)
        with open_evaluator(planned, factory) as evaluator:
            with planned.config.collector.build(factory, spec) as collector:
                self._collector = collector
                around = Around(lambda: self._meter.wall_s, self._longest, self._note, self._while_evaluating)
                evaluator = evaluator or reserved_lanes(planned, collector)
                self._schedule = EvaluationSchedule(evaluator, self._options.evaluation, self._budget, around)
                work = partial(self._loop, collector, self._schedule)
                ended = process.beside(collector, work, planned.device) if spec.simulation.main_thread else work()
            self._close(self._schedule)
        return ended

    def _loop(self, collector: Collector, schedule: EvaluationSchedule) -> str:
        """Until the budget is spent; what is evaluated after that does not need the collector any more."""
        max_lag, run = self._plan.max_lag, self._hooks.run
        ended, began = "", self._meter.wall_s
        self._time_is_up()
        try:
            for tick in loop(collector, self._learner, self._meter, max_lag=max_lag, contexts=lambda: run.contexts):
                self._meter.take(tick)
                self._steps, self._turn = tick.env_steps, self._meter.wall_s - began
                self._hooks.turn(tick)
                if ended := self._why_ended():
                    break
                self._evaluate(schedule, tick)
                if ended := run.stopping:  # by on_eval
                    break
                if self._meter.wall_s >= self._next_log:
                    self._log()
                began = self._meter.wall_s
        except TimeUp:
            ended = "minutes"
        self._stop.time_up = math.inf
        self._stats = dict(collector.stats())
        schedule.stop(self._steps, self._weights())
        return ended

    def _evaluate(self, schedule: EvaluationSchedule, tick: Tick) -> None:
        """Begin an evaluation if one is due, and take those that have ended."""
        if schedule.active:
            with self._meter.span("eval"):
                progress = self._budget.progress(tick.env_steps, self._meter.wall_s, self._meter.episodes)
                for found in schedule.turn(tick.env_steps, progress, self._weights):
                    self._take_score(found, best=found is schedule.candidate)

    def _close(self, schedule: EvaluationSchedule) -> None:
        """The closing evaluation, and the last row of metrics."""
        with self._meter.span("eval" if schedule.active else "other"):
            self._verdict = verdict = schedule.close()
        if verdict.final is not None:
            self._take_score(verdict.final, best=verdict.best is verdict.final)
        self._log()

    def _why_ended(self) -> str:
        """Empty while the run goes on."""
        self._stop.check()
        if self._hooks.run.stopping:
            return self._hooks.run.stopping
        spent, limits = {"steps": self._learner.rows().done, "episodes": self._meter.episodes}, vars(self._budget)
        over = (name for name, used in spent.items() if limits[name] and used >= limits[name])
        return next(over, "minutes" if self._time_is_up() else "")

    def _time_is_up(self) -> bool:
        """Whether the closing evaluation has to begin now to end in time. What takes much longer than that is interrupted."""
        if self._budget.minutes is None:
            return False
        seconds, now = 60 * self._budget.minutes, self._meter.wall_s
        limit = seconds - (0.0 if self._schedule is None else self._schedule.reserve)
        left = limit + LATE * seconds - now
        self._stop.time_up = time.monotonic() + left
        return now >= limit or self._turn > left  # another turn would end too late

    def _longest(self) -> int:
        """Steps of a long episode, by those that have ended of late. As long as they are fewer than the lanes, these were the
        short ones: then twice as many as a lane has made."""
        lanes, known = self._plan.spec.lanes, self._meter.longest or 0
        return known if self._meter.episodes >= lanes else max(known, 2 * self._steps // lanes)

    def _weights(self) -> Snapshot:
        return replace(self._learner.snapshot(), context=self._options.contexts)

    def _while_evaluating(self) -> None:
        self._stop.check()
        if self._meter.wall_s >= self._next_log:
            self._log()

    def _log(self) -> None:
        assert self._collector is not None, "it is open, or was"
        collector = self._collector
        rows = balance(collector.rows(), self._learner.rows())
        row = self._meter.row(rows, self._stats or collector.stats(), self._learner.buffer_util)
        row |= {} if self._schedule is None else self._schedule.progress
        self._note(*collector.messages())
        if self._plan.device != "cpu" and isinstance(self._learner, GraphedLearner) and not self._fallback:
            self._fallback = self._learner.fallback
            if self._fallback:
                self._note(f"no CUDA graph for the updates, they are launched one by one: {self._fallback}")
        for sink in self._sinks:
            sink.write(row)
        self._next_log = self._meter.wall_s + self._options.output.log_every

    def _note(self, *texts: str) -> None:
        for text in texts:
            for sink in self._sinks:
                sink.note(text)

    def _take_score(self, found: Evaluation, *, best: bool) -> None:
        """A finished evaluation; the best weights are saved at once."""
        score = found.score
        self._meter.eval_result(score.mean, score.measures)
        if score.cut:
            limit = self._options.evaluation.eval_max_steps
            self._note(f"{score.cut} evaluation episodes were cut at {limit} steps (--eval-max-steps)")
        folder = None
        if best:
            with self._meter.span("save"):
                folder, _ = self._directory.save(found.step, found.snapshot, best=True)
        self._hooks.evaluated(found.step, score, folder)

    def _evaluated(self) -> dict[str, Any]:
        """What is known of the best weights and of the last, also if the run was interrupted."""
        schedule, verdict = self._schedule, self._verdict
        if verdict is None:
            verdict = Verdict() if schedule is None else schedule.without_closing()
        return verdict.summary() | {"evals_skipped": 0 if schedule is None else schedule.skipped}

    def _finish(self, ended: str, failure: BaseException | None, sha256: str) -> dict[str, Any]:
        """Close the accounts and write the summary."""
        totals, signal = self._meter.totals(), self._stop.signal
        report, rows = dict[str, Any](), RowCounts()
        if self._collector is not None:
            report, rows = dict(self._collector.summary()), settle(self._collector.rows(), self._learner.rows())
        exit_code = DEGRADED if report.get("workers_lost") else 0
        if failure is not None:
            exit_code = failure.exit_code if isinstance(failure, FreewheelError) else 1
        elif signal is not None:
            exit_code = 128 + signal
        summary = {
            "run": self._plan.path.name,
            "ended": ended if signal is None else f"{ended} ({signal.name})",
            "exit_code": exit_code,
            "error": None if failure is None else str(failure) or repr(failure),
            **totals,
            **self._evaluated(),
            **asdict(rows),
            "shares": self._meter.shares(),
            "worker_restarts": 0,
            "graphs_fallback": self._fallback or None,
            **report,
            "weights_sha256": sha256,
            "path": str(self._plan.path),
        }
        summary["advice"] = closing(self._plan, summary)
        self._directory.write("summary.json", summary)
        if self._collector is not None:
            self._note(*self._collector.messages())
        for sink in self._sinks:
            sink.close(summary)
        return summary
