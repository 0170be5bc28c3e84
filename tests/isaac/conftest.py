"""Tests against the real Isaac Lab, for `make test-isaac`; elsewhere they are skipped."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

from freewheel.envs.batched import IsaacConfig
from freewheel.envs.device import DeviceEnv
from tests.isaac.assets import ROOT, write_assets

LANES = 32
HOVER = IsaacConfig("isaaclab:tests.isaac.hover_task:Local-Hover-Direct", device="cpu", action_bounds=1.0)
CARTPOLE = IsaacConfig("isaaclab:Isaac-Cartpole-Direct", device="cpu", action_bounds=1.0)


@pytest.fixture(scope="session", autouse=True)
def isaac_is_here(tmp_path_factory: pytest.TempPathFactory) -> None:
    if importlib.util.find_spec("isaaclab") is None:
        pytest.skip("Isaac Lab is not installed: make test-isaac")
    if ROOT not in os.environ:  # read once, when Isaac Lab is imported
        os.environ[ROOT] = str(write_assets(tmp_path_factory.mktemp("assets")))


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> None:
    """Isaac Lab keeps threads and files as long as the process lives."""


@pytest.fixture
def hover() -> Iterator[DeviceEnv]:
    """A simulation of this test's own; the first in a process takes a minute, for kernels to be compiled."""
    env = HOVER.make(range(LANES))
    yield env
    env.close()


@pytest.fixture
def cartpole() -> Iterator[DeviceEnv]:
    """Isaac Lab's own task, unchanged."""
    env = CARTPOLE.make(range(LANES))
    yield env
    env.close()
