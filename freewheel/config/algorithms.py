"""The algorithms by name. To be replaced by the registry of freewheel.learn, which has the same interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from freewheel.errors import UsageError, nearest
from freewheel.learn.settings import MBPOConfig, PPOConfig, SACConfig

AlgorithmConfig = PPOConfig | SACConfig | MBPOConfig


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """An algorithm."""

    name: str
    config: type[AlgorithmConfig]
    defaults: Mapping[str, Any] = field(default_factory=dict)  # options that differ from the general defaults


class _Table(dict[str, Algorithm]):
    def __missing__(self, name: str) -> NoReturn:
        raise UsageError(f"unknown algorithm '{name}'{nearest(name, self)}")


_REPLAY = {"num_steps_per_env": 1, "policy": {"hidden": [256, 256], "activation": "relu", "head": "squashed"}}
ALGORITHMS = _Table(
    ppo=Algorithm(name="ppo", config=PPOConfig),
    sac=Algorithm(name="sac", config=SACConfig, defaults=_REPLAY),
    mbpo=Algorithm(name="mbpo", config=MBPOConfig, defaults=_REPLAY),
)
