"""Batched simulators by name: worlds whose lanes are one simulation on a device, with Isaac Lab's contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from freewheel.envs.gym import GymConfig
from freewheel.errors import SetupError, UsageError

if TYPE_CHECKING:
    from freewheel.envs.device import DeviceEnv

PREFIX = "torch:"


@dataclass(frozen=True)
class BatchedConfig:
    """A simulator of ours (freewheel/RoughDrone-v0), or torch:ID or torch:package.module:Factory for one of yours."""

    id: str
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for the simulator; num_envs and device are added to them."""
    device: str = "cpu"
    """Where it runs."""
    action_bounds: float | None = None
    """Actions that it does not bound have the range ± this, for algorithms that need one."""
    clip_actions: float | None = None
    """Actions that it does not bound are clipped to ± this on their way into it."""

    def __post_init__(self) -> None:
        if self.clip_actions is not None and self.action_bounds is not None:
            raise UsageError(
                "--clip-actions and --action-bounds exclude each other: bounded actions are clipped anyway"
            )

    @property
    def name(self) -> str:
        return self.id

    def make(
        self, lanes: range, *, processes: bool = False, fault_tolerant: bool = False, render_mode: str | None = None
    ) -> DeviceEnv:
        """An Env of these lanes, all in one simulation."""
        from freewheel.envs.device import DeviceEnv

        if processes:
            raise SetupError(f"{self.name} is one simulation: it cannot have a process for every lane")
        world = self._gym(len(lanes)).open(lanes.start, render_mode)
        return DeviceEnv(world, self.name, self.action_bounds, self.clip_actions)

    def render_modes(self) -> list[str]:
        """How it can be shown."""
        return self._gym(1).render_modes()

    def _gym(self, lanes: int) -> GymConfig:
        args = {**self.args, "num_envs": lanes, "device": self.device}
        return GymConfig(id=self.id.removeprefix(PREFIX), args=args)
