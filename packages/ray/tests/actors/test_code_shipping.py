"""An environment on another node: the user's files are sent along, and missing packages are named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from freewheel.errors import SetupError
from freewheel_ray.actors import code_shipping
from tests.support.runs import python

SIM = """
import gymnasium
import helper
class Shop(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9, 9, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return helper.observation(), {}
    def step(self, action):
        return helper.observation(), helper.REWARD, False, False, {}
"""
HELPER = """
import numpy
REWARD = 7.0
def observation():
    return numpy.ones(2, numpy.float32)
"""
UNPACK = """
import sys, cloudpickle
from freewheel_ray.actors import code_shipping
config = code_shipping.unpacked(open(sys.argv[1], "rb").read())
env = config.open(0)
env.reset(seed=1)
print(config.name.rpartition("/")[2], env.step(0)[1])
"""


def moved(folder: Path, program: str) -> str:
    """Return what another process prints about the config that `program` packs, after the user's files are gone."""
    here, there = folder / "here", folder / "there"
    here.mkdir()
    there.mkdir()
    (here / "sim.py").write_text(SIM)
    (here / "helper.py").write_text(HELPER)
    (here / "main.py").write_text(program)
    python(str(here / "main.py"), str(folder / "blob"), cwd=here)
    for file in list(here.iterdir()):
        file.rename(folder / f"gone-{file.name}")
    return python("-c", UNPACK, str(folder / "blob"), cwd=there).stdout.strip()


PACK = """
import sys
from freewheel.envs.gym import GymConfig
from freewheel_ray.actors import code_shipping
{}
open(sys.argv[1], "wb").write(code_shipping.packed(config, "the environment", config.modules))
"""


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("config = GymConfig('sim.py:Shop')", "sim.py:Shop 7.0"),
        ("import gymnasium; gymnasium.register('Shop-v0', 'sim:Shop'); config = GymConfig('Shop-v0')", "Shop-v0 7.0"),
        ("import sim\nclass Mine(sim.Shop):\n    pass\nconfig = GymConfig(factory=Mine)", "Mine 7.0"),
    ],
    ids=["of a file", "registered", "of the script itself"],
)
def test_an_environment_comes_with_its_file_and_those_that_it_imports(tmp_path: Path, program: str, found: str) -> None:
    assert moved(tmp_path, PACK.format(program)) == found


def test_a_module_that_cannot_be_pickled_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locked_module.py").write_text(
        "import threading\nLOCK = threading.Lock()\ndef call():\n    return LOCK\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import locked_module  # type: ignore[import-not-found]

    try:
        assert code_shipping.is_own_file(locked_module)
        blob = code_shipping.packed(locked_module.call, "it", ["locked_module"])
        assert code_shipping.unpacked(blob) is locked_module.call
    finally:
        del sys.modules["locked_module"]


def test_what_is_installed_is_not_sent() -> None:
    import json

    import gymnasium
    import psutil

    assert not any(
        map(code_shipping.is_own_file, (json, gymnasium, psutil, code_shipping, sys, sys.modules["__main__"]))
    )


def test_a_package_that_a_node_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "shop_package"
    package.mkdir()
    (package / "__init__.py").write_text("def make():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import shop_package  # type: ignore[import-not-found]

    blob = code_shipping.packed(shop_package.make, "it", ["shop_package"])
    del sys.modules["shop_package"]
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(tmp_path)])
    with pytest.raises(
        SetupError, match=r"^the node \S+ \(.*\) has no module 'shop_package'; install shop_package on every node"
    ):
        code_shipping.unpacked(blob)
