"""Where the speed on a GPU comes from: acting and learning in turn or beside each other, launched one by one or from graphs."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import freewheel

LANES = 4096
SAC = {
    "env": "freewheel/RoughDrone-v0", "algo": "sac", "num_envs": LANES, "turn": "lockstep", "target": 5.0,
    "sac": {"batch": 4096, "replay_ratio": 1.0, "learning_starts": 20 * LANES, "buffer": 500_000},
}  # fmt: skip
MBPO = {
    "env": "Hopper-v5", "algo": "mbpo", "num_envs": 1, "turn": "sequential", "target": 8.0, "num_steps_per_env": 4,
    "mbpo": {"learning_starts": 1000, "target_entropy": -1.0},
}  # fmt: skip


def measure(task: dict[str, Any], side_by_side: bool, compile: str, options: argparse.Namespace) -> dict[str, Any]:  # noqa: A002
    """Updates and rows a second over the second half of a run, and the ratio of the two over all of it."""
    settings = {name: value for name, value in task.items() if name not in ("env", "turn", "target")}
    if side_by_side:
        settings |= {"mode": "continuous", "workers": 1}
    else:
        settings |= {"mode": task["turn"]}
    with tempfile.TemporaryDirectory() as folder:
        result = freewheel.train(
            task["env"], **settings, minutes=options.seconds / 60, evals=0, seed=1, runs_dir=folder, log_every=0.5, quiet=True,
            options={"device": options.device, "compile": compile},
        )  # fmt: skip
        reason = result.summary["graphs_fallback"]
        assert compile == "off" or options.device == "cpu" or not reason, f"asked for graphs and fell back: {reason}"
        rows = [json.loads(line) for line in (result.path / "metrics.jsonl").read_text().splitlines()]
    learning = [row for row in rows if row["updates"] > 0]
    first, last = learning[len(learning) // 2], learning[-1]
    seconds = last["wall_s"] - first["wall_s"]
    achieved = [row["replay/updates_per_row"] for row in learning if row.get("replay/updates_per_row")]
    return {
        "algo": task["algo"], "collect": "async" if side_by_side else "sync", "compile": compile,
        "updates_per_s": (last["updates"] - first["updates"]) / seconds,
        "env_steps_per_s": (last["env_steps"] - first["env_steps"]) / seconds,
        "updates_per_row": achieved[-1], "updates": last["updates"], "gpu_util": last["gpu_util"],
        "dynamics_updates": last.get("dynamics_updates"),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--algo", choices=["sac", "mbpo"], nargs="+", default=["sac", "mbpo"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/device_ablation.jsonl"))
    options = parser.parse_args()
    missed = False
    for task in (SAC, MBPO):
        if task["algo"] not in options.algo:
            continue
        rows = [measure(task, beside, how, options) for beside in (False, True) for how in ("off", "graphs")]
        base, best = rows[0], rows[-1]
        for row in rows:
            ratio = row["updates_per_s"] / base["updates_per_s"]
            print(row, f"{ratio:.2f} x sync-eager", flush=True)
            name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
            with options.out.open("a") as file:
                file.write(json.dumps({"device": name, "torch": torch.__version__, **row, "ratio": ratio}) + "\n")
        ratio = best["updates_per_s"] / base["updates_per_s"]
        met = ratio >= task["target"] and best["env_steps_per_s"] >= base["env_steps_per_s"]
        print(
            f"{'PASS' if met else 'FAIL'}: {task['algo']} async-graphed {ratio:.2f} x sync-eager (target {task['target']})"
        )
        missed |= not met
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
