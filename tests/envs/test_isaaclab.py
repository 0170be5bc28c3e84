"""IsaacConfig against a stand-in for Isaac Lab: what it imports, sets and refuses. tests/isaac has the real one."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium
import pytest
import torch

from freewheel.envs.batched import MISSING, IsaacConfig
from freewheel.errors import EnvError, SetupError, UsageError
from freewheel.seeding import training_episodes
from tests.support.isaac_like import IsaacLike, Traps

TASK = "Stand-In-Direct"
CONFIG = IsaacConfig(TASK, device="cpu")


class Settings(SimpleNamespace):
    """A task's own settings, of a version that can give final observations."""

    def __init__(self) -> None:
        scene, sim = SimpleNamespace(num_envs=4096), SimpleNamespace(device="cuda:0")
        super().__init__(scene=scene, sim=sim, seed=None, compute_final_obs=False)


@dataclass
class StandIn:
    """Isaac Lab, as far as IsaacConfig knows it."""

    living: list[Any] = field(default_factory=list)
    launched: list[dict[str, Any]] = field(default_factory=list)
    settings: Any = field(default_factory=Settings)
    traps: Traps = field(default_factory=Traps)
    fail: Callable[[], None] = lambda: None

    def parse_env_cfg(self, task: str, device: str, num_envs: int) -> Any:
        assert task == TASK
        self.settings.sim.device, self.settings.scene.num_envs = device, num_envs
        return self.settings

    def launch_simulation(self, settings: Any, arguments: dict[str, Any]) -> AbstractContextManager[None]:
        self.launched.append(arguments)
        return nullcontext()

    def app_launcher(self, **arguments: Any) -> Any:
        self.launched.append(arguments)
        sys.modules["omni.kit.app"] = ModuleType("omni.kit.app")
        return SimpleNamespace(app=SimpleNamespace(close=lambda: None))

    def build(self, **arguments: Any) -> IsaacLike:
        self.fail()
        stand_in, cfg = self, arguments["cfg"]

        class World(IsaacLike):
            def close(self) -> None:
                stand_in.living.clear()

        world = World(cfg.scene.num_envs, replace(self.traps, has_final_obs=hasattr(cfg, "compute_final_obs")))
        world.cfg = cfg
        self.living.append(world)
        return world


@pytest.fixture
def isaac(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn()
    context = SimpleNamespace(instance=lambda: stand_in.living[0] if stand_in.living else None)
    modules: dict[str, dict[str, Any]] = {
        "isaaclab": {},
        "isaaclab.app": {"launch_simulation": stand_in.launch_simulation, "AppLauncher": stand_in.app_launcher},
        "isaaclab.sim": {"SimulationContext": context},
        "isaaclab_tasks": {},
        "isaaclab_tasks.utils": {"parse_env_cfg": stand_in.parse_env_cfg},
        "omni.kit.app": {},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    del sys.modules["omni.kit.app"]  # put back to what it was, which is nothing, when the test is over
    gymnasium.register(TASK, stand_in.build, disable_env_checker=True, kwargs={"env_cfg_entry_point": "cfg"})
    yield stand_in
    del gymnasium.registry[TASK]


def test_a_task_gets_our_settings_and_becomes_an_env(isaac: StandIn) -> None:
    env = CONFIG.make(range(4, 7), fault_tolerant=True)
    settings = isaac.settings
    assert (settings.scene.num_envs, settings.sim.device, settings.seed) == (3, "cpu", 0)
    assert settings.compute_final_obs
    spec = env.spec
    assert (spec.name, spec.lanes, spec.one_per_process, spec.has_final_obs) == (f"isaaclab:{TASK}", 3, True, True)
    assert isaac.launched == [{"device": "cpu", "visualizer": []}]
    env.reset([training_episodes(1, lane) for lane in range(3)])
    assert env.step(torch.zeros(3, 1)).reward.shape == (3,)
    env.close()
    del settings.compute_final_obs  # as in a version without it
    assert not CONFIG.make(range(2)).spec.has_final_obs


def test_bounds_reach_the_adapter(isaac: StandIn) -> None:
    env = IsaacConfig(TASK, device="cpu", action_bounds=2.0).make(range(1))
    assert env.spec.action.high == (1.0,)
    env.reset([training_episodes(1, 0)])
    env.step(torch.ones(1, 1))
    assert isaac.living[0].journal.actions[-1].item() == 2.0
    env.close()
    env = IsaacConfig(TASK, device="cpu", clip_actions=0.5).make(range(1))
    assert env.spec.action.high == (float("inf"),)
    env.step(torch.ones(1, 1))
    assert isaac.living[0].journal.actions[-1].item() == 0.5


def test_only_one_lives_in_a_process_until_it_is_closed(isaac: StandIn) -> None:
    env = CONFIG.make(range(1))
    with pytest.raises(SetupError, match=f"isaaclab:{TASK} cannot be made: another Isaac Lab simulation is open"):
        CONFIG.make(range(1))
    env.close()
    CONFIG.make(range(1)).close()


def test_one_that_cannot_be_read_is_closed_again(isaac: StandIn) -> None:
    isaac.traps = Traps(policy_group="eyes")
    with pytest.raises(SetupError, match="one group must be named policy"):
        CONFIG.make(range(1))
    assert not isaac.living


def test_isaac_lab_2_has_its_app_started_once(isaac: StandIn) -> None:
    del vars(sys.modules["isaaclab.app"])["launch_simulation"]
    for _ in range(2):
        CONFIG.make(range(1)).close()
    assert isaac.launched == [{"headless": True, "device": "cpu"}]


def test_a_window_is_asked_for_and_a_task_may_name_the_module_that_registers_it(isaac: StandIn) -> None:
    config = IsaacConfig(f"isaaclab:tests.support.isaac_like:{TASK}", device="cpu", headless=False)
    assert config.make(range(1)).spec.lanes == 1
    assert isaac.launched == [{"device": "cpu", "visualizer": ["newton_gl"]}]


def test_without_isaac_lab_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("isaaclab", "isaaclab.app"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SetupError) as caught:
        CONFIG.make(range(1))
    assert str(caught.value) == f"isaaclab:{TASK} {MISSING}"


def failing(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ModuleNotFoundError("No module named 'carb'", name="carb"), "runs in Isaac Sim, which is not installed"),
        (ModuleNotFoundError("No module named 'x'", name="x"), r"cannot be imported \(No module named 'x'\): install"),
        (ValueError("signal only works in main thread"), "needs the main thread"),
        (SystemExit("no runtime"), "cannot start Isaac Sim: no runtime"),
    ],
)
def test_what_the_machine_lacks_is_a_setup_error(isaac: StandIn, error: BaseException, text: str) -> None:
    isaac.fail = failing(error)
    with pytest.raises(SetupError, match=f"^isaaclab:{TASK} .*{text}"):
        CONFIG.make(range(1))


def test_the_tasks_own_error_is_told_without_its_settings(isaac: StandIn) -> None:
    isaac.fail = failing(FileNotFoundError("ant.usd"))
    with pytest.raises(EnvError) as caught:
        CONFIG.make(range(1))
    first = str(caught.value).splitlines()[0]
    assert first == f"isaaclab:{TASK} raised FileNotFoundError: ant.usd (in its constructor)"


def test_a_misspelt_task_is_guessed_and_a_process_a_lane_cannot_be_had(isaac: StandIn) -> None:
    with pytest.raises(SetupError, match=r"Isaac Lab has no task 'Stand-In-Dirct'; did you mean 'Stand-In-Direct'\?"):
        IsaacConfig("Stand-In-Dirct", device="cpu").make(range(1))
    with pytest.raises(SetupError, match="is one simulation"):
        CONFIG.make(range(2), processes=True)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"task": "isaaclab:"}, "no task given"),
        ({"clip_actions": 1.0, "action_bounds": 1.0}, "not both"),
        ({"clip_actions": 0.0}, "must be positive"),
        ({"action_bounds": -1.0}, "must be positive"),
        ({"action_bounds": float("nan")}, "must be positive"),
    ],
)
def test_wrong_settings_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        IsaacConfig(**{"task": TASK, **fields})


def test_names_and_travel() -> None:
    config = IsaacConfig(f"isaaclab:{TASK}")
    assert (config.id, config.name) == (TASK, f"isaaclab:{TASK}")
    assert IsaacConfig(TASK).name == config.name
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301
    assert config.main_thread is False
