"""Where the speed comes from, each apart: acting and learning at the same time instead of in turn, and (GPU) CUDA graphs."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import freewheel
from benchmarks._common import Notebook, Row, number, table

LANES = 4096
COLUMNS = ("", "updates/s", "env steps/s", "updates a row", "gain")
#: What each comparison changes, and from what to what: (collect, compile).
GAINS: Mapping[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "asynchrony alone, eager": (("sync", "off"), ("async", "off")),
    "asynchrony alone, graphs": (("sync", "graphs"), ("async", "graphs")),
    "graphs alone, sync": (("sync", "off"), ("sync", "graphs")),
    "graphs alone, async": (("async", "off"), ("async", "graphs")),
    "both": (("sync", "off"), ("async", "graphs")),
}


@dataclass(frozen=True)
class Task:
    """A world and an algorithm, at equal updates per row whatever is compared."""

    env: str
    algo: str
    turn: str  # the mode that acts and learns in turn; the other one is continuous, and MBPO's model is then fitted beside it
    settings: Mapping[str, Any] = field(default_factory=dict)
    target: float | None = None  # updates/s of asynchrony and graphs, in those of neither


def sac(lanes: int, batch: int, starts: int) -> dict[str, Any]:
    replay = {"batch": batch, "replay_ratio": batch / lanes, "learning_starts": starts, "buffer": 500_000}
    replay["first_temperature"] = 1.0
    return {"num_envs": lanes, "sac": replay}


SMALL = {"hidden": [64, 64], "normalize_obs": False}
PENDULUM = {
    "learning_starts": 500, "members": 5, "elites": 3, "model_hidden": [64, 64], "updates_per_row": 10, "rollouts_per_row": 100,
    "model_every": 50, "max_epochs": 10, "first_temperature": 1.0,
}  # fmt: skip
DEVICE = (
    Task("freewheel/RoughDrone-v0", "sac", "lockstep", sac(LANES, LANES, 20 * LANES), target=5.0),
    Task("Hopper-v5", "mbpo", "sequential",
         {"num_envs": 1, "num_steps_per_env": 4, "policy": {"normalize_obs": False},
          "mbpo": {"learning_starts": 1000, "target_entropy": -1.0, "first_temperature": 1.0}}, target=8.0),
)  # fmt: skip
CPU = (
    Task("freewheel/RoughDrone-v0", "sac", "lockstep", sac(64, 256, 640) | {"policy": {"hidden": [128, 128]}}),
    Task("InvertedPendulum-v5", "mbpo", "sequential", {"num_envs": 1, "policy": SMALL, "mbpo": PENDULUM}),
)
FEW = PENDULUM | {"learning_starts": 100, "updates_per_row": 1, "rollouts_per_row": 4, "max_epochs": 2}
QUICK = (Task("InvertedPendulum-v5", "mbpo", "sequential", {"num_envs": 1, "policy": SMALL, "mbpo": FEW}),)


def measure(task: Task, collect: str, compile_: str, device: str, seconds: float | None) -> dict[str, Any]:
    """Updates and rows a second over the second half of what a run learned, and the ratio of the two over all of it. A run of so
    many seconds, or of a few rows."""
    mode = {"mode": "continuous", "workers": 1} if collect == "async" else {"mode": task.turn}
    budget = {"minutes": seconds / 60} if seconds else {"steps": 300}
    with tempfile.TemporaryDirectory() as folder:
        result = freewheel.train(
            task.env, **task.settings, evals=0, seed=1, runs_dir=folder, log_every=0.5 if seconds else 0.02, quiet=True,
            options={**mode, **budget, "algo": task.algo, "device": device, "compile": compile_},
        )  # fmt: skip
        reason = result.summary["graphs_fallback"]
        assert compile_ == "off" or not reason, f"asked for graphs and fell back: {reason}"
        rows = [json.loads(line) for line in (result.path / "metrics.jsonl").read_text().splitlines()]
    learning = [row for row in rows if 0 < row["updates"] < rows[-1]["updates"]]  # the others are of the closing save
    if len(learning) < 2:
        raise SystemExit(f"{task.algo} {collect} {compile_}: too short to learn anything, give more --seconds")
    first, last = learning[(len(learning) - 1) // 2], learning[-1]
    wall = last["wall_s"] - first["wall_s"]
    achieved = [row["replay/updates_per_row"] for row in learning if row.get("replay/updates_per_row")]
    shares = result.summary["shares"]
    return {
        "env": task.env, "algo": task.algo, "collect": collect, "compile": compile_,
        "updates_per_s": (last["updates"] - first["updates"]) / wall,
        "env_steps_per_s": (last["env_steps"] - first["env_steps"]) / wall,
        "updates_per_row": achieved[-1] if achieved else None, "updates": last["updates"], "gpu_util": last["gpu_util"],
        "dynamics_updates": last.get("dynamics_updates"),
        "learner": {kind: round(share, 3) for kind, share in shares["learner"].items() if share >= 0.005},
    }  # fmt: skip


def gains(rows: Sequence[Row]) -> dict[str, float]:
    """How many times the updates/s each change brings, of those that were measured."""
    rate = {(row["collect"], row["compile"]): row["updates_per_s"] for row in rows}
    found = {name: (rate.get(without), rate.get(used)) for name, (without, used) in GAINS.items()}
    return {name: after / before for name, (before, after) in found.items() if before and after}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run")
    parser.add_argument("--algo", choices=["sac", "mbpo"], nargs="+", default=["sac", "mbpo"])
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    on_cpu = given.device == "cpu"
    device = "CPU" if on_cpu else torch.cuda.get_device_name()
    title = f"Speed on {device}, where it comes from"
    notebook = Notebook("cpu_ablation" if on_cpu else "device_ablation", title, quick=given.quick)
    seconds = None if given.quick else given.seconds
    for task in QUICK if given.quick else CPU if on_cpu else DEVICE:
        if task.algo not in given.algo:
            continue
        ways = [(collect, how) for how in ("off", "graphs")[: 1 if on_cpu else 2] for collect in ("sync", "async")]
        rows = [measure(task, *way, given.device, seconds) for way in ways]
        base = rows[0]["updates_per_s"]
        for row in rows:
            row["ratio"] = row["updates_per_s"] / base if base else None
            print(notebook.keep({"device": device, "torch": torch.__version__, **row}), flush=True)
        notebook.write(f"## {task.algo}, {task.env}", table(COLUMNS, [cells(row) for row in rows]))
        found = gains(rows)
        notebook.write("\n".join(f"* {name}: {gain:.2f}×" for name, gain in found.items()))
        if task.target is not None:
            faster = rows[-1]["env_steps_per_s"] >= rows[0]["env_steps_per_s"]
            met = found.get("both", 0.0) >= task.target and faster
            notebook.judge(f"{task.algo}: both at least {task.target:g}× and no fewer env steps/s", met)
    return notebook.close()


def cells(row: Row) -> list[str]:
    name = f"{row['collect']}, {'eager' if row['compile'] == 'off' else 'graphs'}"
    figures = [number(row[key]) for key in ("updates_per_s", "env_steps_per_s", "updates_per_row")]
    return [name, *figures, f"{row['ratio'] or 0:.2f}×"]


if __name__ == "__main__":
    raise SystemExit(main())
