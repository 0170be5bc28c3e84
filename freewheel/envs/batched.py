"""Simulators that step all lanes as one batch on a device: Isaac Lab, and simulators with its interface."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import gymnasium

from freewheel.envs.family import EnvConfig, FamilyFlags, Rendering, WorldFamily
from freewheel.envs.gym import GymConfig
from freewheel.envs.lane import raised
from freewheel.errors import POSITIVE, FreewheelError, SetupError, UsageError, check_ranges, nearest
from freewheel.registry import names_code, own_module
from freewheel.rollout.factory import Timeouts

if TYPE_CHECKING:
    from freewheel.envs.device import DeviceEnv

ANY, ISAAC = "torch:", "isaaclab:"
MISSING = "needs Isaac Lab, which is not installed: pip install isaaclab==3.0.0 in Python 3.12 (see docs/envs.md)"
NO_SIM = "runs in Isaac Sim, which is not installed: pip install isaacsim[all], or choose a task with Newton's physics"
#: Default options of the families in this file: one simulation of many lanes.
DEFAULTS: Mapping[str, Any] = {"num_envs": 64, "workers": 1, "device": "auto"}
#: The runtime of Isaac Lab lives as long as the process: Kit can be started only once, and closing it ends the process.
_RUNTIME = ExitStack()


@dataclass(frozen=True, kw_only=True)
class SimulatorOptions:
    """Options of the simulator."""

    action_bounds: Annotated[float | None, POSITIVE] = None
    """Range ± of actions that the simulator does not bound; SAC and MBPO need bounds."""
    clip_actions: Annotated[float | None, POSITIVE] = None
    """Clip actions that the simulator does not bound to ± this; the policy itself stays unbounded."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.clip_actions is not None and self.action_bounds is not None:
            raise UsageError("use --clip-actions or --action-bounds, not both: bounded actions are clipped anyway")


@dataclass(frozen=True, kw_only=True)
class IsaacOptions(SimulatorOptions):
    """Options of the Isaac Lab task."""

    headless: bool = True
    """Open no window."""


@dataclass(frozen=True, kw_only=True)
class Simulator(SimulatorOptions, ABC):
    """One simulation of all lanes on a device."""

    device: str = "cpu"

    on_device: ClassVar[bool] = True
    batched: ClassVar[bool] = True
    episode_limit: ClassVar[int | None] = None
    timeouts: ClassVar[Timeouts] = Timeouts()  # never used: the simulation runs in the trainer's process
    modules: ClassVar[tuple[str, ...]] = ()

    @property
    def label(self) -> str:
        return self.name

    def to(self, device: str) -> Self:
        return replace(self, device=device)

    @property
    @abstractmethod
    def name(self) -> str: ...
    @abstractmethod
    def _open(self, lanes: range, render_mode: str | None) -> DeviceEnv: ...

    def make(
        self, lanes: range, *, processes: bool = False, fault_tolerant: bool = False, render_mode: str | None = None
    ) -> DeviceEnv:
        """Build an Env of these lanes in one simulation. It raises every failure: it cannot reset only one lane."""
        if processes:
            raise SetupError(f"{self.name} is one simulation: its lanes cannot run in separate processes")
        from freewheel.rollout.graphs import current

        with current(self.device):
            return self._open(lanes, render_mode)


@dataclass(frozen=True)
class BatchedConfig(Simulator):
    """A registered simulator, or torch:ID or torch:package.module:Factory for one of yours."""

    id: str
    args: Mapping[str, Any] = field(default_factory=dict)  # arguments of the simulator; num_envs and device are added

    main_thread: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return self.id

    def _open(self, lanes: range, render_mode: str | None) -> DeviceEnv:
        from freewheel.envs.device import DeviceEnv

        world = self._gym(len(lanes)).open(lanes.start, render_mode)
        return DeviceEnv(world, self.name, self.action_bounds, self.clip_actions)

    def rendering(self) -> Rendering:
        """Return how the simulator can be shown."""
        return self._gym(1).rendering()

    def _gym(self, lanes: int) -> GymConfig:
        args = {**self.args, "num_envs": lanes, "device": self.device}
        return GymConfig(id=self.id.removeprefix(ANY), args=args)


@dataclass(frozen=True)
class IsaacConfig(IsaacOptions, Simulator):
    """An Isaac Lab task, imported only when it is built; its lanes are the task's num_envs."""

    task: str = ""  # registered (Isaac-Ant-Direct), or package.module:Task if that module registers it
    _: KW_ONLY
    device: str = "cuda:0"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.id:
            raise UsageError("no task given: name one of Isaac Lab's, such as isaaclab:Isaac-Cartpole-Direct")

    @property
    def id(self) -> str:
        return self.task.removeprefix(ISAAC)

    @property
    def name(self) -> str:
        return ISAAC + self.id

    @property
    def args(self) -> Mapping[str, Any]:
        """Empty, because a task is configured by its own file."""
        return {}

    @property
    def main_thread(self) -> bool:
        """Return whether Isaac Sim is installed: its app can only run in the main thread."""
        return importlib.util.find_spec("isaacsim") is not None

    def rendering(self) -> Rendering:
        """Return no render modes, because Isaac Lab shows its tasks in its own window."""
        return Rendering()

    def _open(self, lanes: range, render_mode: str | None) -> DeviceEnv:
        with self._explaining():
            from freewheel.envs.device import DeviceEnv

            self._start_app()
            if importlib.import_module("isaaclab.sim").SimulationContext.instance() is not None:
                other = "another Isaac Lab simulation is open in this process"
                raise SetupError(f"{self.name} cannot be made: {other}; close it first")
            settings = self._settings(len(lanes))
            self._start_runtime(settings)
            with ExitStack() as undo:
                world = gymnasium.make(self.id, cfg=settings, render_mode=render_mode, disable_env_checker=True)
                undo.callback(world.close)
                env = DeviceEnv(world, self.name, self.action_bounds, self.clip_actions, one_per_process=True)
                undo.pop_all()
            return env

    def _start_app(self) -> None:
        """Start the app of Isaac Sim for Isaac Lab 2, before anything else of Isaac Lab is imported."""
        app = importlib.import_module("isaaclab.app")
        if not hasattr(app, "launch_simulation") and "omni.kit.app" not in sys.modules:
            _RUNTIME.callback(app.AppLauncher(headless=self.headless, device=self.device).app.close)

    def _settings(self, lanes: int) -> Any:
        """Return the settings of the task, changed where we need other values."""
        importlib.import_module("isaaclab_tasks")
        module, _, task = self.id.rpartition(":")
        if module:
            own_module(module)
        tasks = [key for key, spec in gymnasium.registry.items() if "env_cfg_entry_point" in spec.kwargs]
        if task not in tasks:
            raise SetupError(f"Isaac Lab has no task '{task}'{nearest(task, tasks, '; isaaclab list_envs shows all')}")
        parse = importlib.import_module("isaaclab_tasks.utils").parse_env_cfg
        settings = parse(task, device=self.device, num_envs=lanes)
        settings.seed = 0  # for random numbers drawn during construction; every reset gets another seed
        if hasattr(settings, "compute_final_obs"):
            settings.compute_final_obs = True
        return settings

    def _start_runtime(self, settings: Any) -> None:
        """Let Isaac Lab 3 start the app of Isaac Sim if the task needs it."""
        app = importlib.import_module("isaaclab.app")
        if hasattr(app, "launch_simulation"):
            window = [] if self.headless else ["kit" if self.main_thread else "newton_gl"]
            _RUNTIME.enter_context(app.launch_simulation(settings, {"device": self.device, "visualizer": window}))

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Turn every failure into a FreewheelError."""
        try:
            yield
        except FreewheelError:
            raise
        except SystemExit as error:
            raise SetupError(f"{self.name} cannot start Isaac Sim: {error}") from error
        except Exception as error:
            raise self._explained(error) from error

    def _explained(self, error: BaseException) -> FreewheelError:
        while "raised from the environment creator" in str(error) and error.__cause__:
            error = error.__cause__  # Gymnasium's error repeats all settings and does not name the missing module
        if isinstance(error, ModuleNotFoundError):
            missing = (error.name or "").partition(".")[0]
            if missing in ("isaaclab", "isaaclab_tasks"):
                return SetupError(f"{self.name} {MISSING}")
            if missing in ("carb", "omni", "isaacsim"):
                return SetupError(f"{self.name} {NO_SIM}")
            return SetupError(f"{self.name} cannot be imported ({error}): install it or set PYTHONPATH")
        if "main thread" in str(error):
            return SetupError(f"{self.name} starts Isaac Sim, which needs the main thread: {error}")
        return raised(self.name, error, "in its constructor")


def build(name: str, args: Mapping[str, Any], options: Any, device: str) -> EnvConfig:
    """Build the config of this simulator."""
    return BatchedConfig(name, args, device=device, **vars(options))


def is_isaac_task(name: str) -> bool:
    """Return whether this names a task of Isaac Lab, with or without the prefix isaaclab:."""
    return name.startswith(ISAAC) or (name.startswith("Isaac-") and name not in gymnasium.registry)


def has_isaaclab() -> bool:
    return importlib.util.find_spec("isaaclab") is not None


def _with_prefix(name: str) -> tuple[str, str] | None:
    bare = is_isaac_task(name) and not name.startswith(ISAAC) and has_isaaclab()
    return (ISAAC + name, f"{name} is a task of Isaac Lab") if bare else None


def _build_task(name: str, args: Mapping[str, Any], options: Any, device: str) -> EnvConfig:
    if not name.startswith(ISAAC):
        raise UsageError(f"{name} is a task of Isaac Lab: write {ISAAC}{name}")
    if args:
        raise UsageError(f"{name} does not accept --env.{next(iter(args))}: change the configuration of the task")
    return IsaacConfig(name, device=device, **vars(options))


FAMILY = (
    WorldFamily(
        name="batched",
        serves=lambda name: name.startswith(ANY),
        options=SimulatorOptions,
        build=build,
        names_code=lambda name: names_code(name.removeprefix(ANY)),
        flags=FamilyFlags(
            defaults=DEFAULTS, env_help="torch:ID or torch:package.module:Factory for a batched simulator"
        ),
    ),
    WorldFamily(
        name="isaaclab",
        serves=is_isaac_task,
        options=IsaacOptions,
        build=_build_task,
        names_code=lambda name: names_code(name.removeprefix(ISAAC)),
        packages={
            "isaaclab": f"Isaac Lab's tasks ({ISAAC}TASK): pip install isaaclab==3.0.0 in Python 3.12, docs/envs.md"
        },
        flags=FamilyFlags(defaults=DEFAULTS, env_help="isaaclab:TASK for a task of Isaac Lab"),
        stand_in=_with_prefix,
    ),
)
