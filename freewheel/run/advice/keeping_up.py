"""The way in which a plan collects, and automatic learner options with which the learner keeps up."""

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

AT_ONCE = PolicyTimes(act=0.0, learn=0.0)  # acting and learning take no time
#: The factor by which workers that wake often slow the learner down: its caches are cold, and its priority is lower
#: (with 100 workers on 2 cores: 2.1 to 4.1; benchmarks/straggler.py).
BESIDE = 4.0
ROOM = 0.5  # share of the time that a learner may work without delaying the workers
WORTH = 0.9  # a lighter config is worth it if it costs at most this share of the one before


def way_of(planned: Plan) -> Way | None:
    """Return the way in which a plan collects; None if the model does not cover it."""
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
    """Return the mean steps of an episode as measured, or the limit of an episode if none has ended."""
    lengths = () if planned.cost is None else planned.cost.lengths
    return sum(lengths) / len(lengths) if lengths else float(planned.config.env.episode_limit or planned.batch.steps)


def keeping_up(first: Plan, lighter: Sequence[Config]) -> Plan:
    """Return the plan, or the first lighter one with which workers hardly wait for the learner."""
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
