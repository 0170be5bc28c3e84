"""Simulators that step all their lanes as one batch on a device, with the interface of Isaac Lab's environments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from freewheel.envs.family import EnvConfig, FamilyFlags, WorldFamily
from freewheel.envs.gym import GymConfig
from freewheel.errors import SetupError, UsageError, require_positive
from freewheel.rollout.factory import Timeouts

if TYPE_CHECKING:
    from freewheel.envs.device import DeviceEnv

PREFIX = "torch:"
#: What is usual for one simulation of many lanes.
DEFAULTS: Mapping[str, Any] = {"num_envs": 64, "workers": 1, "device": "auto"}


@dataclass(frozen=True, kw_only=True)
class SimulatorOptions:
    """Options of the simulator."""

    action_bounds: float | None = None
    """Range ± of actions that the simulator does not bound; SAC and MBPO need bounds."""
    clip_actions: float | None = None
    """Clip actions that the simulator does not bound to ± this; the policy itself stays unbounded."""

    def __post_init__(self) -> None:
        require_positive(action_bounds=self.action_bounds, clip_actions=self.clip_actions)
        if self.clip_actions is not None and self.action_bounds is not None:
            raise UsageError("use --clip-actions or --action-bounds, not both: bounded actions are clipped anyway")


class Simulator:
    """What the configs of all simulators on a device have in common."""

    on_device: ClassVar[bool] = True
    batched: ClassVar[bool] = True
    timeouts: ClassVar[Timeouts] = Timeouts()  # never used: it runs in the process of the trainer
    modules: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class BatchedConfig(SimulatorOptions, Simulator):
    """A registered simulator, or torch:ID or torch:package.module:Factory for one of yours."""

    id: str
    args: Mapping[str, Any] = field(default_factory=dict)  # of the simulator; num_envs and device are added to them
    _: KW_ONLY
    device: str = "cpu"

    main_thread: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return self.id

    def to(self, device: str) -> Self:
        return replace(self, device=device)

    def make(
        self, lanes: range, *, processes: bool = False, fault_tolerant: bool = False, render_mode: str | None = None
    ) -> DeviceEnv:
        """An Env of these lanes, all in one simulation."""
        from freewheel.envs.device import DeviceEnv

        if processes:
            raise SetupError(f"{self.name} is one simulation: its lanes cannot run in processes of their own")
        world = self._gym(len(lanes)).open(lanes.start, render_mode)
        return DeviceEnv(world, self.name, self.action_bounds, self.clip_actions)

    def render_modes(self) -> list[str]:
        """The render modes that the simulator offers."""
        return self._gym(1).render_modes()

    def _gym(self, lanes: int) -> GymConfig:
        args = {**self.args, "num_envs": lanes, "device": self.device}
        return GymConfig(id=self.id.removeprefix(PREFIX), args=args)


def build(name: str, args: Mapping[str, Any], options: Any, device: str) -> EnvConfig:
    """The simulator of this name."""
    return BatchedConfig(name, args, device=device, **vars(options))


FAMILY = WorldFamily(
    name="batched",
    serves=lambda name: name.startswith(PREFIX),
    options=SimulatorOptions,
    build=build,
    flags=FamilyFlags(
        defaults=DEFAULTS, env_help="torch:ID or torch:package.module:Factory for a simulator of batches of lanes"
    ),
)
