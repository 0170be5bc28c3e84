"""sequential: all lanes in turn in one process, act then learn; the baseline and the debugger's friend."""

from __future__ import annotations

from dataclasses import dataclass

from freewheel.core import Collector, Env
from freewheel.rollout.cpu import Runner
from freewheel.rollout.recipe import MakeEnv, Recipe
from freewheel.rollout.turns import Turns


@dataclass(frozen=True)
class SequentialConfig:
    """All lanes in turn in one process, act then learn."""

    num_envs: int = 1
    """Lanes: environments stepped side by side."""

    def build(self, recipe: Recipe, steps: int) -> Collector:
        return Turns(Runner(recipe, range(self.num_envs)), steps)

    def place(self, make: MakeEnv, lanes: range) -> Env:
        """These lanes in this process."""
        return make(lanes)
