"""What a learner but the first does: its share of the plan, in a folder of its own inside of the run, without a word."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import cloudpickle  # type: ignore[import-untyped]

from freewheel.errors import FreewheelError
from freewheel.run.checkpoints import checkpoint
from freewheel.run.checkpoints.progress import Earlier
from freewheel.run.learners.crew import Crew, told_failures, wait_for_path
from freewheel.run.learners.versions import FOLDER, chosen_state
from freewheel.run.naming import RunName
from freewheel.run.plan import Plan
from freewheel.run.process import Stop
from freewheel.run.trainer import Result, train_part
from freewheel.run.watchdog import Watchdog
from freewheel.sinks.sink import Outputs
from freewheel.transport.clock import clock
from freewheel.transport.learners.group import JOIN, Group
from freewheel.transport.learners.place import Place


def main(place: Place, message: bytes) -> None:
    """The main function of a process that the first learner has started."""
    sys.exit(follow(place, message))


def follow(place: Place, message: bytes | None = None) -> int:
    """Train as one of several learners until all end; returns the exit code. What fails is told by the first learner.

    message: the plan; None: the first learner sends it."""
    stop = Stop()
    with stop.listening(), clock:
        try:
            group = Group(place, place.meet(JOIN))
            with told_failures(group):
                whole, resumed = cloudpickle.loads(group.receive(JOIN) if message is None else message)
                with Watchdog(stop, whole.config.env.label, whole.config.env.timeouts):
                    return _train(place, group, whole, stop, resumed=resumed)
        except FreewheelError as error:
            return error.exit_code


def _train(place: Place, group: Group, whole: Plan, stop: Stop, *, resumed: bool) -> int:
    path = wait_for_path(group)
    if path is None:
        return 1
    folder = path / FOLDER / str(place.rank)
    whole = _silent(whole, folder)
    earlier: Earlier | None = None
    if resumed:
        earlier = chosen_state(folder, group)
    else:
        checkpoint.make_private(folder)
    crew = Crew(place, group)
    result: Result = train_part(whole, crew, stop, (), Outputs(True, ()), earlier)
    return result.exit_code


def _silent(whole: Plan, folder: Path) -> Plan:
    """The same without what is done once in a run: evaluations, hooks, and sinks that others see."""
    run = whole.config.run
    output = replace(run.output, sinks=(), tensorboard=False, wandb=False, trace=False, checkpoint_every=0.0)
    run = replace(run, evaluation=replace(run.evaluation, evals=0), hooks=(), output=output)
    name = RunName(folder.parent, folder.name, exact=True)
    return replace(whole, config=replace(whole.config, run=run, notes=()), name=name, remarks=())
