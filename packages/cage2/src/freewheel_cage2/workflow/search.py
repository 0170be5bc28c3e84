"""Searches: which workflow to try next."""

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
FEASIBLE = 0.2  # an order is worth a trial if it reaches the compliance threshold with this probability


@dataclass(frozen=True)
class SearchRules:
    """The rules of a search."""

    strategy: Strategy
    total_episodes: int
    max_episodes: int  # of one workflow, all its trials together
    least_episodes: int  # of a trial: with fewer left the search is over
    threshold: float  # of compliance
    beta: float = 2.0
    warm_start: bool = True
    fixed_episodes: bool = False  # no trial ends before its episodes are played
    seed: int = 0


@dataclass(frozen=True)
class Proposal:
    """A trial to make, and what the model predicts for it."""

    number: int  # of the trial
    order: Order | None  # None: no workflow
    episodes: int  # at most
    init: str | None = None  # the run with the initial weights
    fixed: bool = False  # only the number of episodes ends it
    mean: float | None = None  # of the environment's return
    std: float | None = None
    ucb: float | None = None
    feasibility: float | None = None  # the probability that it reaches the threshold


@dataclass(frozen=True)
class TrialOutcome:
    """The result of a trial: means over its last episodes."""

    env_return: float
    alignment: float
    compliance: float | None  # None: no fix at all
    episodes: int  # played, all of them
    ended: str
    run: str  # where its weights are


@dataclass(frozen=True)
class WorkflowTrial:
    """A proposal and its outcome."""

    proposal: Proposal
    outcome: TrialOutcome

    @property
    def order(self) -> Order | None:
        return self.proposal.order


class WorkflowSearch:
    """All trials so far. The next one depends only on the rules and the trials, so that a search can be resumed."""

    def __init__(self, rules: SearchRules, trials: Iterable[WorkflowTrial] = ()) -> None:
        self.rules, self.trials = rules, list(trials)

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
        """Orders that stayed below the threshold until they were stopped or out of episodes: they are not proposed again."""
        return frozenset(trial.order for trial in self.latest if trial.order is not None and self.failure(trial))

    @property
    def latest(self) -> list[WorkflowTrial]:
        """The last trial of each order."""
        return list({trial.order: trial for trial in self.trials}.values())

    def failure(self, trial: WorkflowTrial) -> bool:
        """Whether it ended below the threshold; not if there was no compliance to measure."""
        compliance = trial.outcome.compliance
        return compliance is not None and compliance < self.rules.threshold

    @property
    def best(self) -> WorkflowTrial | None:
        """Among the orders that reach the threshold, the one with the highest return; if none does, the most compliant one."""

        def merit(trial: WorkflowTrial) -> tuple[bool, float, float]:
            outcome = trial.outcome
            compliance = -1.0 if outcome.compliance is None else outcome.compliance
            reached = compliance >= self.rules.threshold
            return reached, 0.0 if reached else compliance, outcome.env_return

        return max(self.latest, key=merit, default=None)

    def propose(self) -> Proposal | None:
        """The next trial; None if the budget is used up or no order is left."""
        if self.left < self.rules.least_episodes:
            return None
        return STRATEGIES[self.rules.strategy](self)

    @property
    def candidates(self) -> list[Order]:
        """Orders that may be tried, shuffled, so that the first of equal ones is a random one."""
        failed, least = self.failed, self.rules.least_episodes
        allowed = [order for order in ORDERS if order not in failed and self.allowance(order) >= least]
        shuffled = generator(self.rules.seed, "workflow", len(self.trials)).permutation(len(allowed))
        return [allowed[index] for index in shuffled]

    def allowance(self, order: Order) -> int:
        """Episodes that a workflow has left."""
        played = sum(trial.outcome.episodes for trial in self.trials if trial.order == order)
        return self.rules.max_episodes - played

    def nearest(self, order: Order) -> str | None:
        """The run of the most similar order that was trained; of equally similar ones, the better."""
        trained = [(trial, trial.order) for trial in self.latest if trial.order is not None]
        if not trained or not self.rules.warm_start:
            return None
        return min(trained, key=lambda item: (distance(item[1], order), -item[0].outcome.env_return))[0].outcome.run

    def episodes(self, wanted: int) -> int:
        """This many, or all that are left if the rest were too few for another trial."""
        return self.left if self.left - wanted < self.rules.least_episodes else wanted

    def trial_of(self, order: Order) -> Proposal:
        """A trial of an order, without a prediction."""
        episodes = self.episodes(min(self.allowance(order), self.left))
        return Proposal(len(self.trials), order, episodes, self.nearest(order), self.rules.fixed_episodes)


def run(search: WorkflowSearch, trial: Callable[[Proposal], TrialOutcome], save: Callable[[], None]) -> None:
    """Make trials until none is left; the state is saved after every trial."""
    while (proposal := search.propose()) is not None:
        search.trials.append(WorkflowTrial(proposal, trial(proposal)))
        save()


def _plain(search: WorkflowSearch) -> Proposal | None:
    """No workflow: one trial that has all episodes."""
    return None if search.trials else Proposal(0, None, search.left, fixed=True)


def _canonical(search: WorkflowSearch) -> Proposal | None:
    """Each of the canonical orders, with an equal share of the episodes."""
    tried = {trial.order for trial in search.trials}
    waiting = [order for order in CANONICAL.values() if order not in tried]
    if not waiting:
        return None
    order = waiting[0]
    return Proposal(len(search.trials), order, max(1, search.left // len(waiting)), search.nearest(order), fixed=True)


def _random(search: WorkflowSearch) -> Proposal | None:
    """Random orders; those not tried yet first."""
    tried = {trial.order for trial in search.trials}
    candidates = sorted(search.candidates, key=lambda order: order in tried)
    return search.trial_of(candidates[0]) if candidates else None


def _modelled(search: WorkflowSearch, beta: float) -> Proposal | None:
    """The highest upper confidence bound of the return, among orders that probably reach the threshold."""
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
        raise SetupError(f"a modelled search needs {error.name}: {hint}") from None
    return Surrogate


STRATEGIES: Mapping[Strategy, Callable[[WorkflowSearch], Proposal | None]] = {
    "gp": lambda search: _modelled(search, search.rules.beta),
    "greedy": lambda search: _modelled(search, 0.0),  # without exploration
    "random": _random,
    "canonical": _canonical,
    "plain": _plain,
}
