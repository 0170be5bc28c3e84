"""Learning on the drone is real: success of greedy episodes after training with PPO and with SAC, beside a random policy."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import freewheel
from freewheel.envs.batched import BatchedConfig
from freewheel.envs.family import register_ids
from freewheel.seeding import training_episodes

GOAL, RANDOM = 0.6, 0.05


def random_success(device: str, lanes: int = 512) -> float:
    """Of uniformly random actions, first episode of each lane."""
    register_ids()
    env = BatchedConfig("freewheel/RoughDrone-v0", {"lidar": False}, device=device).make(range(lanes))
    env.reset([training_episodes(7, 0)])
    playing = torch.ones(lanes, dtype=torch.bool, device=device)
    success = torch.zeros(lanes, device=device)
    column = env.spec.measures.index("success")
    for _ in range(201):
        step = env.step(torch.rand(lanes, *env.spec.action.shape, device=device) * 2 - 1)
        over = step.terminated | step.truncated
        success += torch.where(playing & over, step.measures[:, column], 0.0)
        playing &= ~over
    return float(success.mean())


def learn(algo: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = freewheel.train(
            "freewheel/RoughDrone-v0", preset=f"drone-{algo}", device=options.device, minutes=options.minutes, seed=seed,
            evals=3, eval_episodes=256, runs_dir=folder, quiet=True, **({"num_envs": options.lanes} if options.lanes else {}),
        )  # fmt: skip
        summary = result.summary
    return {
        "algo": algo, "seed": seed, "success": summary["eval/success"], "crashed": summary["eval/crashed"],
        "eval": summary["final_eval"], "env_steps": summary["env_steps"], "updates": summary["updates"],
        "wall_s": summary["wall_s"], "steps_per_s": summary["steps_per_s"],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=0.5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--algo", choices=["ppo", "sac"], nargs="+", default=["ppo", "sac"])
    parser.add_argument("--lanes", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/device_learns.jsonl"))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = [{"algo": "random", "success": random_success(options.device)}]
    print(rows[0], flush=True)
    for algo in options.algo:
        for seed in options.seeds:
            rows.append(learn(algo, seed, options))
            print(rows[-1], flush=True)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    with options.out.open("a") as file:
        for row in rows:
            file.write(json.dumps({"device": name, "torch": torch.__version__, **row}) + "\n")
    met = rows[0]["success"] < RANDOM and all(row["success"] >= GOAL for row in rows[1:])
    print(f"{'PASS' if met else 'FAIL'}: success at least {GOAL} where random has {rows[0]['success']:.3f}")
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
