"""Measurements of environments that need not be measured."""

from __future__ import annotations

from typing import Any

from freewheel.core import ActionSpec, EnvSpec, Slice
from freewheel.rollout.probe import EnvCost

SPEC = EnvSpec("Toy-v0", 1, 2, "float32", (Slice("obs", 0, 2, (2,)),), ActionSpec("discrete", 2))


def cost(wall: float = 0.0, cpu: float = 0.0, *, memory: int = 0) -> EnvCost:
    """Of an env whose steps all take `wall` seconds, `cpu` of them of the processor."""
    times: dict[str, Any] = dict.fromkeys(("wall", "row", "fast", "median", "slow", "longest"), wall)
    return EnvCost(spec=SPEC, cpu=cpu, steps=100, memory=memory, **times)
