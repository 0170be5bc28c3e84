"""Mode lockstep: N envs with a barrier at every step, in this process for cheap envs, in processes for expensive ones."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from freewheel.collect.mode import Mode
from freewheel.collect.serial import SerialConfig
from freewheel.core import Env
from freewheel.rollout.factory import MakeEnv
from freewheel.rollout.probe import StepCost, step_cost, usable_cores

#: Seconds that a barrier over processes adds to the step of a lane (0.2 ms for environments that sleep to 0.6 ms for those that
#: compute, 8 lanes on 2 cores).
BARRIER = 450e-6


@dataclass(frozen=True)
class LockstepConfig(SerialConfig):
    """N envs, a barrier at every step."""

    num_envs: int = 8
    """Lanes: environments stepped side by side."""
    placement: Literal["auto", "inline", "processes"] = "auto"
    """Where lanes run: in this process, in one process each, or (auto) chosen by their measured step time."""

    def place(self, make: MakeEnv, lanes: range) -> Env:
        """An Env of these lanes, placed as configured."""
        if self.placement == "inline" or (self.placement == "auto" and not self._expensive(make, lanes)):
            return make(lanes)
        return make(lanes, processes=True)

    def _expensive(self, make: MakeEnv, lanes: range) -> bool:
        """Whether a process for each lane pays, measured twice on the first lane: once may be wrong on a busy machine."""
        if len(lanes) == 1:
            return False
        with closing(make(lanes[:1])) as env:
            return all(processes_pay(step_cost(env, seed), len(lanes)) for seed in range(2))


def processes_pay(cost: StepCost, lanes: int) -> bool:
    """Whether lanes in processes save more than the barrier costs: waiting overlaps over lanes, computing over cores."""
    return cost.wall > BARRIER + max(cost.wall / lanes, cost.cpu / usable_cores())


_SUMMARY = "environments step together behind a barrier, in this process or in one each"
MODE = Mode(name="lockstep", config=LockstepConfig, summary=_SUMMARY)
