"""The real CybORG with far more workers than cores: twenty must be no slower than two, with PPO learning."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks._common import Notebook, Row, median, number, rotated, spread, table

NAME = "crowd"
FEW, CORES, STEPS = 2, 2, 100  # steps of an episode
MODES = ("episodes", "continuous")
LEAST = 0.97  # of the rate with as many workers as cores: what two runs of the same differ by


def options(mode: str, workers: int, red_agent: str, seed: int, rows: int) -> dict[str, Any]:
    """As `freewheel train` takes them; rows: of an update, 0 for its default."""
    world = {"env": "cyborg:Scenario2", "red_agent": red_agent, "max_episode_steps": STEPS}
    update = {"num_steps_per_env": rows // workers} if rows else {}
    return {**world, "mode": mode, "workers": workers, "num_envs": workers, "seed": seed, **update}


def measure(notebook: Notebook, given: argparse.Namespace) -> dict[tuple[str, int], list[Row]]:
    rows: dict[tuple[str, int], list[Row]] = {(mode, workers): [] for mode in MODES for workers in (FEW, given.many)}
    times = {"warm_s": given.warm, "window_s": given.window, "cores": CORES}
    for turn in range(given.rounds):
        for mode, workers in rotated(list(rows), turn):
            order = {"options": options(mode, workers, given.red_agent, turn, 128 * given.quick), **times}
            labels = {"mode": mode, "workers": workers, "round": turn + 1}
            rows[mode, workers].append(notebook.once("_collect_once", order, labels))
    return rows


def cells(rows: Mapping[tuple[str, int], Sequence[Row]], mode: str, workers: int) -> list[str]:
    part = rows[mode, workers]
    figures = [
        mode,
        str(workers),
        spread([row["rows_per_s"] / STEPS for row in part]),
        spread(ratios(rows, mode, workers)),
    ]
    cpu = [
        f"{np.median([row[key] / row['window_s'] for row in part]):.2f}" for key in ("worker_cpu_s", "learner_cpu_s")
    ]
    return [*figures, number(median(part, "updates_per_s")), *cpu, number(max(row["lag_max"] for row in part))]


def ratios(rows: Mapping[tuple[str, int], Sequence[Row]], mode: str, workers: int) -> list[float]:
    """Of the rate of a few workers in the same round."""
    return [
        ours["rows_per_s"] / few["rows_per_s"] for ours, few in zip(rows[mode, workers], rows[mode, FEW], strict=True)
    ]


def judge(notebook: Notebook, rows: Mapping[tuple[str, int], Sequence[Row]], many: int) -> None:
    header = (
        "mode",
        "workers",
        "episodes/s",
        f"of {FEW} workers'",
        "updates/s",
        "worker cores",
        "learner cores",
        "lag max",
    )
    notebook.write(table(header, [cells(rows, mode, workers) for mode, workers in rows]))
    for mode in MODES:
        ratio = float(np.median(ratios(rows, mode, many)))
        text = f"{mode}: {many} workers make {ratio:.3f} of the episodes/s of {FEW}, target at least {LEAST}"
        notebook.judge(text, ratio >= LEAST)
    notebook.judge_promises([row for part in rows.values() for row in part])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--red-agent", default="B_lineAgent")
    parser.add_argument("--many", type=int, default=20, help="workers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=float, default=6.0, help="seconds before the window")
    parser.add_argument("--window", type=float, default=30.0, help="seconds")
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.many, given.warm, given.window = 1, 4, 0.5, 1.0
    notebook = Notebook(NAME, f"The real CybORG, {given.many} workers on {CORES} cores", quick=given.quick)
    judge(notebook, measure(notebook, given), given.many)
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
