"""Modes beside stable-baselines3 and beside each other: env steps/s with learning, and what is learned in the same wall time."""

from __future__ import annotations

import argparse
import bisect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks._common import Notebook, Row, bootstrap, median, number, rotated, run_python, spread, table

NAME = "versus_modes"
THEIRS, LOCKSTEP = "stable-baselines3", "lockstep"
WAYS: Mapping[str, Mapping[str, Any]] = {
    LOCKSTEP: {"mode": "lockstep", "placement": "inline"},
    "batch 1 x 8": {"mode": "batch", "workers": 1, "envs_per_worker": 8},
    "batch 2 x 4": {"mode": "batch", "workers": 2, "envs_per_worker": 4},
    "continuous 1 x 8": {"mode": "continuous", "workers": 1, "envs_per_worker": 8},
    "continuous 2 x 4": {"mode": "continuous", "workers": 2, "envs_per_worker": 4},
}
ASYNCHRONOUS = tuple(way for way in WAYS if way != LOCKSTEP)


@dataclass(frozen=True)
class Task:
    """A world with the preset of the same name as the task."""

    env: str
    least: float  # times their env steps/s
    solved: float  # a return beyond which there is nothing to gain; infinite where there always is


TASKS: Mapping[str, Task] = {
    "cartpole": Task("CartPole-v1", 6.0, 475.0),
    "halfcheetah": Task("HalfCheetah-v5", 4.0, float("inf")),
}


def measure(notebook: Notebook, task: str, seeds: int, steps: int) -> dict[str, list[Row]]:
    """The rows of each way by seed, begun with another way every time."""
    rows: dict[str, list[Row]] = {way: [] for way in (THEIRS, *WAYS)}
    for seed in range(1, seeds + 1):
        for way in rotated(list(rows), seed):
            labels = {"task": task, "way": way, "seed": seed}
            if way == THEIRS:
                rows[way].append(theirs(notebook, task, seed, steps, labels))
            else:
                options = {
                    "env": TASKS[task].env,
                    "preset": task,
                    "steps": steps,
                    "seed": seed,
                    "evals": 0,
                    **WAYS[way],
                }
                rows[way].append(notebook.once("_train_once", {"options": options, "curve": True}, labels))
    return rows


def theirs(notebook: Notebook, task: str, seed: int, steps: int, labels: Mapping[str, Any]) -> Row:
    """Their PPO with the preset's settings."""
    with TemporaryDirectory() as folder:
        answer = run_python("-m", "benchmarks._ppo_once", THEIRS, f"{task}-preset", seed, steps, cwd=folder)
    row = notebook.keep({**labels, **json.loads(answer)})
    print(f"{task}  {THEIRS}  {seed}  steps_per_s {row['steps_per_s']:,.0f}", flush=True)
    return row


def ratios(rows: Mapping[str, Sequence[Row]], way: str) -> list[float]:
    """This way over theirs of the same seed."""
    return [ours["steps_per_s"] / their["steps_per_s"] for ours, their in zip(rows[way], rows[THEIRS], strict=True)]


def return_at(row: Row, seconds: float) -> float | None:
    """Mean return of the last 100 training episodes that had ended by then; none had: None."""
    past = bisect.bisect_right([point[0] for point in row["curve"]], seconds)
    reached: float | None = row["curve"][past - 1][2] if past else None
    return reached


def race(rows: Mapping[str, Sequence[Row]]) -> list[tuple[str, float, float, float]]:
    """By seed: the asynchronous way that was through first, when, its return then, and that of lockstep at the same time."""
    found = []
    for number_of_seed, lockstep in enumerate(rows[LOCKSTEP]):
        way = min(ASYNCHRONOUS, key=lambda way: float(rows[way][number_of_seed]["seconds"]))
        first = rows[way][number_of_seed]
        behind = return_at(lockstep, first["seconds"])
        found.append((way, first["seconds"], first["return_100"], -np.inf if behind is None else behind))
    return found


def cells(rows: Mapping[str, Sequence[Row]], way: str) -> list[str]:
    part, compared = rows[way], ratios(rows, way)
    low, high = bootstrap(compared)
    speed = [spread([row["steps_per_s"] for row in part]), f"{np.median(compared):.2f}x ({low:.2f} .. {high:.2f})"]
    own = ["-", "-"]
    if way != THEIRS:
        own = [number(1e3 * median(part, "update_s")), number(max(row["lag_max"] or 0 for row in part))]
    returns = [row["return_100"] for row in part if row["return_100"] is not None]
    return [way, *speed, *own, spread(returns) if returns else "-"]


def judge(notebook: Notebook, task: str, rows: Mapping[str, Sequence[Row]]) -> None:
    asked, runs = TASKS[task], race(rows)
    notebook.write(
        f"## {asked.env}, preset {task}: {len(rows[THEIRS])} seeds, {rows[THEIRS][0]['env_steps']:,} env steps"
    )
    header = (
        "way",
        "env steps/s",
        "of stable-baselines3's (95 %)",
        "update ms",
        "lag max",
        "return, last 100 episodes",
    )
    notebook.write(table(header, [cells(rows, way) for way in rows]))
    updates = rows[LOCKSTEP][0]["env_steps"] / rows[LOCKSTEP][0]["updates"]
    ceiling = updates / median(rows[LOCKSTEP], "update_s")
    notebook.write(f"learner alone: S / U = {ceiling:,.0f} env steps/s ({updates:.0f} rows an update)")
    best = max(ASYNCHRONOUS, key=lambda way: float(np.median(ratios(rows, way))))
    ratio = float(np.median(ratios(rows, best)))
    notebook.judge(f"{best} {ratio:.2f}x their env steps/s, target at least {asked.least:g}x", ratio >= asked.least)
    lines = [
        [str(seed), way, f"{seconds:.1f}", number(ours), number(behind) if np.isfinite(behind) else "none yet"]
        for seed, (way, seconds, ours, behind) in enumerate(runs, start=1)
    ]
    notebook.write(table(("seed", "through first", "after s", "its return", "lockstep's by then"), lines))
    ours, behind = (float(np.median([run[column] for run in runs])) for column in (2, 3))
    both = min(ours, behind) >= asked.solved
    text = f"return at equal wall time {number(ours)}, lockstep {number(behind) if np.isfinite(behind) else 'none yet'}"
    notebook.judge(f"{text}: {'both solved' if both else 'more than lockstep'}", both or ours > behind)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each way, seeds 1 .. SEEDS")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--steps", type=int, default=150_000, help="env steps of a run")
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    seeds, steps = (1, 4_096) if given.quick else (given.seeds, given.steps)
    given.tasks = given.tasks[:1] if given.quick else given.tasks
    notebook = Notebook(NAME, f"Modes beside {THEIRS}", quick=given.quick)
    for task in given.tasks:
        judge(notebook, task, measure(notebook, task, seeds, steps))
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
