"""One session of a run: the work around the training loop (logging, evaluating, saving, stopping), and its end."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from freewheel.collect.mode import make_collector
from freewheel.core import Collector, RowCounts, Snapshot, Tick
from freewheel.errors import SIGNALLED, CollectorLostError, DiskError, EnvError, FreewheelError, NothingLearnedError
from freewheel.learn.finite import Judge
from freewheel.ledger import balance, settle, total
from freewheel.loop import loop
from freewheel.metrics.meter import Meter
from freewheel.run import process
from freewheel.run.advice.predictions import closing
from freewheel.run.checkpoints.checkpoint import fingerprint_of
from freewheel.run.checkpoints.run_progress import Earlier, RunProgress, progress_of
from freewheel.run.checkpoints.saver import Saver
from freewheel.run.evaluation.evaluator import open_evaluator, reserved_lanes
from freewheel.run.evaluation.schedule import Around, Evaluation, EvaluationSchedule, Verdict
from freewheel.run.evaluation.traced import TracedEvaluator
from freewheel.run.hooks import Hooks, Run
from freewheel.run.learners.coordination import EndedTogether, LearnerView, SeveralLearners, SingleLearner
from freewheel.run.live.adapting import Adapting, adapting
from freewheel.run.live.reporter import KnownExecutors, LiveStatus
from freewheel.run.naming import SUMMARY
from freewheel.run.plan import Plan
from freewheel.run.saved import RunDirectory
from freewheel.run.schedule.recorder import ScheduleRecorder
from freewheel.run.stopping.ending import Ending, without_descriptors
from freewheel.run.stopping.stop import LATE, Interrupted, Stop, TimeUp
from freewheel.run.stopping.watched import watched
from freewheel.sinks.sink_set import PATIENCE, SinkSet
from freewheel.timeline.recording import SpanRecording
from freewheel.timeline.trainer_tracks import EVALUATOR
from freewheel.transport.clock import Pauses, clock
from freewheel.transport.pool import WorkerPool

QUICK = 1.0  # seconds for slow sinks to finish if a signal has ended the run
# Rows of metrics in the middle of a turn: seconds after they are due (most turns end sooner), and least interval.
AMID, AMID_EVERY = 0.1, 0.5
#: Activities of the learner during which its state is incomplete and cannot be saved.
HALFWAY = ("observe", "update", "rollout")


@dataclass(frozen=True)
class Listeners:
    """The receivers of a run's events."""

    sink_set: SinkSet
    hooks: Sequence[object] = ()
    recorder: ScheduleRecorder | None = None
    trace: SpanRecording | None = None
    together: SingleLearner | SeveralLearners = field(default_factory=SingleLearner)  # in touch with other learners


class Session:
    """One session of a run, which lasts until the budget is spent or the run is interrupted."""

    def __init__(
        self, planned: Plan, saver: Saver, folder: RunDirectory, stop: Stop, meter: Meter, listeners: Listeners
    ) -> None:
        self._plan, self._directory, self._sink_set, self._meter = planned, folder, listeners.sink_set, meter
        self._learner, self._saver, self._earlier = saver.learner, saver, saver.earlier
        self._stop, self._ending, self._recorder, self._trace = stop, Ending(), listeners.recorder, listeners.trace
        self._options, self._budget = planned.config.run, planned.config.run.budget
        self._live = LiveStatus(folder.path, planned.spec.name, meter, self._options.output.log_every)
        self._live.saver = saver
        meter.begin()
        contexts = None if saver.earlier is None else saver.earlier.contexts
        run = Run(planned, self._learner, meter, saver.now, contexts, stop.check)
        self._hooks = Hooks(listeners.hooks, run, stop.spare)
        self._lost = RowCounts()  # rows in progress when an earlier session was saved, now dropped
        self._turning = False  # in a turn of the loop, where a failure may leave an update half done
        saver.progress = self._progress
        if saver.earlier is not None:
            meter.restore(saver.earlier.progress["meter"])
        self._collector: Collector | None = None
        self._adapting: Adapting | None = None
        self._next_row = math.inf  # by time.monotonic
        self._fallback = ""  # why updates are not replayed from CUDA graphs
        self._schedule: EvaluationSchedule | None = None
        self._verdict: Verdict | None = None
        self._steps = self._meter.done["env_steps"]  # rows delivered so far
        self._stats = dict[str, float | None]()  # the collector's last statistics
        self._turn = 0.0  # seconds of the last turn of the loop during which nothing could end the run
        self._rows = RowCounts()  # as last logged
        self._began, self._pauses = time.monotonic(), Pauses()
        self._judge = Judge(self._learner, planned.config.algo)
        self._together = listeners.together
        self._together.attend(LearnerView(self._account, self._learner, saver, run, self._note))
        stop.attend(self)

    def train(self, beside: KnownExecutors | None = None) -> dict[str, Any]:
        """Train, end the run and return its summary. `beside`: the executors of the learner, for the live status."""
        ending, self._live.beside = self._ending, beside
        ending.prepare()
        with self._stop.listening(), self._live:
            try:
                with process.learner_stream(self._plan.device), self._together.leaving():
                    ending.reason = self._run()
            except Interrupted as end:
                ending.reason = end.reason
            except BaseException as error:  # noqa: BLE001 - raised again after the summary is written
                ending.fail(without_descriptors(error, self._plan.spec.name), "training")
            ending.judge(self._budget, self._meter.done)
            self._stop.training_over(self._budget.minutes)
            self._stop.over, self._stop.row_due = True, math.inf
            ending.begin()
            ending.attempt("ending the child processes of environments", self._stop.leftovers.kill, None)
            summary = self._finish()
        if ending.failure is not None:
            raise ending.failure
        return summary

    def _run(self) -> str:
        """Train until the budget is spent; return why the run ended."""
        planned = self._plan
        self._time_is_up()
        self._hooks.start()
        self._stop.time_up = math.inf  # no time limit until the loop begins
        warnings = planned.init.warnings if planned.init is not None else ()
        self._note(*planned.config.notes, *warnings, *filter(None, [planned.defaults_line]), *planned.remarks)
        self._note(f"starting {planned.actors}")
        factory = planned.runner_factory
        if planned.worker_config is None and not planned.spec.batched_on_device:
            factory = replace(factory, make=watched(planned.config.env.make, self._stop))
        spec = planned.collect_spec(self._learner.snapshot(), self._stop.check)
        spec = replace(spec, context=self._hooks.run.contexts, recorder=self._recorder, trace=self._trace)
        evaluating = open_evaluator(planned, factory)
        with self._ending.leaving(evaluating, "closing the environments of evaluations") as evaluator:
            collector = make_collector(planned.config.collector, factory, spec)
            if self._earlier is not None:
                collector.load_state_dict(self._earlier.state.collector)
            with self._ending.leaving(collector, "closing the environments"):
                self._collector = self._saver.collector = self._live.collector = collector
                self._meter.spare(collector.wire.started_s if isinstance(collector, WorkerPool) else 0.0)
                around = Around(lambda: self._meter.wall_s, self._ran_s, self._longest, self._note, self._stop.check)
                evaluator = evaluator or reserved_lanes(planned, collector)
                if self._trace is not None and evaluator is not None:
                    evaluator = TracedEvaluator(evaluator, self._trace.track(EVALUATOR, "learner"))
                self._schedule = EvaluationSchedule(evaluator, self._options.evaluation, self._budget, around)
                self._live.schedule = self._schedule
                if self._earlier is not None:
                    self._go_on(self._earlier, collector, self._schedule)
                # After the collector's start, so that its processes do not inherit the lower priority.
                work = partial(self._loop, collector, self._schedule)
                work = process.lower_priority(planned.yields == "learner")(work)
                ended = process.beside(collector, work, planned.device)
            self._close(self._schedule)
        return ended

    def _go_on(self, earlier: Earlier, collector: Collector, schedule: EvaluationSchedule) -> None:
        """Continue from the previous session's checkpoint. Rows that were not saved with it are dropped."""
        earlier.restore_schedule(schedule)
        if schedule.candidate is not None:  # the `best` on disk may come from later work, which is repeated
            self._directory.save(schedule.candidate.step, schedule.candidate.snapshot, best=True)
        self._lost = earlier.lost(collector, self._learner)
        self._note(f"continuing from step {earlier.saved.step:,}", *earlier.saved.warnings)

    def _loop(self, collector: Collector, schedule: EvaluationSchedule) -> str:
        """Run the training loop until the budget is spent; return why it ended."""
        max_lag, run, recorder = self._plan.max_lag, self._hooks.run, self._recorder
        source = collector if recorder is None else recorder.listen(collector, self._plan, self._learner)
        before = None if self._earlier is None else self._earlier.progress.get("adapt")
        self._adapting = adapting(self._plan, collector, self._learner, self._note, before)
        self._time_is_up()
        self._expect_row(time.monotonic())
        self._stop.longest_gap()  # discard the gap before the loop
        began = self._ran_s()
        calls = {"before_update": self._together.meet, "before_publishing": self._hooks.publishing}
        turns = loop(source, self._learner, self._meter, max_lag=max_lag, contexts=lambda: run.contexts, **calls)
        try:
            with self._together.leaving():
                ended = self._together.begin(None if self._earlier is None else self._why_ended)
                while not ended:
                    self._turning = True
                    tick = next(turns)
                    self._turning = False
                    self._meter.take(tick)
                    self._judge.turn(tick.version)
                    tick = self._together.taken(tick)
                    self._steps = tick.env_steps
                    self._turn = min(self._ran_s() - began, self._stop.longest_gap())
                    self._hooks.turn(tick)
                    if recorder is not None:
                        recorder.turn(tick)
                    if ended := self._together.why_ended(tick.version, self._why_ended):
                        break
                    self._evaluate(schedule, tick)
                    if ended := self._together.stopped(run.stopping):  # a hook's on_eval may stop the run
                        break
                    if time.monotonic() >= self._next_row:
                        self.log()
                    if self._saver.early and tick.metrics is not None and tick.metrics.get("updates", 1) > 0:
                        self._saver.learned()
                    self._save_now_and_then()
                    began = self._ran_s()
        except (TimeUp, EndedTogether) as end:
            ended = end.reason
        self._meter.end_training()
        self._stop.training_over(self._budget.minutes)
        self._stats = dict(collector.stats())
        schedule.stop(self._steps, self._weights())
        self._save_last(ended, self._stop.report)
        self._judge.end()
        return ended

    def _save_now_and_then(self) -> None:
        if self._together.saves(self._saver.due):
            with self._meter.span("save"):
                self._saver.begin()
        if (folder := self._saver.look()) is not None:
            self._hooks.saved(folder)

    def _save_last(self, ended: str, waiting: Callable[[], None] = lambda: None) -> Path | None:
        """Save everything needed to resume the run; only the weights if an update failed or was interrupted."""
        failed = not isinstance(self._ending.failure, EnvError | CollectorLostError | NothingLearnedError | None)
        whole = not (self._turning and (failed or self._stop.cut))
        with self._meter.span("save"):
            return self._saver.last(ended, whole=whole, waiting=waiting)

    def _progress(self, ended: str = "") -> RunProgress:
        adapted = {} if self._adapting is None else {"adapt": self._adapting.state()}
        others = {**adapted, **self._together.state(), "ended": ended, "seed": self._options.seed}
        others["metrics_bytes"] = self._directory.metrics_size
        return progress_of(self._meter, self._learner, self._schedule, self._hooks.run.contexts, **others)

    def _evaluate(self, schedule: EvaluationSchedule, tick: Tick) -> None:
        """Start an evaluation if one is due, and process finished ones."""
        if schedule.active:
            with self._meter.span("eval"):
                progress = self._budget.progress(tick.env_steps, self._meter.wall_s, self._meter.episodes)
                for found in schedule.turn(tick.env_steps, progress, self._weights):
                    self._take_score(found, best=found is schedule.candidate)

    def _close(self, schedule: EvaluationSchedule) -> None:
        """Finish the closing evaluation and write the last row of metrics."""
        with self._meter.span("eval" if schedule.active else "other"):
            self._verdict = verdict = schedule.close()
        if verdict.final is not None:
            self._take_score(verdict.final, best=verdict.best is verdict.final)
        self.log()

    def _why_ended(self) -> str:
        """Return the reason to end the run; empty if there is none."""
        self._stop.check()
        if self._hooks.run.stopping:
            return self._hooks.run.stopping
        spent = self._together.spent({"steps": self._learner.rows().done, "episodes": self._meter.episodes})
        limits = vars(self._budget)
        over = (name for name, used in spent.items() if limits[name] and used >= limits[name])
        return next(over, "minutes" if self._time_is_up() else "")

    def _time_is_up(self) -> bool:
        """Return whether the closing evaluation has to begin now; also set the time when slow work is interrupted."""
        if self._budget.minutes is None:
            return False
        seconds, now = 60 * self._budget.minutes, self._meter.wall_s
        limit = seconds - self._stop.measured_s - (0.0 if self._schedule is None else self._schedule.reserve)
        left = limit + LATE * seconds - now
        self._stop.time_up = time.monotonic() + left
        return now >= limit or self._turn > left  # the next turn would end too late

    def _slept_s(self) -> float:
        return clock.slept_since(self._began)

    def _ran_s(self) -> float:
        """Return the seconds since the run began, without the time in which the process was stopped."""
        return self._meter.wall_s - self._slept_s()

    def _longest(self) -> int:
        """Estimate the steps of a long episode from the latest finished ones. While fewer episodes than lanes have
        finished, those were short ones: the estimate is then at least twice the steps made per lane."""
        lanes, known = self._plan.spec.lanes, self._meter.longest or 0
        return known if self._meter.episodes >= lanes else max(known, 2 * self._steps // lanes)

    def _weights(self) -> Snapshot:
        return replace(self._learner.snapshot(), context=self._options.contexts)

    def log(self) -> None:
        """Write a row of metrics."""
        assert self._collector is not None, "the collector was opened before"
        collector = self._collector
        self._rows = self._together.rows(self._account())
        row = self._meter.row(self._rows, self._stats or collector.stats(), self._learner.buffer_util)
        row |= {"slept_s": self._slept_s()} | ({} if self._schedule is None else self._schedule.progress)
        self._note(*self._pauses.new(), *self._together.told(collector.messages()))
        if self._plan.device != "cpu" and not self._fallback and (why := self._learner.fallback):
            self._fallback = why
            self._note(f"no CUDA graph for the updates, they are launched one by one: {why}")
        self._directory.keep()
        self._sink_set.write(row)
        if self._adapting is not None and not self._stats:
            self._adapting.take(row)
        self._expect_row(self._next_row)

    def _expect_row(self, last: float) -> None:
        """Schedule the next row --log-every seconds after `last`; missed rows are skipped. It is written between two
        turns of the loop, or by `Stop` in the middle of a long turn."""
        every, now = self._options.output.log_every, time.monotonic()
        self._next_row = last + every if last + every > now else now + every
        self._stop.row_due = max(self._next_row + AMID, now + AMID_EVERY)

    def _note(self, *texts: str) -> None:
        for text in texts:
            self._sink_set.note(text)

    def _take_score(self, found: Evaluation, *, best: bool) -> None:
        """Record a finished evaluation; save its weights at once if they are the best so far."""
        score = found.score
        self._meter.eval_result(score.mean, score.named(step=found.step))
        if score.cut:
            limit = self._options.evaluation.eval_max_steps
            self._note(f"{score.cut} evaluation episodes were cut at {limit} steps (--eval-max-steps)")
        saved = None
        if best:
            with self._meter.span("save"):
                if (folder := self._saver.before_weights()) is not None:
                    self._hooks.saved(folder)
                saved = self._directory.save(found.step, found.snapshot, best=True)
        self._hooks.evaluated(found.step, score, saved)

    def _evaluated(self) -> dict[str, Any]:
        """Summarise what is known about the best and the last weights, even if the run was interrupted."""
        schedule, verdict = self._schedule, self._verdict
        if verdict is None:
            verdict = Verdict() if schedule is None else schedule.without_closing()
        return verdict.summary() | {"evals_skipped": 0 if schedule is None else schedule.skipped}

    def _account(self) -> RowCounts:
        """Return the balanced row counts of this learner and its collector."""
        assert self._collector is not None, "the collector was opened before"
        return balance(self._collector.rows(), self._learner.rows(), self._lost)

    @property
    def saving(self) -> bool:
        """Return whether the run waits for a checkpoint to be written."""
        return self._meter.doing == "save"

    def emergency_end(self, reason: str, exit_code: int, *, save: bool = True) -> bool:
        """Save the last weights, unless an update is in progress, and write the summary. The watchdog's thread calls
        this when the training is stuck and it is about to end the process with this exit code. Collector and hooks are
        not touched. Return False if the run is already ending by itself."""
        ending = self._ending
        if not ending.begin():
            return False
        if exit_code > SIGNALLED:
            ending.reason = "interrupted"
            ending.problems.append(reason)
            self._stop.signal = self._stop.signal or signal.Signals(exit_code - SIGNALLED)
        else:
            stuck = FreewheelError(reason)
            stuck.exit_code = exit_code
            ending.fail(stuck, "training")
        whole = save and self._meter.doing not in HALFWAY
        self._turning = self._turning and not (whole and not self._stop.hook)  # on_publish: new weights are not out yet
        self._close_down(self._rows_now(), {}, ending.attempt("saving", self._save, None) if whole else None)
        return True

    def last_known(self) -> tuple[Path, Mapping[str, Any]]:
        """Return the path of the summary and what is known for it now. Callable from other threads."""
        meter = self._meter
        known = {"wall_s": meter.wall_s, **meter.done, **self._evaluated(), **asdict(self._rows_now())}
        return self._directory.path / SUMMARY, {"run": self._plan.path.name, **known, "path": str(self._plan.path)}

    def _rows_now(self) -> RowCounts:
        """Return the present row counts, or the last logged ones if the accounts do not balance at this moment."""
        if self._collector is not None:
            with suppress(Exception):
                return self._together.rows(settle(self._account()))
        return self._rows

    def _finish(self) -> dict[str, Any]:
        """Settle the accounts, save the last weights, call hooks, write the summary, close the sinks."""
        ending, collector = self._ending, self._collector
        report: Mapping[str, Any] = {}
        messages: Sequence[str] = ()
        rows = RowCounts()
        if (recorder := self._recorder) is not None:
            ending.attempt("the schedule", lambda: recorder.close(ending.reason), None)
        if collector is not None:
            accounts = collector.rows(), self._learner.rows(), self._lost
            rows = ending.attempt("closing the accounts", lambda: settle(*accounts), total(*accounts))
            report = ending.attempt("the collector's report", collector.summary, report)
        saved = ending.attempt("saving", self._save, None)
        self._hooks.end(saved, ending, self._stop)
        if collector is not None:
            messages = ending.attempt("the collector's report", collector.messages, messages)
            self._note(*self._together.told(messages))
        rows, report = ending.attempt("the totals", lambda: self._together.finish(rows, report), (rows, report))
        return self._close_down(rows, report, saved)

    def _save(self) -> Path:
        """Save the last checkpoint. No save is in progress when this returns."""
        try:
            saved = self._save_last(self._ending.reason)
        finally:
            self._saver.close()
        if saved is None:
            raise DiskError(f"the last weights could not be saved: {self._directory.problems[-1]}")
        return saved

    def _close_down(self, rows: RowCounts, report: Mapping[str, Any], saved: Path | None) -> dict[str, Any]:
        """Write the summary and close the sinks. A summary that cannot be written is still shown on the screen."""
        ending, directory = self._ending, self._directory
        self._sink_set.catch_up()
        directory.keep()
        ending.problems += [*directory.problems, *self._sink_set.problems]
        ending.problems += [] if self._recorder is None else self._recorder.problems
        summary = self._summary(rows, report, saved)
        self._live.end()
        if not directory.write(SUMMARY, summary):
            ending.fail(DiskError(f"the summary could not be written: {directory.problems[-1]}"), "the summary")
            summary = self._summary(rows, report, saved)
        self._sink_set.close(summary, PATIENCE if self._stop.signal is None else QUICK)
        return summary

    def _summary(self, rows: RowCounts, report: Mapping[str, Any], saved: Path | None) -> dict[str, Any]:
        ending, asked = self._ending, self._stop.signal
        self._stop.told = asked
        evaluated = ending.attempt("the last evaluation", self._evaluated, Verdict().summary() | {"evals_skipped": 0})
        summary = {
            "run": self._plan.path.name,
            "ended": ending.reason if asked is None else f"{ending.reason} ({asked.name})",
            "exit_code": ending.exit_code(asked, degraded=bool(report.get("workers_lost"))),
            "error": None if ending.failure is None else str(ending.failure) or repr(ending.failure),
            **self._meter.totals(),
            "slept_s": self._slept_s(),
            **evaluated,
            **asdict(rows),
            "shares": self._meter.shares(),
            "worker_restarts": 0,
            "out_of_space": 0,
            "graphs_fallback": self._fallback or None,
            **report,
            "checkpoints": asdict(self._saver.counts),
            "weights_sha256": None if saved is None else fingerprint_of(self._learner),
            "path": str(self._plan.path),
            "problems": list(ending.problems),
        }
        return summary | {"advice": ending.attempt("the advice", lambda: closing(self._plan, summary), None)}
