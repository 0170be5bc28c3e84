"""R17: the current folder is searched for the typed module and what it imports, not for what a file names or a package wants."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.places import ROOT
from tests.support.runs import train

pytestmark = pytest.mark.system

TRAP = "import os\nwith open(os.environ['CANARY'], 'a') as file:\n    file.write(__name__ + '\\n')\nraise ImportError(__name__)\n"
#: Packages that an environment, a sink, a picture or a command may look for, installed or not.
PACKAGES = (
    "CybORG", "PIL", "aim", "cloudpickle", "comet_ml", "csle_cyborg", "cupy", "cyborg", "flax", "gym", "gymnasium", "h11",
    "httptools", "imageio", "imageio_ffmpeg", "isaaclab", "isaaclab_tasks", "isaacsim", "jax", "jaxlib", "matplotlib", "mlflow",
    "moviepy", "mujoco", "mujoco_py", "neptune", "numpy", "omni", "onnx", "psutil", "pygame", "ray", "rich", "safetensors",
    "scipy", "shimmy", "sitecustomize", "sklearn", "starlette", "tensorboard", "tensorboardX", "threadpoolctl", "toy_text",
    "torch", "triton", "tyro", "usercustomize", "uvicorn", "uvloop", "wandb", "websockets",
)  # fmt: skip
LIBRARY = sorted(name for name in sys.stdlib_module_names if not name.startswith("_"))
RUN: dict[str, Any] = {"steps": 64, "evals": 0, "mode": "sequential", "num_envs": 1, "policy": {"hidden": [8]}}


@pytest.fixture
def received(tmp_path: Path) -> Path:
    """A folder of somebody else's: runs, and modules whose import would be noticed."""
    here = tmp_path / "received"
    here.mkdir()
    for name in (*PACKAGES, *LIBRARY):
        (here / f"{name}.py").write_text(TRAP)
    plugin = here / "plugin-1.0.dist-info"
    plugin.mkdir()
    groups = ("commands", "worlds", "sinks", "modes", "heads", "algorithms")
    points = [f"[freewheel.{group}]\nevil = evil:THING\n" for group in groups]
    (plugin / "entry_points.txt").write_text("".join(points) + "[gymnasium.envs]\nevil = evil:THING\n")
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (here / "evil.py").write_text(TRAP)
    return here


def outcome(here: Path, words: str, *, module: bool = False, **variables: str) -> tuple[int, str, list[str]]:
    """Exit code, what it said, and the modules of the folder that were run."""
    canary = here.parent / "canary"
    start = [sys.executable, "-m", "freewheel"] if module else [str(Path(sys.executable).with_name("freewheel"))]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CANARY": str(canary), **variables}
    command = [*start, *words.split()]
    done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, timeout=60, check=False)
    ran = sorted(set(canary.read_text().split())) if canary.exists() else []
    canary.unlink(missing_ok=True)
    return done.returncode, done.stdout + done.stderr, ran


def put_run(here: Path, changes: Mapping[str, Any]) -> None:
    """A run called got, as somebody else might have made it."""
    path = train(here, "CartPole-v1", run="got", **RUN).path
    config = json.loads((path / "config.json").read_text())
    config = {name: value for name, value in config.items() if name not in ("sha256", "origin")}
    (path / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("words", "env", "mode", "module"),
    [
        ("eval got --episodes 1 --runs-dir .", "phys2d/CartPole-v1", "continuous", False),
        ("eval got --episodes 1 --runs-dir .", "isaaclab:Isaac-Cartpole", "lockstep", False),
        ("eval got --episodes 1 --runs-dir .", "phys2d/CartPole-v1", "lockstep", True),
        ("play got --episodes 1 --render gif --runs-dir .", "CartPole-v1", "lockstep", False),
        ("resume got --steps 128 --runs-dir .", "CartPole-v1", "continuous", False),
        ("resume got --steps 128 --runs-dir .", "CartPole-v1", "continuous", True),
        ("export got --runs-dir .", "CartPole-v1", "lockstep", False),
        ("check phys2d/CartPole-v1", "", "", False),
        ("check isaaclab:Isaac-Cartpole", "", "", True),
        ("train --config c.json", "phys2d/CartPole-v1", "lockstep", False),
        ("train CartPole-v1 --steps 64 --evals 0 --seeds 1..1", "", "", False),
        ("watch --port 0 nothing", "", "", False),
        ("doctor", "", "", True),
        ("runs .", "CartPole-v1", "lockstep", False),
    ],
)
def test_runs_of_others_take_nothing_from_there(words: str, env: str, mode: str, module: bool, received: Path) -> None:
    for name in LIBRARY if module else ():  # Python itself reads some of these for -m, before anything of ours
        (received / f"{name}.py").unlink()
    if env:
        put_run(received, {"env": env, "mode": mode})
        (received / "c.json").write_text(json.dumps({"env": env, "steps": 64, "evals": 0, "mode": mode}))
    _, said, ran = outcome(received, words, module=module, WANDB_MODE="offline")
    assert ran == [], said
    assert "Traceback" not in said


WORLD = """
import gymnasium, helpers, named.deep

class World(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return helpers.zero(), {}

    def step(self, action):
        import late
        return 0, late.REWARD, True, False, {}

gymnasium.register("Sibling-v0", entry_point="sibling:Sibling")
"""
FILES = {
    "world.py": WORLD,
    "helpers.py": "def zero():\n    return 0\n",
    "named/deep.py": "",
    "late.py": "REWARD = 1.0\n",
    "sibling.py": "from world import World as Sibling\n",
    "pack/__init__.py": "import world\n",
    "pack/inner.py": "from world import World\n",
    "listener.py": "import helpers\nclass Hook:\n    def on_start(self, run):\n        import late\n",
    "nets.py": "import helpers\nfrom tests.support.custom_module import Shared\n",
}


@pytest.fixture
def mine(received: Path) -> Path:
    """The folder, with modules of the user's own in it."""
    for name, text in FILES.items():
        (received / name).parent.mkdir(exist_ok=True)
        (received / name).write_text(text)
    return received


@pytest.mark.parametrize(
    "words",
    [
        "./world.py:World --mode continuous --workers 1",
        "world:World --mode lockstep --placement processes --sinks wandb",
        "pack.inner:World --mode continuous --workers 1 --hooks listener:Hook",
        "world:Sibling-v0 --mode lockstep --placement processes --policy.module nets:Shared",
        "CartPole-v1 --mode lockstep --hooks ./listener.py:Hook",
    ],
)
@pytest.mark.parametrize("module", [False, True], ids=["freewheel", "python -m"])
def test_a_typed_module_is_found_with_what_it_imports_and_nothing_else_is(words: str, module: bool, mine: Path) -> None:
    for name in LIBRARY if module else ():
        (mine / f"{name}.py").unlink()
    few = "--num-envs 1 --steps 64 --evals 0 --run one"
    for command in (f"train {words} {few}", "eval one --episodes 1 --which latest"):
        code, said, ran = outcome(mine, command, module=module, WANDB_MODE="offline")
        assert (code, ran) == (0, []), said
