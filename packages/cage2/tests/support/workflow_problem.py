"""A workflow search problem whose best order is known."""

from __future__ import annotations

import math

from freewheel.seeding import generator
from freewheel_cage2.workflow.envs import ORDERS, Order, distance
from freewheel_cage2.workflow.search import Proposal, SearchRules, Strategy, TrialOutcome, WorkflowSearch, run

SLOPE, FALL = 3.0, 0.03  # cost of a pair in the wrong order: in return, in compliance
THRESHOLD = 0.85  # allows an order five pairs away from the easiest one
EPISODES = 100  # episodes of a trial
NOISE, SLIPS = 30.0, 0.2  # deviation of an episode's return and compliance


class Problem:
    """The return falls with the distance from a hidden order, and compliance with that from another. The seed draws both."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        best, easiest = (ORDERS[index] for index in generator(seed, "synthetic").integers(len(ORDERS), size=2))
        self._returns = {order: -SLOPE * distance(order, best) for order in ORDERS}
        self._compliance = {order: 1.0 - FALL * distance(order, easiest) for order in ORDERS}

    def trial(self, proposal: Proposal) -> TrialOutcome:
        """Return means over the episodes as a run would report them. Equal trials of equal problems have equal means."""
        order = proposal.order
        assert order is not None, "this world is about orders"
        noise = generator(self._seed, "trial", proposal.number, *order).standard_normal(2)
        noise /= math.sqrt(proposal.episodes)
        compliance = min(1.0, max(0.0, self._compliance[order] + SLIPS * noise[1]))
        return TrialOutcome(self._returns[order] + NOISE * noise[0], 0.0, compliance, proposal.episodes, "episodes", "")

    def feasible(self, order: Order) -> bool:
        return self._compliance[order] >= THRESHOLD

    def regret(self, order: Order) -> float:
        """Return how much worse an order is than the best compliant one. An order that is not compliant counts as the worst."""
        top = max(value for order, value in self._returns.items() if self.feasible(order))
        return top - (self._returns[order] if self.feasible(order) else min(self._returns.values()))


def regrets(strategy: Strategy, seed: int, trials: int) -> list[tuple[int, float]]:
    """Return for each trial the episodes used so far and the regret of the best order so far."""
    problem = Problem(seed)
    rules = SearchRules(strategy, trials * EPISODES, EPISODES, EPISODES, THRESHOLD, fixed_episodes=True, seed=seed)
    search = WorkflowSearch(rules)
    found: list[tuple[int, float]] = []

    def note() -> None:
        best = search.best
        assert best is not None, "after a trial there is a best one"
        assert best.order is not None, "and it is an order"
        found.append((search.spent, problem.regret(best.order)))

    run(search, problem.trial, note)
    return found
