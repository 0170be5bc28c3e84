"""Defaults: PPO and SAC with nothing given but the env and the steps, beside stable-baselines3's own defaults at equal steps."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks._common import RESULTS, Row, Verdict, append, context, number, report, run_python, table
from benchmarks._defaults_once import EPISODES, LIBRARIES, TAIL

NAME = "defaults"
OURS, THEIRS = LIBRARIES
SEEDS = (1, 2, 3)
CLEARLY = (
    0.1  # of the distance from an untrained policy to the better library: less than that below is not clearly below
)


@dataclass(frozen=True)
class Task:
    """An env, an algorithm, how long both libraries train, and the mean return of actions drawn at random."""

    env: str
    algo: str
    steps: int
    random: float

    def __str__(self) -> str:
        return f"{self.env}/{self.algo}"


TASKS = (
    Task("CartPole-v1", "ppo", 100_000, 22.0),
    Task("Acrobot-v1", "ppo", 100_000, -499.0),
    Task("Pendulum-v1", "ppo", 100_000, -1225.0),
    Task("Hopper-v5", "ppo", 100_000, 18.0),
    Task("HalfCheetah-v5", "ppo", 100_000, -285.0),
    Task("Pendulum-v1", "sac", 10_000, -1225.0),
    Task("Hopper-v5", "sac", 10_000, 18.0),
    Task("HalfCheetah-v5", "sac", 10_000, -285.0),
)
QUICK = {"ppo": 2_048, "sac": 300}  # env steps


def once(library: str, task: Task, seed: int, steps: int) -> dict[str, Any]:
    order = {"library": library, "env": task.env, "algo": task.algo, "steps": steps, "seed": seed}
    with TemporaryDirectory() as folder:
        answer = run_python("-m", "benchmarks._defaults_once", json.dumps(order), cwd=folder)
    row: dict[str, Any] = json.loads(answer.splitlines()[-1])
    figures = f"final {number(row['final'])}, last {TAIL} episodes of training {number(row[f'return_{TAIL}'])}"
    print(f"{task} seed {seed} {library:18s} {figures}, {row['seconds']:.0f} s", flush=True)
    return row


def kept() -> list[Row]:
    """Rows of earlier calls."""
    path = RESULTS / f"{NAME}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def select(rows: Iterable[Row], library: str, task: Task) -> list[Row]:
    """The newest row of each seed."""
    asked = {"library": library, "env": task.env, "algo": task.algo, "steps": task.steps}
    found = {row["seed"]: row for row in rows if asked.items() <= row.items()}
    return [found[seed] for seed in sorted(found)]


def wanted(only: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[str, Task, int]]:
    """Every run: the first seed of all tasks, then the second. An --only is LIBRARY/ENV/ALGO, or its beginning or end."""
    for seed in seeds:
        for task in TASKS:
            for library in LIBRARIES:
                name = f"{library}/{task}"
                if not only or any(name.startswith(part) or name.endswith(part) for part in only):
                    yield library, task, seed


def judge(task: Task, ours: Sequence[Row], theirs: Sequence[Row]) -> Verdict:
    """Clearly below: the mean is lower by more than a tenth of what there was to learn, and by more than chance explains.

    Chance: two standard errors of the difference of the means over the seeds."""
    mine, other = (np.array([row["final"] for row in rows]) for rows in (ours, theirs))
    behind = other.mean() - mine.mean()
    error = (
        float(np.sqrt(sum(part.var(ddof=1) / len(part) for part in (mine, other))))
        if len(mine) > 1 < len(other)
        else 0.0
    )
    margin = max(CLEARLY * (max(mine.mean(), other.mean()) - task.random), 2 * error)
    figures, limit = f"{number(mine.mean())} against {number(other.mean())}", number(other.mean() - margin)
    seeds = f"{len(mine)} and {len(other)} seeds"
    text = f"{task}: {figures} ({seeds}), clearly below from {limit} on"
    return Verdict(text, bool(behind <= margin))


def line(task: Task, ours: Sequence[Row], theirs: Sequence[Row]) -> list[str]:
    def figures(rows: Sequence[Row], key: str) -> str:
        values = [row[key] for row in rows if row.get(key) is not None]
        return f"{number(float(np.mean(values)))} ({', '.join(map(number, values))})" if values else "-"

    columns = (ours, "final"), (theirs, "final"), (ours, "best"), (ours, f"return_{TAIL}"), (theirs, f"return_{TAIL}")
    return [task.env, task.algo.upper(), f"{task.steps:,}", *(figures(rows, key) for rows, key in columns)]


def write(rows: Sequence[Row], *, keep: bool) -> bool:
    """The table of all rows there are; whether every target is met."""
    sides = {task: (select(rows, OURS, task), select(rows, THEIRS, task)) for task in TASKS}
    lines = [line(task, *both) for task, both in sides.items() if any(both)]
    verdicts = [judge(task, *both) for task, both in sides.items() if all(both)]
    names = ("final weights, {}", "last {tail} training episodes, {}")
    header = ["env", "", "steps", *(names[0].format(who) for who in LIBRARIES), f"best weights, {OURS}"]
    header += [names[1].format(who, tail=TAIL) for who in LIBRARIES]
    about = "Nothing given but the env, the algorithm and the steps. "
    about += f"Mean return over {EPISODES} greedy episodes that no run has seen"
    text = [
        f"# Defaults of {OURS} beside those of {THEIRS}",
        f"{about}, the same ones for both; in brackets seed by seed.",
    ]
    text += [table(header, lines), *map(str, verdicts)]
    print("\n" + "\n\n".join(text))
    if keep:
        report(NAME, "\n\n".join(text), context())
    return all(verdict.met for verdict in verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="LIBRARY/ENV/ALGO", help="these runs; a beginning or an end is enough"
    )
    parser.add_argument("--again", action="store_true", help="train also what has a row; the newest rows count")
    parser.add_argument(
        "--quick", action="store_true", help="see that it works: one seed, few steps, nothing kept, no target counts"
    )
    parser.add_argument("--table", action="store_true", help="train nothing: the table of the rows that are there")
    given = parser.parse_args()
    if given.table:
        return 0 if write(kept(), keep=True) else 1
    if given.quick:
        for library, task, seed in wanted(given.only, (1,)):
            once(library, task, seed, QUICK[task.algo])
        print("a quick run has no target: all 0 targets that count are met")
        return 0
    about, rows = context(), kept()
    for library, task, seed in wanted(given.only, given.seeds):
        if given.again or not any(row["seed"] == seed for row in select(rows, library, task)):
            row = once(library, task, seed, task.steps)
            append(NAME, {**row, **about})
            rows.append(row)
    return 0 if write(rows, keep=True) else 1


if __name__ == "__main__":
    raise SystemExit(main())
