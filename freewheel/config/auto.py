"""Options that are auto until the world is known: an algorithm names what suits its kind of actions; what is given stays."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from freewheel.collect.mode import WorkersConfig
from freewheel.config import flags
from freewheel.config.resolve import Config
from freewheel.core import EnvSpec
from freewheel.learn.spec import ReplayConfig
from freewheel.rollout.probe import EnvCost, usable_cores

UPDATES = 4  # that are to fit at least into a run with little time
FITTED = "default for a run of "  # begins the source of what was made smaller
SHORTEST = 8  # steps of a lane in an update: advantages are estimated along them
KINDS = {"box": "Box actions", "discrete": "Discrete actions"}


def kind_of(world: EnvSpec) -> str:
    """What defaults go by, in words."""
    return "a batched simulator" if world.batched_on_device else KINDS[world.action.kind]


def settle(config: Config, world: EnvSpec) -> Config:
    """The same with every such option chosen."""
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


def _steps_per_env(config: Config, world: EnvSpec) -> int:
    """So many that an update has its rows, whatever the number of lanes; an update is no longer than the run."""
    rows, whole = config.learner.rows_per_update(world), config.run.budget.steps
    steps = max(SHORTEST, round(rows / world.lanes))
    return steps if whole is None or world.batched_on_device else min(steps, max(1, -(-whole // world.lanes)))


def sooner(config: Config, cost: EnvCost) -> Config:
    """The same with fewer rows before the first update, where the run would end before that and nobody has asked for so many."""
    learner, lanes, budget = config.learner, config.collector.lanes, config.run.budget
    brings, sources = _most_rows(config, cost), dict(config.sources)
    minutes, starts = f"{FITTED}--minutes {budget.minutes}", f"{config.algo}.learning_starts"
    if isinstance(learner, ReplayConfig) and starts not in sources:
        limit, sources[starts] = min((budget.steps or math.inf, f"{FITTED}--steps {budget.steps}"), (brings, minutes))
        if learner.learning_starts + 1 / learner.ratio > limit:
            few: Any = replace(learner, learning_starts=max(1, int(limit / UPDATES)))
            return replace(config, learner=few, sources=sources)
    elif learner.on_policy and config.run.num_steps_per_env == "auto" and config.collector.episodes_per_update is None:
        rows = brings / UPDATES
        if rows < learner.rows_per_update(cost.spec) and not cost.spec.batched_on_device:
            steps = 2 ** int(math.log2(max(rows / lanes, SHORTEST)))  # the same in spite of small differences
            run = replace(config.run, num_steps_per_env=min(steps, budget.steps or steps))
            return replace(config, run=run, sources=sources | {"num_steps_per_env": minutes})
    return config


def _most_rows(config: Config, cost: EnvCost) -> float:
    """About so many rows at most come in half of the minutes of a run, by what an environment costs; the other half is for the
    start and evaluations."""
    minutes, collector, at_once = config.run.budget.minutes, config.collector, 1
    if minutes is None or cost.own <= 0 or config.env.batched or collector.elsewhere:
        return math.inf
    if isinstance(collector, WorkersConfig):
        at_once = collector.worker_count
    elif getattr(collector, "placement", "inline") == "processes":
        at_once = collector.lanes
    return 30 * minutes * min(at_once / cost.own, usable_cores() / cost.cpu if cost.cpu > 0 else math.inf)


def fitted(config: Config) -> list[str]:
    """What was made smaller so that the run learns, a line each."""
    made = {name: source.removeprefix(FITTED) for name, source in config.sources.items() if source.startswith(FITTED)}
    values = {"num_steps_per_env": config.run.num_steps_per_env} | {
        f"{config.algo}.{name}": value for name, value in flags.values(config.learner).items()
    }
    return [
        f"--{name.replace('_', '-')} {values[name]}: {limit} would end before the usual number of rows has come"
        for name, limit in made.items()
    ]
