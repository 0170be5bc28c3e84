"""On PYTHONPATH of a checkout from before the packages: it must not find the entry points of those installed here."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from typing import Any

_found = metadata.Distribution.discover


def discover(**words: Any) -> Iterator[metadata.Distribution]:
    """Every installed distribution but ours."""
    return (one for one in _found(**words) if not str(one.metadata["Name"]).startswith("freewheel-"))


setattr(metadata.Distribution, "discover", discover)  # noqa: B010 - a type checker refuses the assignment
