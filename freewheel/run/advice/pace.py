"""How a plan collects, and options of its learner with which it keeps up with that, where nobody asked for a number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from freewheel.collect.mode import MODES
from freewheel.collect.serial import SerialConfig
from freewheel.collect.workers import WorkersConfig
from freewheel.config.resolve import Config
from freewheel.run.advice.policy_times import update_cost
from freewheel.run.advice.throughput import PolicyTimes, StepTimes, Way, forecast
from freewheel.run.process import learner_threads

if TYPE_CHECKING:
    from freewheel.run.plan import Plan

AT_ONCE = PolicyTimes(act=0.0, learn=0.0)  # nothing is learned
#: A learner beside workers that wake all the time takes so many times what it takes alone: its caches are cold, and it has the
#: lower priority (100 of them on 2 cores: 2.1 to 4.1; benchmarks/straggler.py).
BESIDE = 4.0
ROOM = 0.5  # share of the time that a learner may work if workers are not to feel it
WORTH = 0.9  # of the cost of an update: with less of it fewer gradient steps are worth it


def way_of(planned: Plan) -> Way | None:
    """How a plan collects; None where the model has no place for it."""
    config, mode = planned.config, MODES[planned.config.mode]
    lanes, steps = planned.spec.lanes, planned.batch.steps
    if planned.spec.batched_on_device:
        return None
    if isinstance(config.collector, SerialConfig):
        return Way(kind="barrier" if planned.env_processes else "serial", workers=1, lanes=lanes, steps=steps)
    if not isinstance(config.collector, WorkersConfig) or not (mode.whole_batches or mode.free_running):
        return None
    return Way(
        kind="batch" if mode.whole_batches else "free",
        workers=planned.workers,
        lanes=lanes,
        steps=steps,
        fragment=config.collector.fragment_steps(planned.batch),
        max_lag=planned.max_lag,
        episode=_episode_steps(planned) if config.collector.whole_episodes else 0.0,
        yields=planned.yields == "learner",
    )


def _episode_steps(planned: Plan) -> float:
    """Of an episode in the mean: as measured, or its limit where none has ended."""
    lengths = () if planned.cost is None else planned.cost.lengths
    return sum(lengths) / len(lengths) if lengths else float(planned.config.env.episode_limit or planned.batch.steps)


def keeping_up(first: Plan, lighter: Sequence[Config]) -> Plan:
    """The plan, with the first of these configs, each with less work a row, with which workers hardly wait for the learner."""
    cost, way = first.cost, way_of(first) if lighter and first.batch.episodes is None else None
    if way is None or way.kind != "free" or cost is None or cost.row <= 0:
        return first
    machine, chosen = first.config.run.machine, first
    rate = forecast(way, StepTimes.of(cost), AT_ONCE, first.cores).rate / machine.learners
    with learner_threads(machine.threads):
        spent = BESIDE * rate * update_cost(first)
        for there in (replace(first, config=config) for config in lighter):
            if spent <= ROOM or (less := BESIDE * rate * update_cost(there)) > WORTH * spent:
                break
            chosen, spent = there, less
    return chosen
