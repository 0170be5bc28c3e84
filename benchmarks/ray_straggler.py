"""Fifty sleeping worlds on two cores and a PPO that learns, all by default: what share of the ideal --mode ray reaches."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._common import Notebook, Row, median, number, rotated, spread, table
from benchmarks.straggler import FREE, LEAST_RETURN, WORLD, cores

NAME = "ray_straggler"
CORES = 2
WAYS: Mapping[str, Mapping[str, Any]] = {
    "ray, fragments": {"mode": "ray", "unit": "fragments"},
    "ray, episodes": {"mode": "ray", "unit": "episodes"},
    "continuous": {"mode": "continuous"},
    "episodes": {"mode": "episodes"},
}
JUDGED = ("ray, fragments", "ray, episodes")
LEAST = 0.90  # of the ideal


def measure(notebook: Notebook, given: argparse.Namespace) -> dict[str, list[Row]]:
    """The rows of each way, round by round."""
    rows: dict[str, list[Row]] = {way: [] for way in (FREE, *WAYS)}
    times = {"warm_s": given.warm, "window_s": given.window, "cores": CORES}
    for turn in range(given.rounds):
        for way in rotated(list(rows), turn):
            labels = {"way": way, "round": turn + 1}
            if way == FREE:
                order: dict[str, Any] = {"workers": given.workers, "world": WORLD, "seed": turn, **times}
                rows[way].append(notebook.once("_free_run", order, labels))
            else:
                order = {"options": options(way, given.workers, turn), "all_present": True, **times}
                rows[way].append(notebook.once("_collect_once", order, labels))
    return rows


def options(way: str, workers: int, seed: int) -> dict[str, Any]:
    """A world each; all else is what `freewheel train` takes by default."""
    world = {"env": "freewheel/Straggler-v0", "env_args": dict(WORLD), "measures": ["drawn_s", "slept_s"]}
    return {**world, **WAYS[way], "workers": workers, "envs_per_worker": 1, "seed": seed}


def cells(rows: Mapping[str, Sequence[Row]], way: str) -> list[str]:
    part = rows[way]
    of_free = [ours["share"] / free["share"] for ours, free in zip(part, rows[FREE], strict=True)]
    figures = [spread([row["share"] for row in part]), spread(of_free), number(median(part, "rows_per_s"))]
    if way == FREE:
        return [way, *figures, "-", "-", "-", cores(part, "worker_cpu_s"), "-", "-"]
    figures += [number(1e3 * median(part, "update_s")), f"{100 * median(part, 'learner_busy'):.0f} %"]
    figures += [number(max(row["lag_max"] for row in part)), cores(part, "worker_cpu_s"), cores(part, "learner_cpu_s")]
    return [way, *figures, number(max(row["return_mean"] or 0.0 for row in part))]


def judge(notebook: Notebook, rows: Mapping[str, Sequence[Row]]) -> None:
    header = ("way", "share of the ideal", "of the free run", "rows/s", "update ms", "learner busy", "lag max",
              "worker cores", "learner cores", "return")  # fmt: skip
    notebook.write(table(header, [cells(rows, way) for way in rows]))
    for way in JUDGED:
        share, learned = median(rows[way], "share"), max(rows[way], key=lambda row: row["return_mean"] or 0.0)
        notebook.judge(f"{way}: {share:.3f} of the ideal, target at least {LEAST}", share >= LEAST)
        text = f"{way}: return {learned['return_mean'] or 0:.1f} after {learned['produced']:,} rows"
        notebook.judge(
            f"{text}, target above {LEAST_RETURN:g} (ten times chance)", (learned["return_mean"] or 0) > LEAST_RETURN
        )
    lost = sum(row["workers_lost"] + row["restarts"] for way in WAYS for row in rows[way])
    notebook.judge(f"workers that died: {lost}", lost == 0, exact=True)
    notebook.judge_promises([row for way in WAYS for row in rows[way]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=50)
    parser.add_argument("--warm", type=float, default=4.0, help="seconds before the window")
    parser.add_argument("--window", type=float, default=15.0, help="seconds")
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.workers, given.warm, given.window = 1, 4, 0.5, 1.0
    notebook = Notebook(NAME, f"{given.workers} sleeping worlds on {CORES} cores, PPO by default", quick=given.quick)
    rows = measure(notebook, given)
    judge(notebook, rows)
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
