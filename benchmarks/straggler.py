"""A hundred sleeping worlds and a PPO that learns: what share of the ideal each mode reaches, beside a free run.

--beside: the same while another program takes half a core, which the free run then has to live with too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks._common import Notebook, Row, median, number, rotated, spread, straggler, table

NAME = "straggler"
WORLD = {"law": "lognormal", "mean": 0.010, "kind": "sleep", "length": 100}
FREE = "free run"
BY_DEFAULT = {
    "continuous by default": "continuous",
    "episodes by default": "episodes",
}  # nothing but env, mode and workers
WAYS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "continuous": ("continuous", {"max_lag": 2}),
    "episodes": ("episodes", {}),
    **{way: (mode, {}) for way, mode in BY_DEFAULT.items()},
    "lockstep": ("lockstep", {}),
    "episodes --wave": ("episodes", {"wave": True}),
}
JUDGED = ("continuous", "episodes", *BY_DEFAULT)
PPO = {"epochs": 5, "minibatch": 1600}  # four minibatches of 6 400 rows, as is usual for so large batches
LEAST_OF_FREE, LEAST_BY_DEFAULT, GOAL_OF_IDEAL = 0.98, 0.97, 0.97
LEAST_BESIDE, GOAL_BESIDE = 0.96, 0.95
#: Computes half of the time, until its standard input is closed.
PROGRAM = """
import select, sys, time
while not select.select([sys.stdin], [], [], 0.05)[0]:
    end = time.perf_counter() + 0.05
    while time.perf_counter() < end:
        pass
"""
LEAST_RETURN = 7.0  # ten times chance, which is 100 / 145


@contextmanager
def half_a_core(wanted: bool) -> Iterator[None]:
    """Another program that takes half a core, in this block."""
    if not wanted:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as program:
        yield
        program.communicate()


def measure(notebook: Notebook, given: argparse.Namespace) -> dict[str, list[Row]]:
    """The rows of each way, round by round."""
    rows: dict[str, list[Row]] = {way: [] for way in (FREE, *(JUDGED if given.beside else WAYS))}
    times = {"warm_s": given.warm, "window_s": given.window}
    for turn in range(given.rounds):
        for way in rotated(list(rows), turn):
            labels = {"way": way, "round": turn + 1}
            if way == FREE:
                order: dict[str, Any] = {"workers": given.workers, "world": WORLD, "seed": turn, **times}
                rows[way].append(notebook.once("_free_run", order, labels))
            else:
                rows[way].append(notebook.once("_collect_once", learning(way, given.workers, turn) | times, labels))
    return rows


def learning(way: str, workers: int, seed: int) -> dict[str, Any]:
    mode, options = WAYS[way]
    asked = {"num_steps_per_env": 64, "seed": seed, "ppo": PPO, **options}
    given = straggler(mode, workers, WORLD, asked)
    if way in BY_DEFAULT:
        given = {name: given[name] for name in ("env", "env_args", "measures", "mode", "workers", "seed")}
    return {"options": given}


def ratios(rows: Mapping[str, Sequence[Row]], way: str, key: str) -> list[float]:
    """This way over the free run of the same round."""
    return [ours[key] / free[key] for ours, free in zip(rows[way], rows[FREE], strict=True)]


def cells(rows: Mapping[str, Sequence[Row]], way: str) -> list[str]:
    part = rows[way]
    figures = [spread([row["share"] for row in part]), spread(ratios(rows, way, "share"))]
    figures += [number(median(part, "rows_per_s")), spread(ratios(rows, way, "rows_per_s"))]
    if way == FREE:
        return [way, *figures, "-", "-", "-", "-", cores(part, "worker_cpu_s"), "-"]
    figures += [f"{100 * median(part, 'overshoot'):.1f} %", number(1e3 * median(part, "update_s"))]
    figures += [f"{100 * median(part, 'learner_busy'):.0f} %", number(max(row["lag_max"] for row in part))]
    return [way, *figures, cores(part, "worker_cpu_s"), cores(part, "learner_cpu_s")]


def cores(rows: Sequence[Row], key: str) -> str:
    return f"{np.median([row[key] / row['window_s'] for row in rows]):.2f}"


def judge(notebook: Notebook, rows: Mapping[str, Sequence[Row]], learned: Row, least: float, goal: float) -> None:
    header = ("way", "share of the ideal", "of the free run", "rows/s", "of the free run's", "overslept", "update ms",
              "learner busy", "lag max", "worker cores", "learner cores")  # fmt: skip
    notebook.write(table(header, [cells(rows, way) for way in rows]))
    for way in JUDGED:
        ratio, share = float(np.median(ratios(rows, way, "share"))), median(rows[way], "share")
        enough = min(least, LEAST_BY_DEFAULT) if way in BY_DEFAULT else least
        notebook.judge(f"{way} {ratio:.3f} of the free run, target at least {enough}", ratio >= enough)
        notebook.goal(f"{way} {share:.3f} of the ideal, goal {goal}", share >= goal)
    reached = learned["return_mean"] or 0.0
    notebook.judge(
        f"return {reached:.1f} after {learned['produced']:,} rows, target above {LEAST_RETURN:g} (ten times chance)",
        reached > LEAST_RETURN,
    )
    notebook.judge_promises([row for way, part in rows.items() if way != FREE for row in part])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--warm", type=float, default=6.0, help="seconds before the window")
    parser.add_argument("--window", type=float, default=30.0, help="seconds")
    parser.add_argument("--learn-s", type=float, default=0.0, help="a longer continuous run to judge the learning by")
    parser.add_argument("--beside", action="store_true", help="while another program takes half a core")
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.workers, given.warm, given.window = 1, 20, 0.5, 1.5
    title = (
        f"{given.workers} sleeping worlds, PPO learning" + ", beside a program that takes half a core" * given.beside
    )
    notebook = Notebook(f"{NAME}_beside" if given.beside else NAME, title, quick=given.quick)
    with half_a_core(given.beside):
        rows = measure(notebook, given)
    judged = [row for way in ("continuous", "continuous by default") for row in rows[way]]
    learned = max(judged, key=lambda row: row["produced"])
    if given.learn_s:
        order = learning("continuous", given.workers, 0) | {"warm_s": given.warm, "window_s": given.learn_s}
        learned = notebook.once("_collect_once", order, {"way": "continuous, longer"})
    judge(notebook, rows, learned, *((LEAST_BESIDE, GOAL_BESIDE) if given.beside else (LEAST_OF_FREE, GOAL_OF_IDEAL)))
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
