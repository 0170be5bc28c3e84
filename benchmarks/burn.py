"""Eight worlds that burn CPU time on two cores: what is left of the cores for their steps, and what a learner takes of it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks._common import Notebook, Row, median, number, rotated, spread, straggler, table

NAME = "burn"
WORLD = {"law": "lognormal", "mean": 0.001, "kind": "burn", "length": 100}
WORKERS, CORES = 8, 2
FREE = "free run"
WAYS: Mapping[str, tuple[str, str]] = {
    "continuous": ("continuous", "none"),
    "episodes": ("episodes", "none"),
    "continuous, PPO": ("continuous", "ppo"),
    "episodes, PPO": ("episodes", "ppo"),
}
JUDGED = ("continuous", "episodes")
LEAST_OF_FREE, GOAL_OF_CORES = 0.98, 0.95


def measure(notebook: Notebook, given: argparse.Namespace) -> dict[str, list[Row]]:
    """The rows of each way, round by round."""
    rows: dict[str, list[Row]] = {way: [] for way in (FREE, *WAYS)}
    times = {"warm_s": given.warm, "window_s": given.window, "cores": CORES}
    for turn in range(given.rounds):
        for way in rotated(list(rows), turn):
            labels = {"way": way, "round": turn + 1}
            if way == FREE:
                order: dict[str, Any] = {"workers": WORKERS, "world": WORLD, "seed": turn, **times}
                rows[way].append(notebook.once("_free_run", order, labels))
            else:
                mode, learner = WAYS[way]
                options = straggler(mode, WORKERS, WORLD, {"num_steps_per_env": 64, "seed": turn})
                order = {"options": options, "learner": learner, **times}
                rows[way].append(notebook.once("_collect_once", order, labels))
    return rows


def of_cores(row: Row, seconds: float) -> float:
    return seconds / (CORES * float(row["window_s"]))


def accounts(row: Row) -> list[float]:
    """Shares of the cores: burnt by steps, the rest of the workers' CPU time, the learner's, and what nobody of ours had."""
    learner = row.get("learner_cpu_s", 0.0)
    parts = [row["drawn_s"], row["worker_cpu_s"] - row["drawn_s"], learner]
    shares = [of_cores(row, part) for part in parts]
    return [*shares, 1.0 - sum(shares)]


def cells(rows: Mapping[str, Sequence[Row]], way: str) -> list[str]:
    part = rows[way]
    ratios = [of_free(ours, free) for ours, free in zip(part, rows[FREE], strict=True)]
    burnt = [of_cores(row, row["drawn_s"]) for row in part]
    columns = np.median([accounts(row) for row in part], axis=0)
    figures = [f"{share:.3f}" for share in columns[1:]]
    besides = float(np.median([1e6 * (row["worker_cpu_s"] - row["drawn_s"]) / row["rows"] for row in part]))
    return [way, spread(burnt), spread(ratios), *figures, number(besides), number(median(part, "rows_per_s"))]


def of_free(ours: Row, free: Row) -> float:
    return of_cores(ours, ours["drawn_s"]) / of_cores(free, free["drawn_s"])


def judge(notebook: Notebook, rows: Mapping[str, Sequence[Row]]) -> None:
    header = ("way", "cores burnt by steps", "of the free run", "workers besides", "learner", "nobody",
              "µs a row besides", "rows/s")  # fmt: skip
    notebook.write(table(header, [cells(rows, way) for way in rows]))
    for way in JUDGED:
        ratio = float(np.median([of_free(ours, free) for ours, free in zip(rows[way], rows[FREE], strict=True)]))
        share = float(np.median([of_cores(row, row["drawn_s"]) for row in rows[way]]))
        notebook.judge(f"{way} {ratio:.3f} of the free run, target at least {LEAST_OF_FREE}", ratio >= LEAST_OF_FREE)
        notebook.goal(f"{way} {share:.3f} of the cores, goal {GOAL_OF_CORES}", share >= GOAL_OF_CORES)
    notebook.judge_promises([row for way in WAYS for row in rows[way]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=float, default=3.0, help="seconds before the window")
    parser.add_argument("--window", type=float, default=20.0, help="seconds")
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.warm, given.window = 1, 0.5, 1.0
    notebook = Notebook(NAME, f"{WORKERS} burning worlds on {CORES} cores", quick=given.quick)
    judge(notebook, measure(notebook, given))
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
