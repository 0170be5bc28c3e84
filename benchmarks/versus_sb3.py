"""PPO beside stable-baselines3: same network, settings and env steps, run by run in turn, each in a process of its own."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks._common import Row, Verdict, append, bootstrap, context, number, report, run_python, spread, table
from benchmarks._ppo_once import LIBRARIES, TASKS, WINDOW

NAME = "versus_sb3"
OURS, THEIRS = LIBRARIES
LEAST_SPEED = {"cartpole": 4.0, "halfcheetah": 2.0}  # times their env steps/s
MOST_TIME = 1 / 3  # of their time to the goal
QUICK_SEEDS, QUICK_STEPS = 1, {"cartpole": 2_048, "halfcheetah": 8_192}  # of HalfCheetah-v5 an episode has to end


@dataclass(frozen=True)
class Measure:
    """One figure of both libraries, seed by seed."""

    name: str
    ours: Sequence[float]
    theirs: Sequence[float]

    @property
    def ratios(self) -> list[float]:
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]

    @property
    def ratio(self) -> float:
        return float(np.median(self.ratios))

    def compared(self) -> str:
        low, high = bootstrap(self.ratios)
        return f"{self.ratio:.2f}x ({low:.2f} .. {high:.2f})"

    def cells(self, compared: str) -> list[str]:
        return [self.name, spread(self.ours), spread(self.theirs), compared]


def measure(task: str, seeds: int, steps: int, about: Mapping[str, Any] | None) -> dict[str, list[Row]]:
    """The rows of each library by seed; A B, B A, A B, ... so that a slow minute of the machine hurts both."""
    rows: dict[str, list[Row]] = {library: [] for library in LIBRARIES}
    for seed in range(1, seeds + 1):
        for library in (OURS, THEIRS) if seed % 2 else (THEIRS, OURS):
            load = os.getloadavg()[0]
            with TemporaryDirectory() as folder:
                row = json.loads(run_python("-m", "benchmarks._ppo_once", library, task, seed, steps, cwd=folder))
            if not row["episodes"]:
                raise SystemExit(f"no episode of {task} ended in {steps} steps; give more --steps")
            goal = f", goal after {row['seconds_to_goal']:.2f} s" if row["seconds_to_goal"] else ""
            returns = f"return {row['return_20']:.1f}"
            print(f"{task} seed {seed} {library:18s} {row['steps_per_s']:8,.0f} steps/s, {returns}{goal}", flush=True)
            rows[library].append(row)
            if about is not None:
                append(NAME, {**row, "load": load, **about})
    return rows


def until_goal(rows: Mapping[str, list[Row]], unit: str, whole: str) -> Measure:
    """What a goal cost. One they missed counts as their whole run, one we missed as infinite: both against us."""
    goal = f"{unit}_to_goal"
    ours = [math.inf if row[goal] is None else row[goal] for row in rows[OURS]]
    theirs = [row[whole] if row[goal] is None else row[goal] for row in rows[THEIRS]]
    return Measure(f"{unit} to the goal", ours, theirs)


def judge(task: str, rows: Mapping[str, list[Row]]) -> tuple[str, list[Verdict]]:
    """The table of a task, and its verdicts."""

    def figures(name: str, key: str) -> Measure:
        return Measure(name, [row[key] for row in rows[OURS]], [row[key] for row in rows[THEIRS]])

    speed, least = figures("env steps/s", "steps_per_s"), LEAST_SPEED[task]
    lines = [speed.cells(speed.compared())]
    verdicts = [Verdict(f"{speed.ratio:.2f}x their env steps/s, target at least {least:g}x", speed.ratio >= least)]
    if (goal := TASKS[task].goal) is not None:
        time, steps = until_goal(rows, "seconds", "seconds"), until_goal(rows, "steps", "env_steps")
        reached = [f"{sum(row['steps_to_goal'] is not None for row in part)} of {len(part)}" for part in rows.values()]
        lines += [time.cells(time.compared()), steps.cells(steps.compared()), ["runs that reached it", *reached, ""]]
        text = f"{time.ratio:.2f}x their time to {goal:g}, target at most {MOST_TIME:.2f}x"
        verdicts.append(Verdict(text, time.ratio <= MOST_TIME))
    tail = figures("return, last 20 episodes", "return_20")
    intervals = [bootstrap(values) for values in (tail.ours, tail.theirs)]
    overlap = " and ".join(f"{number(low)} .. {number(high)}" for low, high in intervals)
    lines += [tail.cells(f"medians {overlap}"), figures("return, last 100 episodes", "return_100").cells("")]
    if goal is None:
        met = intervals[0][1] >= intervals[1][0]
        verdicts.append(Verdict(f"return at equal steps not below theirs: median in {overlap}", met))
    header = ("median (least .. greatest)", OURS, THEIRS, "median of the seeds' ratios (95 %)")
    return table(header, lines), verdicts


def section(task: str, rows: Mapping[str, list[Row]]) -> tuple[str, bool]:
    """A task for a person, and whether all its targets are met."""
    text, verdicts = judge(task, rows)
    settings, seeds, steps = TASKS[task], len(rows[OURS]), rows[OURS][0]["env_steps"]
    title = f"## {settings.env}: {seeds} seeds, {steps:,} env steps each, learning on"
    if settings.goal is not None:
        title += f"; the goal: mean of the last {WINDOW} training episodes ≥ {settings.goal:g}"
    return "\n\n".join([title, text, *map(str, verdicts)]), all(verdict.met for verdict in verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="runs of each library, seeds 1 .. SEEDS")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--steps", type=int, help="env steps of a run (default: the task's own)")
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no target counts")
    given = parser.parse_args()
    about = None if given.quick else context()
    sections, met = [f"# PPO: {OURS} beside {THEIRS}"], True
    for task in given.tasks:
        steps = given.steps or (QUICK_STEPS[task] if given.quick else TASKS[task].steps)
        text, good = section(task, measure(task, QUICK_SEEDS if given.quick else given.seeds, steps, about))
        sections.append(text)
        met &= good
    print("\n" + "\n\n".join(sections))
    if about is not None:
        report(NAME, "\n\n".join(sections), about)
    print("all targets that count are met" if met or given.quick else "missed: see FAIL above")
    return 0 if met or given.quick else 1


if __name__ == "__main__":
    raise SystemExit(main())
