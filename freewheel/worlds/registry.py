"""The Gymnasium ids of our own worlds."""

from __future__ import annotations

WORLDS = {
    "freewheel/RoughDrone-v0": "freewheel.worlds.drone:RoughDrone",
    "freewheel/Straggler-v0": "freewheel.worlds.straggler:Straggler",
}

#: Those that are one simulation of all their lanes, on a device.
BATCHED = ("freewheel/RoughDrone-v0",)


def register() -> None:
    """Make our worlds known to gymnasium.make; calling it again changes nothing. A world is imported when it is made."""
    import gymnasium

    for name, entry_point in WORLDS.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point, order_enforce=False, disable_env_checker=True)
