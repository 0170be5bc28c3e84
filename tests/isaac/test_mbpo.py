"""MBPO on the real Isaac Lab: its own Cartpole is learned, with and without functions of the task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import freewheel
from freewheel.envs.device import DeviceEnv
from freewheel.seeding import training_episodes
from tests.isaac import cartpole_task
from tests.isaac.conftest import CARTPOLE, LANES
from tests.support.places import LONG, ROOT

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600), pytest.mark.long]

GIVEN = {"reward": f"{cartpole_task.__name__}:reward", "termination": f"{cartpole_task.__name__}:termination"}


def test_functions_of_the_task_say_what_the_task_says(cartpole: DeviceEnv) -> None:
    """In every row, also the last of an episode: odd lanes push their cart over the edge, the others sway."""
    obs = cartpole.reset([training_episodes(1, 0)]).clone()
    generator = torch.Generator().manual_seed(1)
    ends = 0
    for _ in range(120):
        action = 2 * torch.rand(LANES, 1, generator=generator) - 1
        action[1::2] = 1.0
        step = cartpole.step(action)
        torch.testing.assert_close(cartpole_task.reward(obs, action, step.next_obs), step.reward, rtol=1e-4, atol=1e-6)
        assert torch.equal(cartpole_task.termination(obs, action, step.next_obs), step.terminated)
        ends += int(step.terminated.sum())
        obs = cartpole.autoreset().clone()
    assert ends >= LANES // 2


def test_the_page_shows_these_functions() -> None:
    shown = (ROOT / "docs" / "envs.md").read_text(encoding="utf-8")
    assert Path(cartpole_task.__file__).read_text(encoding="utf-8") in shown


@pytest.mark.parametrize("task", [{}, GIVEN] if LONG else [{}])
def test_the_return_rises(task: dict[str, Any], tmp_path: Path) -> None:
    """Greedy episodes of five seconds. Random actions earn -22; a pole that is upright all the time, 5."""
    result = freewheel.train(
        CARTPOLE.name, preset="isaac-cpu", options={"mbpo": task}, action_bounds=0.4, steps=4_800, evals=0, seed=1,
        runs_dir=str(tmp_path), quiet=True,
    )  # fmt: skip
    summary = result.summary
    assert summary["exit_code"] == 0
    assert summary["produced"] == summary["trained"] + sum(summary["dropped"].values())
    assert freewheel.score(result, episodes=16, which="latest").mean > -10
