"""Mode sequential: all lanes in turn in one process, act then learn; the simplest mode, useful for debugging."""

from __future__ import annotations

from dataclasses import dataclass

from freewheel.collect.mode import Mode
from freewheel.collect.serial import SerialCollector, SerialConfig, simulate_in_turn
from freewheel.core import Collector, Env
from freewheel.errors import UsageError
from freewheel.rollout.factory import CollectSpec, MakeEnv, RunnerFactory
from freewheel.rollout.runner import Runner


@dataclass(frozen=True)
class SequentialConfig(SerialConfig):
    """All lanes in turn in one process, act then learn."""

    num_envs: int = 1
    """Lanes: environments stepped side by side."""

    def build(self, factory: RunnerFactory, spec: CollectSpec) -> Collector:
        if spec.env.batched_on_device:
            return simulate_in_turn(factory, spec)
        return SerialCollector(Runner(factory, range(self.num_envs)), spec.batch.steps)

    def __post_init__(self) -> None:
        if self.num_envs < 1:
            raise UsageError(f"--num-envs must be positive, not {self.num_envs}")

    def place(self, make: MakeEnv, lanes: range) -> Env:
        """An Env of these lanes in this process."""
        return make(lanes)


_SUMMARY = "all environments in one process, acting and learning in turn"
MODE = Mode(name="sequential", config=SequentialConfig, summary=_SUMMARY)
