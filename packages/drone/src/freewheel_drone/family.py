"""The world family of the drone."""

from __future__ import annotations

from freewheel.envs import batched
from freewheel.envs.family import FamilyFlags, WorldFamily

ID = "freewheel/RoughDrone-v0"


def _stand_in(name: str) -> tuple[str, str] | None:
    """Replace the flying tasks of Isaac Lab if Isaac Lab is not installed."""
    flies = batched.is_isaac_task(name) and ("drone" in name.lower() or "quadcopter" in name.lower())
    return (ID, f"{name} needs Isaac Lab, which is not installed") if flies and not batched.has_isaaclab() else None


FAMILY = WorldFamily(
    name="drone",
    serves=lambda name: name == ID,
    options=batched.SimulatorOptions,
    build=batched.build,
    ids={ID: {"entry_point": "freewheel_drone.env:RoughDrone"}},
    flags=FamilyFlags(defaults=batched.DEFAULTS, presets="freewheel_drone", env_help=f"{ID}, a drone"),
    stand_in=_stand_in,
)
