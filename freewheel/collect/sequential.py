"""Mode sequential: all lanes in turn in one process, act then learn; the simplest mode, useful for debugging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from freewheel.collect.mode import LANES, Mode
from freewheel.collect.serial import SerialConfig
from freewheel.core import Env
from freewheel.rollout.factory import MakeEnv


@dataclass(frozen=True)
class SequentialConfig(SerialConfig):
    """All lanes in turn in one process, act then learn."""

    num_envs: Annotated[int, LANES] = 1
    """Lanes: environments stepped side by side."""

    def place(self, make: MakeEnv, lanes: range) -> Env:
        """Return an Env of these lanes in this process."""
        return make(lanes, fault_tolerant=True)


_SUMMARY = "all environments in one process, acting and learning in turn"
MODE = Mode(name="sequential", config=SequentialConfig, summary=_SUMMARY)
