"""Options that are auto until the world is known: an algorithm names what suits its kind of actions; what is given stays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from freewheel.config import flags
from freewheel.config.resolve import Config
from freewheel.core import EnvSpec

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
