"""sequential: all lanes in turn in one process, act then learn; the baseline and the debugger's friend."""

from __future__ import annotations

from dataclasses import dataclass

from freewheel.core import Collector, Env
from freewheel.errors import UsageError
from freewheel.rollout.cpu import Runner
from freewheel.rollout.job import Job
from freewheel.rollout.recipe import MakeEnv, Recipe
from freewheel.rollout.turns import InTurn, Turns, simulate_in_turn


@dataclass(frozen=True)
class SequentialConfig(InTurn):
    """All lanes in turn in one process, act then learn."""

    num_envs: int = 1
    """Lanes: environments stepped side by side."""

    def build(self, recipe: Recipe, job: Job) -> Collector:
        if job.spec.tensors:
            return simulate_in_turn(recipe, job)
        return Turns(Runner(recipe, range(self.num_envs)), job.steps)

    def __post_init__(self) -> None:
        if self.num_envs < 1:
            raise UsageError(f"--num-envs must be positive, not {self.num_envs}")

    def place(self, make: MakeEnv, lanes: range) -> Env:
        """These lanes in this process."""
        return make(lanes)
