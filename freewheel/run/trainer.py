"""Training: turns a Config into a finished run directory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from freewheel.config.resolve import Config
from freewheel.learn.spec import Services, make_learner
from freewheel.metrics.meter import Meter
from freewheel.metrics.names import kinds_of_time
from freewheel.run import process
from freewheel.run.advice.auto_mode import plan_run
from freewheel.run.advice.first_update import checked
from freewheel.run.checkpoints.run_progress import Earlier
from freewheel.run.checkpoints.saver import Saver
from freewheel.run.hooks import find_hooks
from freewheel.run.learners.learner_processes import LearnerProcesses, gathered
from freewheel.run.learners.share import by_torchrun
from freewheel.run.live.reporter import KnownExecutors
from freewheel.run.naming import Result
from freewheel.run.plan import Plan
from freewheel.run.planning import print_line, silent
from freewheel.run.process import import_torch
from freewheel.run.saved import RunDirectory, check_fit, lock_run
from freewheel.run.schedule.recorder import ScheduleRecorder
from freewheel.run.session import Listeners, Session
from freewheel.run.stopping.stop import Stop
from freewheel.run.stopping.watchdog import Watchdog
from freewheel.sinks.sink import Outputs, RunInfo, Sink, chosen
from freewheel.sinks.sink_set import SinkSet
from freewheel.sinks.timeline import TimelineSink
from freewheel.timeline.recording import SpanRecording
from freewheel.timeline.terminal import show
from freewheel.timeline.trainer_tracks import SAVER, LearnerTracks, doing, timed_executors
from freewheel.transport.clock import clock
from freewheel.transport.executors import Executors, SerialExecutor
from freewheel.transport.learners.rank import RankInfo, of_torchrun


def check(config: Config) -> Plan:
    """Return the plan of a run after all checks that could reject it; nothing is started or written."""
    chosen(config.run.output.all_sinks)
    find_hooks(config.run.hooks)
    planned = checked(plan_run(config))
    make_learner(planned.config.learner, replace(planned.learner_spec, services=Services(executors=SerialExecutor)))
    return planned


def run(
    config: Config,
    *,
    quiet: bool = False,
    hooks: Sequence[object] = (),
    sinks: Sequence[Sink] = (),
    earlier: Earlier | None = None,
    again: Path | None = None,
) -> Result:
    """Train. However the run ends, its directory is complete and nothing is left running; then failures are raised.

    `hooks` and `sinks` are used in addition to those that the config names. again: the directory, locked by the caller,
    of a run that ended before it had saved anything and is restarted.
    """
    place = of_torchrun()
    config = by_torchrun(config, place)
    if place is not None and place.rank:
        return followed(place)
    stop = Stop()
    with stop.listening(), clock, Watchdog(stop, config.env.label, config.env.timeouts):
        own = [*find_hooks(config.run.hooks), *find_hooks(hooks)]
        chosen(config.run.output.all_sinks)
        report = silent if quiet else print_line
        there, began, imports = again if earlier is None else earlier.path, time.monotonic(), list[float]()
        # A resumed run continues with its own weights, not with those of --init.
        begun = config if earlier is None else _with_init(config, "")
        whole = plan_run(begun, report, lambda: imports.append(import_torch()), there)
        stop.measured_s = time.monotonic() - began - sum(imports)
        if earlier is not None:
            whole = replace(whole, config=_with_init(whole.config, config.run.init))
            check_fit(earlier.saved, whole.spec)
        elif again is None:
            whole = checked(whole)
        with gathered(whole, stop, resumed=earlier is not None) as replicas:
            result = train_part(whole, replicas, stop, own, Outputs(quiet, sinks), earlier, claim=again is None)
    stop.pass_on()
    return result


def _with_init(config: Config, init: str) -> Config:
    return replace(config, run=replace(config.run, init=init))


def followed(place: RankInfo) -> Result:
    """Run a learner that torchrun started, except the first: the first one makes the plan and sends it."""
    from freewheel.run.learners.follow import follow  # which imports this module

    path, code = follow(place)
    return Result(path, {"exit_code": code})


def train_part(
    whole: Plan,
    replicas: LearnerProcesses,
    stop: Stop,
    hooks: Sequence[object],
    outputs: Outputs,
    earlier: Earlier | None,
    *,
    claim: bool = False,
) -> Result:
    """Train as the only learner of a run or one of several. claim: create the directory, which otherwise exists."""
    planned, config = replicas.part(whole), whole.config
    process.keep_freed_memory()
    with (
        process.learner_threads(planned.config.run.machine.threads),
        process.executors(planned.config, planned.device, stop.check) as executors,
        ExitStack() as held,
    ):
        recorder = ScheduleRecorder() if config.run.output.record_schedule and earlier is None else None
        executors = executors if recorder is None else recorder.executors(executors)
        meter, trace = Meter(planned.workers, planned.spec.measures, gpus=planned.gpus), None
        if config.run.output.trace:
            trace = SpanRecording(kinds_of_time())
            executors = timed_executors(executors, trace) if isinstance(executors, Executors) else executors
        services = _services(beside := KnownExecutors(executors), meter, stop, replicas)
        learner = make_learner(planned.config.learner, replace(planned.learner_spec, services=services))
        if earlier is None:
            stop.begin()
            if claim:
                name = whole.name.claim()
                whole, planned = replace(whole, name=name), replace(planned, name=name)
                held.enter_context(lock_run(planned.path))
        replicas.begins_in(whole.path, earlier)
        sink_set = SinkSet()
        directory = RunDirectory(whole, sink_set.note)
        saver = Saver(directory, learner, every_s=60 * config.run.output.checkpoint_every)
        if earlier is not None:
            saver.go_on_from(earlier)
            stop.begin()  # nothing has been changed on disk so far
            directory.go_back(int(earlier.progress["metrics_bytes"]))
        elif claim:
            directory.keep()
        else:
            directory.store.go_back_to(None)
            directory.go_back()
        info = _info(whole, directory, outputs, sink_set, resumed=earlier is not None)
        traced = [] if trace is None else [_begin_trace(trace, planned, meter, saver)]
        sink_set.open(chosen(config.run.output.all_sinks), info, [*outputs.sinks, *traced])
        directory.keep()
        if recorder is not None:
            recorder.open(directory.path, sink_set.note, hooks=len(hooks))
        progress = {} if earlier is None else earlier.progress
        together = replicas.together(stop, meter, config.run.budget, whole.path, progress)
        listeners = Listeners(sink_set, hooks, recorder, trace, together)
        session = Session(planned, saver, directory, stop, meter, listeners)
        try:
            return Result(planned.path, session.train(beside))
        finally:
            if traced and traced[0].timeline is not None and not outputs.quiet:
                show(traced[0].timeline)


def _info(whole: Plan, directory: RunDirectory, outputs: Outputs, sink_set: SinkSet, *, resumed: bool) -> RunInfo:
    """Return the facts about a run that sinks receive."""
    config = whole.config
    return RunInfo(
        path=directory.path,
        title=f"{config.env.label}  {config.algo}  {config.mode}",
        budget=config.run.budget,
        algorithm=config.algo,
        mode=config.mode,
        setup=whole.setup,
        config=config.to_json(),
        resumed=resumed,
        project=config.run.output.wandb_project,
        quiet=outputs.quiet,
        console=config.run.output.console,
        say=sink_set.note,
    )


def _services(executors: KnownExecutors, meter: Meter, stop: Stop, replicas: LearnerProcesses) -> Services:
    """Return the learner's services. An update with other learners is not interrupted: they end between two updates."""
    alone = stop.cuts = replicas.group is None
    return Services(
        executors=executors,
        while_waiting=stop.check if alone else stop.report,
        between_steps=stop.keep_time if alone else stop.report,
        report=stop.report,
        span=meter.span,
        peers=replicas.peers,
    )


def _begin_trace(trace: SpanRecording, planned: Plan, meter: Meter, saver: Saver) -> TimelineSink:
    """Begin the timeline of the learner's activities and of checkpoint writes."""
    earlier_s = 0.0 if saver.earlier is None else float(saver.earlier.progress["meter"]["wall_s"])
    trace.begin(planned.path, earlier_s)
    meter.record(LearnerTracks(trace, on_gpu=planned.device != "cpu"))
    trace.attach({}, "learner", doing(lambda: meter.present))
    saver.track = trace.track(SAVER, "learner")
    return TimelineSink(trace)
