"""The Gymnasium ids of our own worlds."""

from __future__ import annotations

from typing import Any

#: What gymnasium.register takes, by id.
WORLDS: dict[str, dict[str, Any]] = {
    "freewheel/RoughDrone-v0": {"entry_point": "freewheel.worlds.drone.env:RoughDrone"},
    "freewheel/Straggler-v0": {"entry_point": "freewheel.worlds.straggler:Straggler"},
    "freewheel/Cage2-v0": {
        "entry_point": "freewheel.worlds.cage2.env:Cage2",
        "vector_entry_point": "freewheel.worlds.cage2.env:Cage2Vector",
        "max_episode_steps": 100,
    },
}

#: Those that are one simulation of all their lanes, on a device.
BATCHED = ("freewheel/RoughDrone-v0",)


def register() -> None:
    """Make our worlds known to gymnasium.make; calling it again changes nothing. A world is imported when it is made."""
    import gymnasium

    for name, entry in WORLDS.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, order_enforce=False, disable_env_checker=True, **entry)
