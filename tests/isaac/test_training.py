"""Training on the real Isaac Lab: a few hundred steps in each mode that overlaps, evaluated on reserved lanes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import freewheel
from tests.isaac.conftest import HOVER

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600), pytest.mark.long]

ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {"num_steps_per_env": 8, "ppo": {"epochs": 2, "minibatch": 64}},
    "sac": {"action_bounds": 1.0, "sac": {"learning_starts": 400, "updates_per_row": 0.05, "batch": 64}},
}


@pytest.mark.parametrize(("algo", "mode"), [("ppo", "batch"), ("sac", "continuous")])
def test_trains_and_accounts_for_every_row(algo: str, mode: str, tmp_path: Path) -> None:
    """200 steps of 16 lanes."""
    result = freewheel.train(
        HOVER.name, options={"algo": algo, "mode": mode}, num_envs=16, steps=3200, evals=1, eval_episodes=2, device="cpu", seed=1,
        runs_dir=str(tmp_path), quiet=True, **ALGORITHMS[algo],
    )  # fmt: skip
    summary = result.summary
    assert summary["exit_code"] == 0
    assert summary["trained"] >= 3200
    assert summary["updates"] > 0
    assert summary["produced"] == summary["trained"] + sum(summary["dropped"].values())
    assert summary["final_eval"] is not None, "reserved lanes finished no episode"
    assert algo == "sac" or summary["lag_max"] == 1
