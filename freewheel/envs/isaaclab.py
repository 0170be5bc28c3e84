"""Isaac Lab's tasks as worlds: nothing of Isaac is imported before one is made."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gymnasium

from freewheel.envs.lane import raised
from freewheel.errors import FreewheelError, SetupError, UsageError, nearest

if TYPE_CHECKING:
    from freewheel.envs.device import DeviceEnv

PREFIX = "isaaclab:"
MISSING = (
    "needs Isaac Lab, which is not installed: pip install isaaclab==3.0.0 under Python 3.12 (see docs/isaaclab.md)"
)
NO_SIM = "runs in Isaac Sim, which is not installed: pip install isaacsim[all], or choose a task with Newton's physics"

#: What a simulation runs in stays up as long as the process: Kit starts only once, and closing it ends the process.
_RUNTIME = ExitStack()


@dataclass(frozen=True)
class IsaacConfig:
    """One simulation of an Isaac Lab task; its lanes are the task's num_envs."""

    task: str = ""
    """A registered task (Isaac-Ant-Direct), or package.module:Task where that module registers it; isaaclab: may lead."""

    device: str = "cuda:0"
    """Where the simulation runs."""

    headless: bool = True
    """Show no window."""

    clip_actions: float | None = None
    """Actions that the task does not bound are clipped to ± this on their way into it; the policy stays unbounded."""

    action_bounds: float | None = None
    """Actions that the task does not bound have the range ± this, for algorithms that need one."""

    def __post_init__(self) -> None:
        if not self.id:
            raise UsageError("no task given: set task to one of Isaac Lab's, such as Isaac-Cartpole-Direct")
        if self.clip_actions is not None and self.action_bounds is not None:
            raise UsageError("clip_actions and action_bounds exclude each other: bounded actions are clipped anyway")
        if any(limit is not None and not limit > 0 for limit in (self.clip_actions, self.action_bounds)):
            raise UsageError("clip_actions and action_bounds are above 0, or None")

    @property
    def id(self) -> str:
        return self.task.removeprefix(PREFIX)

    @property
    def name(self) -> str:
        return PREFIX + self.id

    @property
    def args(self) -> Mapping[str, Any]:
        """None: a task has a configuration of its own."""
        return {}

    @property
    def main_thread(self) -> bool:
        """Isaac Sim's app is here, which starts in a process's main thread alone."""
        return importlib.util.find_spec("isaacsim") is not None

    def make(
        self, lanes: range, *, processes: bool = False, fault_tolerant: bool = False, render_mode: str | None = None
    ) -> DeviceEnv:
        """An Env of these lanes, all in one simulation: it cannot begin one lane anew, so all that goes wrong is raised."""
        if processes:
            raise SetupError(f"{self.name} is one simulation: it cannot have a process for every lane")
        with self._explaining():
            from freewheel.envs.device import DeviceEnv

            self._start_app()
            if importlib.import_module("isaaclab.sim").SimulationContext.instance() is not None:
                raise SetupError(
                    f"{self.name} cannot be made: another Isaac Lab simulation lives in this process; close it first"
                )
            settings = self._settings(len(lanes))
            self._start_runtime(settings)
            with ExitStack() as undo:
                world = gymnasium.make(self.id, cfg=settings, render_mode=render_mode, disable_env_checker=True)
                undo.callback(world.close)
                env = DeviceEnv(world, self.name, self.action_bounds, self.clip_actions, one_per_process=True)
                undo.pop_all()
            return env

    def render_modes(self) -> list[str]:
        """None: what there is to see is in Isaac Lab's own window."""
        return []

    def _start_app(self) -> None:
        """Isaac Lab 2 runs inside Isaac Sim's app, which has to be up before anything else of it is imported."""
        app = importlib.import_module("isaaclab.app")
        if not hasattr(app, "launch_simulation") and "omni.kit.app" not in sys.modules:
            _RUNTIME.callback(app.AppLauncher(headless=self.headless, device=self.device).app.close)

    def _settings(self, lanes: int) -> Any:
        """The task's own, with ours written over them."""
        importlib.import_module("isaaclab_tasks")
        module, _, task = self.id.rpartition(":")
        if module:
            importlib.import_module(module)
        tasks = [key for key, spec in gymnasium.registry.items() if "env_cfg_entry_point" in spec.kwargs]
        if task not in tasks:
            raise SetupError(f"Isaac Lab has no task '{task}'{nearest(task, tasks, '; isaaclab list_envs shows all')}")
        parse = importlib.import_module("isaaclab_tasks.utils").parse_env_cfg
        settings = parse(task, device=self.device, num_envs=lanes)
        settings.seed = 0  # for what is drawn while it is built; every reset seeds anew
        if hasattr(settings, "compute_final_obs"):
            settings.compute_final_obs = True
        return settings

    def _start_runtime(self, settings: Any) -> None:
        """Isaac Lab 3 starts what the task needs: Isaac Sim's app, or nothing."""
        app = importlib.import_module("isaaclab.app")
        if hasattr(app, "launch_simulation"):
            window = [] if self.headless else ["kit" if self.main_thread else "newton_gl"]
            _RUNTIME.enter_context(app.launch_simulation(settings, {"device": self.device, "visualizer": window}))

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """One line for what goes wrong."""
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
            error = (
                error.__cause__
            )  # Gymnasium's own would recite all settings, and has forgotten which module is missing
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
