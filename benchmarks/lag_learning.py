"""What lag costs: returns after equal rows at lag 0, 1 and 2, and which of the corrections carries them on HalfCheetah."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks._common import Notebook, Row, mean_interval, number, rotated, table

NAME = "lag_learning"
LAGS: Mapping[str, Mapping[str, Any]] = {
    "lag 0": {"mode": "lockstep", "placement": "inline"},
    "lag 1": {"mode": "batch"},
    "lag 2": {"mode": "continuous", "max_lag": 2},
}
OFF = 1e9  # a bound that never binds
WITHOUT: Mapping[str, Mapping[str, Any]] = {
    "surrogate behaviour": {"surrogate": "behaviour"},
    "rho at most 1": {"rho_bar": 1.0},
    "c unbounded": {"c_bar": OFF},
    "targets plain": {"targets": "plain"},
    "naive (both off)": {"surrogate": "behaviour", "targets": "plain"},
}
ABLATED = "halfcheetah"


@dataclass(frozen=True)
class Task:
    """A world with the preset of the same name as the task."""

    env: str
    steps: int


TASKS: Mapping[str, Task] = {
    "cartpole": Task("CartPole-v1", 100_000),
    "pendulum": Task("Pendulum-v1", 200_000),
    "halfcheetah": Task("HalfCheetah-v5", 150_000),
}


@dataclass(frozen=True)
class Arm:
    """A way to train."""

    name: str
    lag: str
    ppo: Mapping[str, Any]


def arms(task: str, without: Sequence[str]) -> list[Arm]:
    found = [Arm(lag, lag, {}) for lag in LAGS]
    if task == ABLATED:
        found += [Arm(f"{lag}, {name}", lag, WITHOUT[name]) for lag in ("lag 1", "lag 2") for name in without]
    return found


def measure(notebook: Notebook, task: str, given: argparse.Namespace) -> dict[str, list[Row]]:
    """The rows of each arm by seed, begun with another arm every time."""
    chosen = arms(task, given.without)
    rows: dict[str, list[Row]] = {arm.name: [] for arm in chosen}
    steps = given.steps or TASKS[task].steps
    for seed in range(1, given.seeds + 1):
        for arm in rotated(chosen, seed):
            options = {"env": TASKS[task].env, "preset": task, "steps": steps, "seed": seed, "evals": 1}
            options |= {**LAGS[arm.lag], "ppo": dict(arm.ppo)}
            labels = {"task": task, "arm": arm.name, "seed": seed}
            rows[arm.name].append(notebook.once("_train_once", {"options": options}, labels))
    return rows


def paired(rows: Mapping[str, Sequence[Row]], name: str, key: str) -> list[float]:
    """Differences to lag 0, seed by seed, of seeds that have both."""
    pairs = zip(rows[name], rows["lag 0"], strict=True)
    return [ours[key] - base[key] for ours, base in pairs if ours[key] is not None and base[key] is not None]


def cells(rows: Mapping[str, Sequence[Row]], name: str) -> list[str]:
    part = rows[name]
    figures = []
    for key in ("final_eval", "return_100"):
        values, differences = [row[key] for row in part if row[key] is not None], paired(rows, name, key)
        figures.append(mean_interval(values) if values else "-")
        figures.append(mean_interval(differences) if differences and name != "lag 0" else "-")
    lags = [row["lag_max"] for row in part if row["lag_max"] is not None]
    return [name, *figures, number(max(lags, default=0.0)), number(float(np.median([row["seconds"] for row in part])))]


def judge(notebook: Notebook, task: str, rows: Mapping[str, Sequence[Row]]) -> None:
    first = next(iter(rows.values()))
    steps = first[0]["order"]["options"]["steps"]
    notebook.write(f"## {TASKS[task].env}, preset {task}: {len(first)} seeds, {steps:,} env steps, mean (95 %)")
    header = (
        "",
        "greedy, 20 episodes",
        "less lag 0's",
        "return, last 100 episodes",
        "less lag 0's",
        "lag max",
        "seconds",
    )
    notebook.write(table(header, [cells(rows, name) for name in rows]))
    for name, part in rows.items():
        bound, worst = int(name.split()[1].rstrip(",")), max(row["lag_max"] or 0.0 for row in part)
        notebook.judge(f"{task}, {name}: lag at most {worst:g}", worst <= bound, exact=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="runs of each arm, seeds 1 .. SEEDS")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--steps", type=int, help="env steps of a run (default: the task's own)")
    parser.add_argument("--without", nargs="*", choices=WITHOUT, default=list(WITHOUT), help="corrections to leave out")
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    if given.quick:
        given.seeds, given.steps, given.without = 1, given.steps or 4_096, given.without[-1:]
        given.tasks = given.tasks[-1:]
    notebook = Notebook(NAME, "Returns after equal rows, by lag", quick=given.quick)
    for task in given.tasks:
        judge(notebook, task, measure(notebook, task, given))
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
