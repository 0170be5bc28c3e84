"""What is learned: `freewheel train` with a preset on several seeds, then greedy episodes that the run has never seen."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import freewheel
from benchmarks._common import append, context, report, run_python, table

NAME = "learns"
EPISODES, MANY = 20, 200  # a target is judged by the first; the second tells a weak policy from hard starts
EVAL_SEED = 2000  # the same worlds for every run, and none that a run chose its best weights by
COLUMNS = ("environment", "seed", "env steps", "seconds", "best weights", f"over {MANY}", "last weights", "target", "")


@dataclass(frozen=True)
class Task:
    """A world, the preset of the same name as the task, and the greedy mean that counts as learned."""

    env: str
    steps: int
    target: float


TASKS: Mapping[str, Task] = {
    "cartpole": Task("CartPole-v1", steps=100_000, target=475.0),
    "pendulum": Task("Pendulum-v1", steps=200_000, target=-200.0),
}


def learn(name: str, seed: int, steps: int, *flags: str, many: int = MANY) -> dict[str, Any]:
    """One run with the preset of a task, with these flags besides, and what its weights are worth."""
    task = TASKS[name]
    found = train_and_score(task.env, seed, steps, "--preset", name, *flags, many=many)
    learned = found["greedy_best"] >= task.target
    return {"env": task.env, "preset": name, **found, "target": task.target, "learned": learned}


def train_and_score(env: str, seed: int, steps: int, *flags: str, many: int = MANY) -> dict[str, Any]:
    """One run by the command line, and what its weights are worth in greedy episodes that it has never seen."""
    with TemporaryDirectory() as folder:
        given = (env, "--steps", steps, "--seed", seed, "--runs-dir", folder, "--run", "once")
        run_python("-m", "freewheel", "train", *given, *flags, cwd=folder)
        path = Path(folder) / "once"
        summary = json.loads((path / "summary.json").read_text())
        best = freewheel.score(str(path), episodes=many, which="best", seed=EVAL_SEED).returns
        latest = freewheel.score(str(path), episodes=EPISODES, which="latest", seed=EVAL_SEED).returns
    return {
        "seed": seed,
        "env_steps": summary["env_steps"],
        "seconds": summary["wall_s"],
        "weights_sha256": summary["weights_sha256"],
        "greedy_best": fmean(best[:EPISODES]),
        f"greedy_best_{MANY}": fmean(best),
        "greedy_latest": fmean(latest),
    }


def cells(row: Mapping[str, Any]) -> list[str]:
    return [
        row["env"],
        str(row["seed"]),
        f"{row['env_steps']:,}",
        f"{row['seconds']:.1f}",
        f"{row['greedy_best']:.1f}",
        f"{row[f'greedy_best_{MANY}']:.1f}",
        f"{row['greedy_latest']:.1f}",
        f"≥ {row['target']:g}",
        "PASS" if row["learned"] else "FAIL",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--steps", type=int, help="env steps of a run (default: the task's own)")
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    if given.quick:
        given.seeds, given.steps = given.seeds[:1], given.steps or 2_048
    about = context()
    rows = []
    for name in given.tasks:
        for seed in given.seeds:
            many = EPISODES if given.quick else MANY
            row = learn(name, seed, given.steps or TASKS[name].steps, many=many)
            if not given.quick:
                append(NAME, row | about)
            print(" ".join(cells(row)), flush=True)
            rows.append(row)
    text = f"# Greedy mean over {EPISODES} fresh episodes\n\n{table(COLUMNS, [cells(row) for row in rows])}"
    print(f"\n{text}")
    met = given.quick or all(row["learned"] for row in rows)
    if not given.quick:
        report(NAME, text, about)
    print("all targets that count are met" if met else "missed: see FAIL above")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
