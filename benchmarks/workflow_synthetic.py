"""Workflow search where the best order is known: the regret of the order that a strategy would choose after equal episodes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from benchmarks._common import Notebook, mean_interval, number, table
from freewheel.core import NDArray
from freewheel_cage2.workflow.search import Strategy
from packages.cage2.tests.support.workflow_problem import EPISODES, regrets

NAME = "workflow_synthetic"
STRATEGIES: tuple[Strategy, ...] = ("gp", "greedy", "random", "canonical")
FLIPS = 100_000


def measure(notebook: Notebook, repeats: int, trials: int, marks: Sequence[int]) -> dict[str, NDArray]:
    """[repeats, marks] the regret after so many episodes, by strategy; the problem of a repeat is the same for all."""
    found: dict[str, NDArray] = {}
    for strategy in STRATEGIES:
        rows = []
        for seed in range(repeats):
            curve = regrets(strategy, seed, trials)
            notebook.keep({"strategy": strategy, "seed": seed, "episodes_and_regret": curve})
            rows.append([[regret for episodes, regret in curve if episodes <= mark][-1] for mark in marks])
        found[strategy] = np.array(rows)
        print(strategy, mean_interval(found[strategy][:, -1].tolist()), sep="  ", flush=True)
    return found


def chance(difference: NDArray) -> float:
    """Of so great a mean difference, if its signs were thrown like coins."""
    flips = np.random.default_rng(0).choice([-1.0, 1.0], size=(FLIPS, len(difference)))
    return float(np.mean((flips * difference).mean(axis=1) >= difference.mean()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20, help="problems, seeds 0 .. REPEATS - 1")
    parser.add_argument("--trials", type=int, default=20, help=f"trials of a search, {EPISODES} episodes each")
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    if given.quick:
        given.repeats, given.trials = 4, 8
    notebook = Notebook(NAME, "Workflow search with a known optimum", quick=given.quick)
    marks = [given.trials * EPISODES * part // 4 for part in range(1, 5)]
    found = measure(notebook, given.repeats, given.trials, marks)
    header = ("strategy", *(f"regret, {mark:,} episodes" for mark in marks))
    cells = [[name, *(mean_interval(column.tolist()) for column in rows.T)] for name, rows in found.items()]
    notebook.write(
        f"Mean (95 %) over {given.repeats} problems; a return is 0 at best and -30 at worst.", table(header, cells)
    )
    difference = found["random"][:, -1] - found["gp"][:, -1]
    likely = chance(difference)
    text = f"gp less regret than random by {mean_interval(difference.tolist())}, p {number(likely)} (paired sign flips)"
    notebook.judge(text, bool(difference.mean() > 0) and likely < 0.01)
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
