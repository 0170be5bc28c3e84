"""Chooses options that are auto until the world is known, as the algorithm suggests for it; given values stay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from freewheel.collect.mode import MODES
from freewheel.collect.workers import WorkersConfig
from freewheel.config import flags
from freewheel.config.resolve import Config
from freewheel.core import EnvSpec
from freewheel.errors import UsageError
from freewheel.learn.spec import ReplayConfig
from freewheel.rollout.probe import EnvCost, usable_cores

UPDATES = 4  # the least number of updates in a run with little time
#: Rows per second that a learner with a replay buffer takes on a busy machine, if it publishes after every few rows.
TAKEN = 500
PUBLISH_EVERY = 8  # rows between two policy versions with a replay buffer, if workers do not wait for them
SHORTEST = 8  # the fewest steps of a lane in an update, because advantages are estimated along them
MEASURED = "default where the learner sets the speed"  # the source of options that follow from measurements
KINDS = {"box": "Box actions", "discrete": "Discrete actions"}


def kind_of(world: EnvSpec) -> str:
    """Return the kind of world by which defaults are chosen, in words."""
    return "a batched simulator" if world.batched_on_device else KINDS[world.action.kind]


def settle(config: Config, world: EnvSpec) -> Config:
    """Return the config with every such option chosen."""
    source = f"default for {kind_of(world)}"
    if config.run.num_steps_per_env == "auto":
        run = replace(config.run, num_steps_per_env=_steps_per_env(config, world))
        config = replace(config, run=run, sources={**config.sources, "num_steps_per_env": source})
    rows = None if config.collector.episodes_per_update else config.run.steps_per_env * world.lanes
    usual = config.learner.usual(world, rows)
    chosen: dict[str, dict[str, Any]] = {}
    for part, options in ((config.algo, config.learner), ("policy", config.policy)):
        automatic = [name for name, value in flags.values(options).items() if value == "auto"]
        chosen[part] = {name: usual[f"{part}.{name}"] for name in automatic if f"{part}.{name}" in usual}
    names = [f"{part}.{name}" for part, values in chosen.items() for name in values]
    return replace(
        config,
        learner=replace(config.learner, **chosen[config.algo]),  # type: ignore[type-var] # options are dataclasses
        policy=replace(config.policy, **chosen["policy"]),
        sources={**config.sources, **dict.fromkeys(names, source)},
    )


def lighter(given: Config, settled: Config) -> Sequence[Config]:
    """Return configs whose updates cost less and less per row; options that somebody has set do not change."""
    decided = {name for name in given.sources if flags.flatten(given.to_json()).get(name) != "auto"}
    free = [options for options in given.learner.lighter() if not decided & options.keys()]
    made = ({name.partition(".")[2]: value for name, value in options.items()} for options in free)
    told = ({**settled.sources, **dict.fromkeys(options, MEASURED)} for options in free)
    return [
        replace(settled, learner=replace(settled.learner, **one), sources=sources)  # type: ignore[type-var] # a dataclass
        for one, sources in zip(made, told, strict=True)
    ]


def _steps_per_env(config: Config, world: EnvSpec) -> int:
    """Return the steps that give an update its rows for any number of lanes; an update is no longer than the run."""
    rows, whole = config.learner.rows_per_update(world), config.run.budget.steps
    steps = max(SHORTEST, round(rows / world.lanes))
    return steps if whole is None or world.batched_on_device else min(steps, max(1, -(-whole // world.lanes)))


def sooner(config: Config, cost: EnvCost) -> tuple[Config, list[str]]:
    """Return the config and no line; or, if the run would end before its first update and nobody has set the number of
    rows before that, the config with fewer of them and a line about it."""
    learner, budget = config.learner, config.run.budget
    limit, name = _most_rows(config, cost), f"--minutes {budget.minutes}"
    option, made = "num_steps_per_env", config
    if isinstance(learner, ReplayConfig):
        option = f"{config.algo}.learning_starts"
        limit = min(limit, TAKEN * 30 * (budget.minutes or math.inf))
        limit, name = min((limit, name), (budget.steps or math.inf, f"--steps {budget.steps}"))
        asked = not config.sources.get(option, "preset").startswith("preset")
        if learner.learning_starts + 1 / learner.ratio > limit and not asked:
            few: Any = replace(learner, learning_starts=(count := max(1, int(limit / UPDATES))))
            made = replace(config, learner=few)
    elif learner.on_policy and config.run.num_steps_per_env == "auto" and not config.collector.episodes_per_update:
        rows = limit / UPDATES
        if rows < learner.rows_per_update(cost.spec) and not cost.spec.batched_on_device:
            count = 2 ** int(math.log2(max(rows / config.collector.lanes, SHORTEST)))  # hides small differences in cost
            count = min(count, budget.steps or count)
            made = replace(config, run=replace(config.run, num_steps_per_env=count))
    if made is config:
        return config, []
    told = f"--{option.replace('_', '-')} {count}: {name} would end before the usual number of rows is collected"
    return replace(made, sources={**config.sources, option: f"default for {name}"}), [told]


def _most_rows(config: Config, cost: EnvCost) -> float:
    """Estimate the most rows that are collected in half of a run's minutes, from the cost of an environment. The other
    half is for the start and evaluations."""
    minutes, collector = config.run.budget.minutes, config.collector
    if minutes is None or cost.own <= 0 or config.env.batched or collector.elsewhere:
        return math.inf
    at_once = max(1, collector.env_processes)
    return 30 * minutes * min(at_once / cost.own, usable_cores() / cost.cpu if cost.cpu > 0 else math.inf)


def with_publications(config: Config, spec: EnvSpec) -> Config:
    """Set an interval between two versions of the policy that does not grow with the number of workers, if rows come
    from a replay buffer and workers do not wait for a new version."""
    learner, steps = config.learner, config.run.steps_per_env
    free = isinstance(config.collector, WorkersConfig) and not MODES[config.mode].whole_batches
    chosen = not config.sources.get("num_steps_per_env", "").startswith("algorithm ")  # by the user, or a preset
    if learner.on_policy or learner.publish_every is not None or not free or chosen or spec.batched_on_device:
        return config
    every = min(PUBLISH_EVERY, steps * spec.lanes)
    return replace(config, learner=replace(learner, publish_every=every))  # type: ignore[type-var] # a dataclass


def check_publications(config: Config, rows: int) -> None:
    """Raise UsageError if publish_every does not fit the `rows` after which workers wait for a new policy version."""
    every, mode = config.learner.publish_every, MODES[config.mode]
    if every is None or not isinstance(config.collector, WorkersConfig):
        return
    if every > rows or (every < rows and mode.whole_batches):
        most = "has to be" if mode.whole_batches else "can be at most"
        size = f"--num-steps-per-env × envs = {rows}"
        raise UsageError(f"{config.algo}.publish_every {every} {most} {size} in mode {config.mode}; leave it out")
