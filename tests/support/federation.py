"""Federations: a small world, and commands that are run in a folder of their own."""

from __future__ import annotations

from freewheel.core import ActionSpec, EnvSpec, Slice


def toy_world() -> EnvSpec:
    """Three columns, two actions."""
    return EnvSpec("toy", 2, 3, "float32", (Slice("policy", 0, 3, (3,)),), ActionSpec("discrete", 2))
