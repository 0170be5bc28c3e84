"""The real CybORG with two workers on two cores, PPO learning: --mode ray beside episodes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks._common import Notebook, Row, median, number, rotated, spread, table
from benchmarks.cyborg_rates import CORES, STEPS, WORKERS, options

NAME = "ray_cyborg"
BESIDE = "episodes"
WAYS: Mapping[str, Mapping[str, Any]] = {
    BESIDE: {},
    "ray, episodes": {"mode": "ray", "unit": "episodes"},
    "ray, fragments": {"mode": "ray", "unit": "fragments"},
}
LEAST = 0.9  # of what mode episodes makes


def measure(notebook: Notebook, given: argparse.Namespace) -> dict[str, list[Row]]:
    """The rows of each way, round by round."""
    rows: dict[str, list[Row]] = {way: [] for way in WAYS}
    times = {"warm_s": given.warm, "window_s": given.window, "cores": CORES, "all_present": True}
    for turn in range(given.rounds):
        for way in rotated(list(rows), turn):
            asked = {**options("episodes", given.red_agent, turn, given.episodes), **WAYS[way]}
            labels = {"way": way, "round": turn + 1, "red_agent": given.red_agent}
            rows[way].append(notebook.once("_collect_once", {"options": asked, **times}, labels))
    return rows


def ratios(rows: Mapping[str, Sequence[Row]], way: str) -> list[float]:
    """Beside mode episodes in the same round."""
    return [ours["rows_per_s"] / beside["rows_per_s"] for ours, beside in zip(rows[way], rows[BESIDE], strict=True)]


def judge(notebook: Notebook, rows: Mapping[str, Sequence[Row]]) -> None:
    header = ("way", "episodes/s", "of mode episodes", "update ms", "worker cores", "learner cores")
    lines = []
    for way, part in rows.items():
        used = [
            f"{np.median([row[key] / row['window_s'] for row in part]):.2f}"
            for key in ("worker_cpu_s", "learner_cpu_s")
        ]
        figures = [spread([row["rows_per_s"] / STEPS for row in part]), spread(ratios(rows, way))]
        lines.append([way, *figures, number(1e3 * median(part, "update_s")), *used])
    notebook.write(table(header, lines))
    for way in rows:
        if way != BESIDE:
            ratio = float(np.median(ratios(rows, way)))
            notebook.judge(f"{way}: {ratio:.3f} of mode episodes, target at least {LEAST}", ratio >= LEAST)
    notebook.judge_promises([row for part in rows.values() for row in part])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--red-agent", default="B_lineAgent")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=float, default=4.0, help="seconds before the window")
    parser.add_argument("--window", type=float, default=18.0, help="seconds")
    parser.add_argument("--episodes", type=int, default=10, help="of an update")
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.warm, given.window, given.episodes = 1, 0.5, 1.0, 2
    notebook = Notebook(NAME, f"The real CybORG under Ray, {WORKERS} workers on {CORES} cores", quick=given.quick)
    judge(notebook, measure(notebook, given))
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
