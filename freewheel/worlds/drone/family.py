"""The drone as a world family."""

from __future__ import annotations

from freewheel.envs import batched
from freewheel.envs.family import FamilyFlags, WorldFamily

ID = "freewheel/RoughDrone-v0"

FAMILY = WorldFamily(
    name="drone",
    serves=lambda name: name == ID,
    options=batched.SimulatorOptions,
    build=batched.build,
    ids={ID: {"entry_point": "freewheel.worlds.drone.env:RoughDrone"}},
    flags=FamilyFlags(defaults=batched.DEFAULTS, env_help=f"{ID}, a drone"),
)
