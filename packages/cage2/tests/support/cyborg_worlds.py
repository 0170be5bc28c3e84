"""The real simulator with scripted blue actions, so that its episodes do not depend on the policy."""

from __future__ import annotations

import sys
from typing import Any

from freewheel.core import NDArray
from freewheel.seeding import generator
from freewheel_cage2.cyborg import Scenario2
from freewheel_cage2.scenario import ACTIONS

STEPS = 12


class Scripted(Scenario2):
    """Blue ignores its actions and does what the episode's seed determines. The last info says whether torch is loaded."""

    def __init__(self, red_agent: str = "mixture") -> None:
        super().__init__(red_agent, STEPS)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray, dict[str, Any]]:
        self.script = iter(script(seed or 0))
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[NDArray, float, bool, bool, dict[str, Any]]:
        *answer, info = super().step(next(self.script))
        return *answer, info | {"torch": float("torch" in sys.modules)}  # type: ignore[return-value]


def script(seed: int) -> list[int]:
    """Return blue's actions in the episode of this seed."""
    actions: list[int] = generator(seed, "script").integers(len(ACTIONS), size=STEPS).tolist()
    return actions
