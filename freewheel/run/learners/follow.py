"""A learner after the first: it trains its share of the plan silently, in its folder inside the run directory."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import cloudpickle  # type: ignore[import-untyped]

from freewheel.errors import FAILED, FreewheelError
from freewheel.run.checkpoints import checkpoint
from freewheel.run.learners.learner_processes import LearnerProcesses, told_failures, wait_for_path
from freewheel.run.learners.versions import FOLDER, chosen_state
from freewheel.run.naming import RunName
from freewheel.run.plan import Plan
from freewheel.run.stopping.stop import Stop
from freewheel.run.stopping.watchdog import Watchdog
from freewheel.run.trainer import train_part
from freewheel.sinks.sink import Outputs
from freewheel.transport.clock import clock
from freewheel.transport.learners.group import JOIN, Group
from freewheel.transport.learners.rank import RankInfo, receive


def main(place: RankInfo, message: bytes) -> None:
    """The main function of a learner process that the first learner has started."""
    sys.exit(follow(place, message)[1])


def follow(place: RankInfo, message: bytes | None = None) -> tuple[Path, int]:
    """Train until all learners end. Return this learner's folder and exit code; the first learner reports its errors.

    message: the plan; None: receive it from the first learner."""
    stop = Stop()
    with stop.listening(), clock:
        try:
            store = place.meet(JOIN)
            whole, resumed = cloudpickle.loads(receive(store) if message is None else message)
            group = Group(place, store)
            with told_failures(group), Watchdog(stop, whole.config.env.label, whole.config.env.timeouts):
                return _train(LearnerProcesses(place, group), group, whole, stop, resumed=resumed)
        except FreewheelError as error:
            return Path(), error.exit_code


def _train(replicas: LearnerProcesses, group: Group, whole: Plan, stop: Stop, *, resumed: bool) -> tuple[Path, int]:
    path = wait_for_path(group)
    if path is None:
        return Path(), FAILED
    folder = path / FOLDER / str(replicas.place.rank)
    earlier = chosen_state(folder, group) if resumed else None
    if earlier is None:
        checkpoint.make_private(folder)
    result = train_part(_silent(whole, folder), replicas, stop, (), Outputs(quiet=True, sinks=()), earlier)
    return result.path, result.exit_code


def _silent(whole: Plan, folder: Path) -> Plan:
    """Return the plan without the parts that only the first learner has: evaluations, hooks, notes and sinks."""
    run = whole.config.run
    output = replace(run.output, sinks=(), tensorboard=False, wandb=False, trace=False, checkpoint_every=0.0)
    run = replace(run, evaluation=replace(run.evaluation, evals=0), hooks=(), output=output)
    name = RunName(folder.parent, folder.name, exact=True)
    return replace(whole, config=replace(whole.config, run=run, notes=()), name=name, remarks=())
