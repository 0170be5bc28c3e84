"""Workflow search where the best order is known: the regret of the order that a strategy would choose after equal episodes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import numpy as np

from benchmarks._common import Notebook, mean_interval, number, table
from freewheel.core import NDArray
from freewheel.seeding import generator
from freewheel.worlds.cage2.workflow.envs import ORDERS, Order, distance
from freewheel.worlds.cage2.workflow.search import Outcome, Proposal, Rules, Search, Strategy, run

NAME = "workflow_synthetic"
STRATEGIES: tuple[Strategy, ...] = ("gp", "greedy", "random", "canonical")
FLIPS = 100_000
SLOPE, FALL = 3.0, 0.03  # cost of a pair in the wrong order: in return, in compliance
THRESHOLD = 0.85  # allows an order five pairs away from the easiest one
EPISODES = 100  # of a trial
NOISE, SLIPS = 30.0, 0.2  # deviation of an episode's return and compliance


class Problem:
    """Return falls with the distance from a hidden order, compliance with that from another; drawn by the seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        best, easiest = (ORDERS[index] for index in generator(seed, "synthetic").integers(len(ORDERS), size=2))
        self._returns = {order: -SLOPE * distance(order, best) for order in ORDERS}
        self._compliance = {order: 1.0 - FALL * distance(order, easiest) for order in ORDERS}

    def trial(self, proposal: Proposal) -> Outcome:
        """Means over the episodes, as a run would report them; the same for the same trial of the same problem."""
        order = proposal.order
        assert order is not None, "this world is about orders"
        noise = generator(self._seed, "trial", proposal.number, *order).standard_normal(2)
        noise /= math.sqrt(proposal.episodes)
        compliance = min(1.0, max(0.0, self._compliance[order] + SLIPS * noise[1]))
        return Outcome(self._returns[order] + NOISE * noise[0], 0.0, compliance, proposal.episodes, "episodes", "")

    def feasible(self, order: Order) -> bool:
        return self._compliance[order] >= THRESHOLD

    def regret(self, order: Order) -> float:
        """How much worse it is than the best compliant order; one that is not compliant counts as the worst."""
        top = max(value for order, value in self._returns.items() if self.feasible(order))
        return top - (self._returns[order] if self.feasible(order) else min(self._returns.values()))


def regrets(strategy: Strategy, seed: int, trials: int) -> list[tuple[int, float]]:
    """After each trial: the episodes used so far, and the regret of the best order so far."""
    problem = Problem(seed)
    rules = Rules(strategy, trials * EPISODES, EPISODES, EPISODES, THRESHOLD, fixed_episodes=True, seed=seed)
    search = Search(rules)
    found: list[tuple[int, float]] = []

    def note() -> None:
        best = search.best
        assert best is not None, "after a trial there is a best one"
        assert best.order is not None, "and it is an order"
        found.append((search.spent, problem.regret(best.order)))

    run(search, problem.trial, note)
    return found


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
