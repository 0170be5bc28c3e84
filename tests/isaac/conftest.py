"""Tests against the real Isaac Lab, for `make test-isaac`; elsewhere they are skipped."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from freewheel.envs.batched import IsaacConfig
from freewheel.envs.device import DeviceEnv

LANES = 32
HOVER = IsaacConfig("isaaclab:tests.isaac.hover_task:Local-Hover-Direct", device="cpu", action_bounds=1.0)


@pytest.fixture(scope="session", autouse=True)
def isaac_is_here() -> None:
    if importlib.util.find_spec("isaaclab") is None:
        pytest.skip("Isaac Lab is not installed: make test-isaac")


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> None:
    """Isaac Lab keeps threads and files as long as the process lives."""


@pytest.fixture
def hover() -> Iterator[DeviceEnv]:
    """A simulation of this test's own; the first in a process takes a minute, for kernels to be compiled."""
    env = HOVER.make(range(LANES))
    yield env
    env.close()
