"""Options that are auto until the world is known: an algorithm names what suits its kind of actions; what is given stays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from freewheel.config import flags
from freewheel.config.resolve import Config
from freewheel.core import EnvSpec

KINDS = {"box": "Box actions", "discrete": "Discrete actions"}


def kind_of(world: EnvSpec) -> str:
    """What defaults go by, in words."""
    return "a batched simulator" if world.batched_on_device else KINDS[world.action.kind]


def settle(config: Config, world: EnvSpec, rows: int | None) -> Config:
    """The same with every such option chosen; `rows` of an update, None where only their end tells how many there are."""
    usual = config.learner.usual(world, rows)
    parts = {config.algo: config.learner, "policy": config.policy}
    chosen: dict[str, dict[str, Any]] = {}
    for part, options in parts.items():
        automatic = [name for name, value in flags.values(options).items() if value == "auto"]
        chosen[part] = {name: usual[f"{part}.{name}"] for name in automatic if f"{part}.{name}" in usual}
    names = [f"{part}.{name}" for part, values in chosen.items() for name in values]
    source = f"default for {kind_of(world)}"
    return replace(
        config,
        learner=replace(config.learner, **chosen[config.algo]),  # type: ignore[type-var] # options are dataclasses
        policy=replace(config.policy, **chosen["policy"]),
        sources={**config.sources, **dict.fromkeys(names, source)},
    )
