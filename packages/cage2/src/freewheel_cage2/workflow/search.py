"""Workflow search: decide which workflow to try next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from freewheel.errors import SetupError
from freewheel.seeding import generator
from freewheel_cage2.workflow.envs import CANONICAL, ORDERS, Order, distance

if TYPE_CHECKING:
    from freewheel_cage2.workflow.surrogate import OrderPrediction, Surrogate

Strategy = Literal["gp", "greedy", "random", "canonical", "plain"]
FEASIBLE = 0.2  # an order is tried only if it reaches the compliance threshold with at least this probability


@dataclass(frozen=True)
class SearchRules:
    """The rules of a search."""

    strategy: Strategy
    total_episodes: int
    max_episodes: int  # maximum for one workflow over all its trials
    least_episodes: int  # minimum for a trial; if fewer are left, the search is over
    threshold: float  # compliance at which a workflow counts as learned
    beta: float = 2.0
    warm_start: bool = True
    fixed_episodes: bool = False  # whether every trial plays all its episodes
    seed: int = 0


@dataclass(frozen=True)
class Proposal:
    """The next trial, and the model's prediction for it."""

    number: int  # number of the trial
    order: Order | None  # None: no workflow
    episodes: int  # maximum number of episodes
    init: str | None = None  # the run with the initial weights
    fixed: bool = False  # whether only the number of episodes ends the trial
    mean: float | None = None  # predicted mean of the environment's return
    std: float | None = None
    ucb: float | None = None
    feasibility: float | None = None  # probability that the order reaches the threshold


@dataclass(frozen=True)
class TrialOutcome:
    """The result of a trial, with means over its last episodes."""

    env_return: float
    alignment: float
    compliance: float | None  # None: there was no fix
    episodes: int  # number of all episodes played
    ended: str
    run: str  # the run with its weights


@dataclass(frozen=True)
class WorkflowTrial:
    """A proposal and its outcome."""

    proposal: Proposal
    outcome: TrialOutcome

    @property
    def order(self) -> Order | None:
        return self.proposal.order


class WorkflowSearch:
    """A search with its trials so far. The next trial depends only on these and on the rules, so a search can be resumed."""

    def __init__(self, rules: SearchRules, trials: Iterable[WorkflowTrial] = ()) -> None:
        self.rules = rules
        self.trials = list(trials)

    @property
    def spent(self) -> int:
        """Episodes used."""
        return sum(trial.outcome.episodes for trial in self.trials)

    @property
    def left(self) -> int:
        """Episodes left."""
        return max(0, self.rules.total_episodes - self.spent)

    @property
    def failed(self) -> frozenset[Order]:
        """Orders that stayed below the threshold until their training ended. They are not proposed again."""
        return frozenset(trial.order for trial in self.latest if trial.order is not None and self.failure(trial))

    @property
    def latest(self) -> list[WorkflowTrial]:
        """The last trial of each order."""
        return list({trial.order: trial for trial in self.trials}.values())

    def failure(self, trial: WorkflowTrial) -> bool:
        """Return whether a trial ended below the threshold. A trial without any fix has not failed."""
        compliance = trial.outcome.compliance
        return compliance is not None and compliance < self.rules.threshold

    @property
    def best(self) -> WorkflowTrial | None:
        """The trial with the highest return among the last trials that reach the threshold; if none does, the most compliant."""

        def merit(trial: WorkflowTrial) -> tuple[bool, float, float]:
            outcome = trial.outcome
            compliance = -1.0 if outcome.compliance is None else outcome.compliance
            reached = compliance >= self.rules.threshold
            return reached, 0.0 if reached else compliance, outcome.env_return

        return max(self.latest, key=merit, default=None)

    def propose(self) -> Proposal | None:
        """Return the next trial, or None if the budget is used up or no order is left."""
        if self.left < self.rules.least_episodes:
            return None
        return STRATEGIES[self.rules.strategy](self)

    @property
    def candidates(self) -> list[Order]:
        """Orders that may be tried. They are shuffled so that ties are broken at random."""
        failed, least = self.failed, self.rules.least_episodes
        allowed = [order for order in ORDERS if order not in failed and self.allowance(order) >= least]
        shuffled = generator(self.rules.seed, "workflow", len(self.trials)).permutation(len(allowed))
        return [allowed[index] for index in shuffled]

    def allowance(self, order: Order) -> int:
        """Return how many episodes a workflow has left."""
        played = sum(trial.outcome.episodes for trial in self.trials if trial.order == order)
        return self.rules.max_episodes - played

    def nearest(self, order: Order) -> str | None:
        """Return the run of the most similar trained order. Among equally similar orders, the better one is chosen."""
        trained = [(trial, trial.order) for trial in self.latest if trial.order is not None]
        if not trained or not self.rules.warm_start:
            return None
        return min(trained, key=lambda item: (distance(item[1], order), -item[0].outcome.env_return))[0].outcome.run

    def episodes(self, wanted: int) -> int:
        """Return this many episodes, or all that are left if the rest would be too few for another trial."""
        return self.left if self.left - wanted < self.rules.least_episodes else wanted

    def trial_of(self, order: Order) -> Proposal:
        """Propose a trial of an order without a prediction."""
        episodes = self.episodes(min(self.allowance(order), self.left))
        return Proposal(len(self.trials), order, episodes, self.nearest(order), self.rules.fixed_episodes)


def run(search: WorkflowSearch, trial: Callable[[Proposal], TrialOutcome], save: Callable[[], None]) -> None:
    """Make trials until none is left, and save the state after every trial."""
    while (proposal := search.propose()) is not None:
        search.trials.append(WorkflowTrial(proposal, trial(proposal)))
        save()


def _plain(search: WorkflowSearch) -> Proposal | None:
    """Propose a single trial with all episodes and no workflow."""
    return None if search.trials else Proposal(0, None, search.left, fixed=True)


def _canonical(search: WorkflowSearch) -> Proposal | None:
    """Propose each canonical order once, with an equal share of the episodes."""
    tried = {trial.order for trial in search.trials}
    waiting = [order for order in CANONICAL.values() if order not in tried]
    if not waiting:
        return None
    order = waiting[0]
    return Proposal(len(search.trials), order, max(1, search.left // len(waiting)), search.nearest(order), fixed=True)


def _random(search: WorkflowSearch) -> Proposal | None:
    """Propose a random order; orders that were not tried yet come first."""
    tried = {trial.order for trial in search.trials}
    candidates = sorted(search.candidates, key=lambda order: order in tried)
    return search.trial_of(candidates[0]) if candidates else None


def _modelled(search: WorkflowSearch, beta: float) -> Proposal | None:
    """Propose the order with the highest upper confidence bound of the return among orders that may reach the threshold."""
    surrogate, candidates = _surrogate(), search.candidates
    if not candidates or not search.trials:
        return search.trial_of(candidates[0]) if candidates else None

    def believed(values: Sequence[float | None]) -> OrderPrediction | None:
        pairs = zip([trial.order for trial in search.trials], values, strict=True)
        known = [(order, value) for order, value in pairs if order is not None and value is not None]
        if not known:
            return None
        orders, numbers = zip(*known, strict=True)
        return surrogate(search.rules.seed).fit(orders, numbers).predict(candidates)

    returns = believed([trial.outcome.env_return for trial in search.trials])
    compliance = believed([trial.outcome.compliance for trial in search.trials])
    assert returns is not None, "every trial has a return"
    ucb = returns.mean + beta * returns.std
    feasibility = np.ones(len(candidates)) if compliance is None else compliance.at_least(search.rules.threshold)
    worth_a_trial = feasibility >= min(FEASIBLE, feasibility.max())
    chosen = int(np.argmax(np.where(worth_a_trial, ucb, -np.inf)))
    return replace(
        search.trial_of(candidates[chosen]),
        mean=float(returns.mean[chosen]),
        std=float(returns.std[chosen]),
        ucb=float(ucb[chosen]),
        feasibility=float(feasibility[chosen]),
    )


def _surrogate() -> type[Surrogate]:
    try:
        from freewheel_cage2.workflow.surrogate import Surrogate
    except ModuleNotFoundError as error:
        hint = "pip install 'freewheel-cage2[workflow]', or use --strategy random"
        raise SetupError(f"strategies gp and greedy need {error.name}: {hint}") from None
    return Surrogate


STRATEGIES: Mapping[Strategy, Callable[[WorkflowSearch], Proposal | None]] = {
    "gp": lambda search: _modelled(search, search.rules.beta),
    "greedy": lambda search: _modelled(search, 0.0),  # without exploration
    "random": _random,
    "canonical": _canonical,
    "plain": _plain,
}
