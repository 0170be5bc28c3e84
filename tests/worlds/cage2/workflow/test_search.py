"""The search as logic: what it proposes, what it remembers, when it ends, and that it beats chance."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.workflow_synthetic import Problem, regrets
from freewheel.errors import SetupError
from freewheel.worlds.cage2.workflow.envs import CANONICAL, ORDERS, Order, distance
from freewheel.worlds.cage2.workflow.search import Outcome, Proposal, Rules, Search, Strategy, Trial, run

RULES = Rules("random", total_episodes=1000, max_episodes=100, least_episodes=10, threshold=0.8, seed=3)


def outcome(env_return: float, compliance: float | None = 1.0, episodes: int = 100, run_name: str = "") -> Outcome:
    return Outcome(env_return, 0.0, compliance, episodes, "episodes", run_name)


def tried(order: Order, *args: Any, **more: Any) -> Trial:
    return Trial(Proposal(0, order, 100), outcome(*args, **more))


def searched(
    rules: Rules, trial: Callable[[Proposal], Outcome], saved: Callable[[Search], None] = lambda search: None
) -> Search:
    search = Search(rules)
    run(search, trial, lambda: saved(search))
    return search


def steady(proposal: Proposal) -> Outcome:
    return outcome(-1.0, episodes=proposal.episodes, run_name=f"{proposal.number:03d}")


def test_plain_has_no_workflow_and_all_episodes_in_one_trial() -> None:
    search = searched(replace(RULES, strategy="plain"), steady)
    assert [trial.proposal for trial in search.trials] == [Proposal(0, None, 1000, fixed=True)]


def test_canonical_shares_the_episodes_out() -> None:
    search = searched(replace(RULES, strategy="canonical", max_episodes=10), steady)
    assert [trial.order for trial in search.trials] == list(CANONICAL.values())
    assert [trial.proposal.episodes for trial in search.trials] == [166, 166, 167, 167, 167, 167]
    assert all(trial.proposal.fixed for trial in search.trials)


def test_random_tries_others_first_and_depends_on_the_seed_alone() -> None:
    orders = [[trial.order for trial in searched(replace(RULES, seed=seed), steady).trials] for seed in (3, 3, 4)]
    assert len(set(orders[0])) == len(orders[0]) == 10
    assert orders[0] == orders[1] != orders[2]


def test_random_comes_back_when_there_are_no_others() -> None:
    trials = [tried(order, -1.0, episodes=50) for order in ORDERS]
    rules = replace(RULES, total_episodes=120 * 50 + 1000)
    assert Search(rules, trials).propose() is not None
    assert Search(rules, [tried(order, -1.0, episodes=95) for order in ORDERS]).propose() is None


def test_every_strategy_spends_the_same_episodes() -> None:
    strategies: tuple[Strategy, ...] = ("gp", "greedy", "random", "canonical", "plain")
    for strategy in strategies:
        assert searched(replace(RULES, strategy=strategy, total_episodes=600), steady).spent == 600, strategy


def test_greedy_is_the_bound_without_exploration() -> None:
    best = ORDERS[40]
    trials = [tried(order, -2.0 * distance(order, best)) for order in ORDERS if distance(order, best) <= 2]
    rules = replace(RULES, strategy="gp", total_episodes=10_000, max_episodes=500)
    bold, timid = (Search(replace(rules, beta=beta), trials).propose() for beta in (50.0, 0.0))
    greedy = Search(replace(rules, strategy="greedy", beta=50.0), trials).propose()
    assert bold is not None
    assert greedy is not None
    assert greedy == timid
    assert (greedy.order, greedy.ucb) == (best, greedy.mean)
    assert bold.order is not None
    assert distance(bold.order, best) > 4
    assert bold.ucb == pytest.approx((bold.mean or 0.0) + 50.0 * (bold.std or 0.0))


def test_the_bound_is_the_highest_of_those_that_may_be_compliant() -> None:
    """Around one order returns are high and compliance is hopeless: the search goes elsewhere, as long as it can."""
    lure, safe = ORDERS[0], ORDERS[119]
    near = [order for order in ORDERS if distance(order, lure) <= 2]
    trials = [tried(order, -1.0, 0.1) for order in near[:8]]
    trials += [tried(order, -9.0, 1.0) for order in ORDERS if distance(order, safe) <= 1]
    proposal = Search(replace(RULES, strategy="gp", total_episodes=10_000, max_episodes=500), trials).propose()
    assert proposal is not None
    assert proposal.order is not None
    assert distance(proposal.order, lure) > 4
    assert proposal.feasibility is not None
    assert proposal.feasibility >= 0.2


def test_where_compliance_never_applied_it_constrains_nothing() -> None:
    trials = [tried(ORDERS[0], -5.0, None), tried(ORDERS[1], -1.0, None)]
    proposal = Search(replace(RULES, strategy="gp"), trials).propose()
    assert proposal is not None
    assert proposal.feasibility == 1.0


def test_without_scikit_learn_a_modelled_search_says_so_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "freewheel.worlds.cage2.workflow.surrogate", raising=False)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    for name in [name for name in sys.modules if name.startswith("sklearn.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SetupError, match=r"needs sklearn.*: pip install 'freewheel\[workflow\]'"):
        Search(replace(RULES, strategy="gp")).propose()
    assert Search(RULES).propose() is not None


def test_failed_orders_are_not_proposed_again() -> None:
    bad = {order for order in ORDERS if order[0] in ("user", "op_host")}
    strategies: tuple[Strategy, ...] = ("random", "gp")
    for strategy in strategies:
        rules = replace(RULES, strategy=strategy, total_episodes=800, max_episodes=1000, least_episodes=40)

        def trial(proposal: Proposal) -> Outcome:
            assert proposal.order is not None
            return outcome(-1.0, 0.5 if proposal.order in bad else 0.9, episodes=40)

        search = searched(rules, trial)
        orders = {trial.order for trial in search.trials}
        assert search.failed == {order for order in orders if order in bad}
        assert search.failed
        assert not search.failed & set(search.candidates)
        assert {order for order in orders if order not in bad} <= set(search.candidates)


def test_an_order_to_which_compliance_does_not_apply_has_not_failed() -> None:
    search = Search(RULES, [tried(ORDERS[0], -1.0, None), tried(ORDERS[1], -1.0, 0.79), tried(ORDERS[2], -1.0, 0.8)])
    assert search.failed == {ORDERS[1]}


def test_the_best_is_compliant_before_it_is_good() -> None:
    trials = [tried(ORDERS[0], -1.0, 0.5), tried(ORDERS[1], -9.0, 0.8), tried(ORDERS[2], -5.0, 0.95)]
    best = [Search(RULES, trials[:count]).best for count in range(4)]
    assert best == [None, trials[0], trials[1], trials[2]]


def test_where_none_is_compliant_the_nearest_to_it_is_best() -> None:
    trials = [tried(ORDERS[0], -1.0, 0.5), tried(ORDERS[1], -9.0, 0.7), tried(ORDERS[2], -0.0, None)]
    assert Search(RULES, trials).best == trials[1]


def test_an_order_is_worth_what_its_last_trial_was() -> None:
    trials = [tried(ORDERS[0], -1.0), tried(ORDERS[1], -2.0), tried(ORDERS[0], -3.0)]
    assert Search(RULES, trials).best == trials[1]


def test_training_begins_with_the_nearest_order() -> None:
    order = ORDERS[0]
    near, far = (order[1], order[0], *order[2:]), order[::-1]
    twin = (*order[:3], order[4], order[3])
    trials = [tried(near, -5.0, run_name="near"), tried(far, -1.0, run_name="far")]
    assert Search(RULES, trials).nearest(order) == "near"
    assert Search(RULES, [*trials, tried(twin, -4.0, run_name="twin")]).nearest(order) == "twin"  # as near, and better
    assert Search(RULES, [*trials, tried(order, -9.0, run_name="own")]).nearest(order) == "own"
    assert Search(replace(RULES, warm_start=False), trials).nearest(order) is None
    assert Search(RULES).nearest(order) is None


def test_a_workflow_has_its_cap_over_all_its_trials() -> None:
    search = Search(RULES, [tried(ORDERS[0], -1.0, episodes=60), tried(ORDERS[0], -1.0, episodes=25)])
    assert search.allowance(ORDERS[0]) == 15
    assert ORDERS[0] in search.candidates
    search.trials.append(tried(ORDERS[0], -1.0, episodes=6))
    assert ORDERS[0] not in search.candidates  # 9 are left, fewer than a trial needs


def test_the_total_ends_the_search_and_no_crumbs_are_left() -> None:
    assert Search(RULES, [tried(ORDERS[0], -1.0, episodes=991)]).propose() is None
    last = Search(RULES, [tried(ORDERS[0], -1.0, episodes=895)]).propose()
    assert last is not None
    assert last.episodes == 105  # 100 would leave 5, too few for another trial


def test_a_trial_that_ends_early_leaves_its_episodes_to_others() -> None:
    search = searched(RULES, lambda proposal: outcome(-1.0, episodes=proposal.episodes // 2))
    assert len(search.trials) > 15
    assert search.left < RULES.least_episodes


def test_fixed_episodes_are_passed_on() -> None:
    proposal = Search(replace(RULES, fixed_episodes=True)).propose()
    assert proposal is not None
    assert proposal.fixed


@pytest.mark.parametrize("strategy", ["gp", "random"])
@pytest.mark.parametrize("killed", [1, 4])
def test_a_search_that_is_taken_up_decides_as_if_it_had_not_ended(strategy: Strategy, killed: int) -> None:
    rules, problem = replace(RULES, strategy=strategy, total_episodes=700, threshold=0.85), Problem(5)
    whole = searched(rules, problem.trial)
    again = Search(rules, whole.trials[:killed])
    run(again, problem.trial, lambda: None)
    assert again.trials == whole.trials


def test_the_process_beats_chance_at_equal_episodes() -> None:
    """20 problems whose best order is known, 10 trials each: the regret of the order chosen in the end."""
    strategies: tuple[Strategy, ...] = ("gp", "random")
    final = {name: np.array([regrets(name, seed, 10)[-1][1] for seed in range(20)]) for name in strategies}
    difference = final["random"] - final["gp"]
    flips = np.random.default_rng(0).choice([-1.0, 1.0], size=(20_000, 20))
    chance = np.mean((flips * difference).mean(axis=1) >= difference.mean())
    assert final["gp"].mean() < 0.5 * final["random"].mean()
    assert chance < 0.01  # of so great a difference, if signs were thrown like coins
