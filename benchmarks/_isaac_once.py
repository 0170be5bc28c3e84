"""One training on Isaac Lab's own Cartpole on the CPU, or episodes of random actions; answers with one line of JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

from tests.isaac.assets import ROOT, write_assets

TASK, PRESET = "isaaclab:Isaac-Cartpole-Direct", "isaac-cpu"
GIVEN = {"reward": "tests.isaac.cartpole_task:reward", "termination": "tests.isaac.cartpole_task:termination"}
EPISODES, STEPS = 16, 300  # of an evaluation; of an episode, at most
BOUNDS = 0.4  # of actions: 40 N; with 100 N no pole stays upright while the policy explores


def options_for(arm: str) -> dict[str, Any]:
    """The preset; for SAC what it shares with MBPO: lanes, networks, batches, updates a row."""
    from freewheel.config.resolve import presets
    from freewheel.learn.sac.config import SACConfig

    options = dict(presets()[PRESET])
    mbpo = options.pop("mbpo")
    if arm == "sac":
        shared = {field.name for field in fields(SACConfig)}
        return {**options, "algo": "sac", "sac": {name: value for name, value in mbpo.items() if name in shared}}
    return {**options, "mbpo": {**mbpo, **(GIVEN if arm == "mbpo, task given" else {})}}


def train(order: dict[str, Any], folder: Path) -> dict[str, Any]:
    import freewheel

    options = {**options_for(order["arm"]), "action_bounds": BOUNDS}
    result = freewheel.train(
        TASK, options=options, steps=order["steps"], seed=order["seed"], evals=0, runs_dir=str(folder), quiet=True
    )
    # Lanes reserved for evaluation finish no episode within so few steps, unless they lose it: episodes are played afterwards.
    score = freewheel.score(result, episodes=EPISODES, which="latest")
    summary = result.summary
    rows = [json.loads(line) for line in (result.path / "metrics.jsonl").read_text().splitlines()]
    errors = [row["model/error_5"] for row in rows if row.get("model/error_5") is not None]
    return {
        "final_eval": score.mean, "returns": list(score.returns), "env_steps": summary["env_steps"],
        "updates": summary["updates"], "wall_s": summary["wall_s"], "model_error_5": errors[-1] if errors else None,
    }  # fmt: skip


def play_randomly(lanes: int = 64) -> dict[str, Any]:
    """The first episode of each lane with uniform actions."""
    import torch

    from freewheel.envs.batched import IsaacConfig
    from freewheel.seeding import training_episodes

    env = IsaacConfig(TASK, device="cpu", action_bounds=BOUNDS).make(range(lanes))
    env.reset([training_episodes(7, 0)])
    playing, returns = torch.ones(lanes, dtype=torch.bool), torch.zeros(lanes)
    for _ in range(STEPS):
        step = env.step(2 * torch.rand(lanes, *env.spec.action.shape) - 1)
        returns += torch.where(playing, step.reward, 0)
        playing &= ~(step.terminated | step.truncated)
    env.close()
    return {"final_eval": float(returns.mean())}


def main() -> None:
    order = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault(ROOT, str(write_assets(Path(folder) / "assets")))
        row = play_randomly() if order["arm"] == "random" else train(order, Path(folder))
    print(json.dumps(row))


if __name__ == "__main__":
    main()
