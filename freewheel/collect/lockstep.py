"""lockstep: N envs and a barrier every step, as most libraries do today; inline for cheap envs, in processes for dear ones."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from freewheel.collect.mode import Mode
from freewheel.collect.serial import SerialCollector, SerialConfig, simulate_in_turn
from freewheel.core import Collector, Env
from freewheel.errors import UsageError
from freewheel.rollout.factory import CollectSpec, MakeEnv, RunnerFactory
from freewheel.rollout.probe import StepCost, step_cost, usable_cores
from freewheel.rollout.runner import Runner

#: Seconds a lane-step that a barrier over processes costs beyond the steps themselves (0.2 for sleeping worlds to 0.6 ms for
#: burning ones, 8 lanes on 2 cores).
BARRIER = 450e-6


@dataclass(frozen=True)
class LockstepConfig(SerialConfig):
    """N envs, a barrier every step."""

    num_envs: int = 8
    """Lanes: environments stepped side by side."""
    placement: Literal["auto", "inline", "processes"] = "auto"
    """Where lanes live: in this process, in one process each, or (auto) whichever their measured step time suggests."""

    def build(self, factory: RunnerFactory, spec: CollectSpec) -> Collector:
        if spec.env.batched_on_device:
            return simulate_in_turn(factory, spec)
        lanes = range(self.num_envs)
        return SerialCollector(Runner(factory, lanes, env=self.place(factory.make, lanes)), spec.batch.steps)

    def __post_init__(self) -> None:
        if self.num_envs < 1:
            raise UsageError(f"--num-envs must be positive, not {self.num_envs}")

    def place(self, make: MakeEnv, lanes: range) -> Env:
        """These lanes where they run best."""
        if self.placement == "inline" or (self.placement == "auto" and not self._dear(make, lanes)):
            return make(lanes)
        return make(lanes, processes=True)

    def _dear(self, make: MakeEnv, lanes: range) -> bool:
        """Whether these lanes are worth a process each, judged by their first; twice, for a busy machine may look dear once."""
        if len(lanes) == 1:
            return False
        with closing(make(lanes[:1])) as env:
            return all(processes_pay(step_cost(env, seed), len(lanes)) for seed in range(2))


def processes_pay(cost: StepCost, lanes: int) -> bool:
    """Lanes in processes overlap: their waiting over all lanes, their computing over the cores. Is that worth the barrier?"""
    return cost.wall > BARRIER + max(cost.wall / lanes, cost.cpu / usable_cores())


_SUMMARY = "environments step together behind a barrier, in this process or in one each"
MODE = Mode(name="lockstep", config=LockstepConfig, summary=_SUMMARY)
