"""Mode lockstep: N envs with a barrier at every step, in this process if they are cheap, in processes if expensive."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

from freewheel.collect.mode import LANES, Mode
from freewheel.collect.serial import SerialConfig
from freewheel.core import Env
from freewheel.rollout.factory import MakeEnv
from freewheel.rollout.probe import EnvCost, usable_cores

#: Seconds that a barrier over processes adds to the step of a lane (measured with 8 lanes on 2 cores: 0.2 ms for
#: environments that sleep, 0.6 ms for environments that compute).
BARRIER = 450e-6


@dataclass(frozen=True)
class LockstepConfig(SerialConfig):
    """N envs with a barrier at every step."""

    num_envs: Annotated[int, LANES] = 8
    """Lanes: environments stepped side by side."""
    placement: Literal["auto", "inline", "processes"] = "auto"
    """Where lanes run: in this process, in one process each, or (auto) chosen by their measured step time."""

    @property
    def needs_step_time(self) -> bool:
        return self.placement == "auto"

    @property
    def env_processes(self) -> int:
        return self.num_envs if self.placement == "processes" else 0

    def planned(self, cost: EnvCost) -> Self:
        """Return a copy with the placement chosen."""
        if self.placement != "auto":
            return self
        return replace(self, placement="processes" if processes_pay(cost, self.num_envs) else "inline")

    def plan_line(self) -> str:
        return f"{self.num_envs} envs, a process each" if self.env_processes else super().plan_line()

    def place(self, make: MakeEnv, lanes: range) -> Env:
        """Return an Env of these lanes, placed as planned."""
        assert self.placement != "auto", "call planned() first"
        return make(lanes, processes=self.env_processes > 0, fault_tolerant=True)


def processes_pay(cost: EnvCost, lanes: int) -> bool:
    """Return whether processes save more than the barrier costs: waits overlap across lanes, computing across cores."""
    if lanes == 1 or not cost.portable:
        return False
    return cost.usual > BARRIER + max(cost.usual / lanes, min(cost.cpu, cost.usual) / usable_cores())


_SUMMARY = "environments step together behind a barrier, in this process or in one each"
MODE = Mode(name="lockstep", config=LockstepConfig, summary=_SUMMARY)
