"""Training: a Config in, a finished run directory out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
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
from freewheel.run.evaluate import Evaluator, Score, open_evaluator
from freewheel.run.hooks import Hooks, Run, find_hooks
from freewheel.run.plan import Plan, plan, print_line, silent
from freewheel.run.process import Interrupted, Stop, WrappedEnv, import_torch
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
        self._evaluations = 0
        self._best: Score | None = None
        self._final: Score | None = None

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
        with ExitStack() as stack:
            collector = stack.enter_context(planned.config.collector.build(factory, spec))
            self._collector = collector
            evaluator = stack.enter_context(open_evaluator(planned, factory, collector, spec))
            work = partial(self._loop, collector, evaluator)
            return process.beside(collector, work, planned.device) if spec.simulation.main_thread else work()

    def _loop(self, collector: Collector, evaluator: Evaluator | None) -> str:
        max_lag, run = self._plan.max_lag, self._hooks.run
        for tick in loop(collector, self._learner, self._meter, max_lag=max_lag, contexts=lambda: run.contexts):
            self._meter.take(tick)
            self._hooks.turn(tick)
            ended = self._why_ended()
            if evaluator is not None:
                self._evaluate(evaluator, tick, last=bool(ended))
                if not ended and (ended := self._hooks.run.stopping):  # on_eval has stopped the run
                    self._evaluate(evaluator, tick, last=True)
            if self._meter.wall_s >= self._next_log or ended:
                self._log(collector)
            if ended:
                return ended
        raise AssertionError("the loop never ends by itself")

    def _why_ended(self) -> str:
        """Empty while the run goes on."""
        self._stop.check()
        if self._hooks.run.stopping:
            return self._hooks.run.stopping
        meter, limits = self._meter, vars(self._budget)
        spent = {"steps": self._learner.rows().done, "minutes": meter.wall_s / 60, "episodes": meter.episodes}
        return next((name for name, used in spent.items() if limits[name] and used >= limits[name]), "")

    def _log(self, collector: Collector) -> None:
        rows = balance(collector.rows(), self._learner.rows())
        row = self._meter.row(rows, collector.stats(), self._learner.buffer_util)
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

    def _evaluate(self, evaluator: Evaluator, tick: Tick, *, last: bool) -> None:
        """Submit the weights if an evaluation is due, and take the results that are there."""
        progress = self._budget.progress(tick.env_steps, self._meter.wall_s, self._meter.episodes)
        planned = self._options.evaluation.evals
        due = planned if last else int(progress * planned)
        with self._meter.span("eval"):
            if due > self._evaluations and (last or due < planned):
                self._evaluations = due
                evaluator.submit(tick.env_steps, replace(self._learner.snapshot(), context=self._options.contexts))
            for step, snapshot, score in evaluator.results(wait=last):
                if isinstance(score, FreewheelError):
                    self._note(f"no evaluation at step {step}: {score}")
                else:
                    self._take_score(step, snapshot, score)

    def _take_score(self, step: int, snapshot: Snapshot, score: Score) -> None:
        self._meter.eval_result(score.mean, score.measures)
        if score.cut:
            limit = self._options.evaluation.eval_max_steps
            self._note(f"{score.cut} evaluation episodes were cut at {limit} steps (--eval-max-steps)")
        self._final, folder = score, None
        if self._best is None or score.mean > self._best.mean:
            self._best = score
            with self._meter.span("save"):
                folder, _ = self._directory.save(step, snapshot, best=True)
        self._hooks.evaluated(step, score, folder)

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
            "final_eval": None if self._final is None else self._final.mean,
            **asdict(rows),
            "shares": self._meter.shares(),
            "worker_restarts": 0,
            "graphs_fallback": self._fallback or None,
            **report,
            "weights_sha256": sha256,
            "path": str(self._plan.path),
        }
        self._directory.write("summary.json", summary)
        if self._collector is not None:
            self._note(*self._collector.messages())
        for sink in self._sinks:
            sink.close(summary)
        return summary
