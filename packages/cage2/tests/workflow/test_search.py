"""Workflow search: proposals, state and end; it beats chance; and the Gaussian process agrees with a calculation by hand."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import ConstantKernel, WhiteKernel

from freewheel.core import NDArray
from freewheel.errors import SetupError
from freewheel_cage2.workflow.envs import CANONICAL, ORDERS, Order, distance, precedence
from freewheel_cage2.workflow.search import (
    Proposal,
    SearchRules,
    Strategy,
    TrialOutcome,
    WorkflowSearch,
    WorkflowTrial,
    run,
)
from freewheel_cage2.workflow.surrogate import AMPLITUDE, DECAY, NOISE, MallowsKernel, OrderPrediction, Surrogate
from packages.cage2.tests.support.workflow_problem import Problem, regrets

RULES = SearchRules("random", total_episodes=1000, max_episodes=100, least_episodes=10, threshold=0.8, seed=3)


def outcome(env_return: float, compliance: float | None = 1.0, episodes: int = 100, run_name: str = "") -> TrialOutcome:
    return TrialOutcome(env_return, 0.0, compliance, episodes, "episodes", run_name)


def tried(order: Order, *args: Any, **more: Any) -> WorkflowTrial:
    return WorkflowTrial(Proposal(0, order, 100), outcome(*args, **more))


def searched(
    rules: SearchRules,
    trial: Callable[[Proposal], TrialOutcome],
    saved: Callable[[WorkflowSearch], None] = lambda search: None,
) -> WorkflowSearch:
    search = WorkflowSearch(rules)
    run(search, trial, lambda: saved(search))
    return search


def steady(proposal: Proposal) -> TrialOutcome:
    return outcome(-1.0, episodes=proposal.episodes, run_name=f"{proposal.number:03d}")


def test_the_baselines_share_the_episodes_out() -> None:
    search = searched(replace(RULES, strategy="plain"), steady)
    assert [trial.proposal for trial in search.trials] == [Proposal(0, None, 1000, fixed=True)]
    search = searched(replace(RULES, strategy="canonical", max_episodes=10), steady)
    assert [trial.order for trial in search.trials] == list(CANONICAL.values())
    assert [trial.proposal.episodes for trial in search.trials] == [166, 166, 167, 167, 167, 167]
    assert all(trial.proposal.fixed for trial in search.trials)


def test_random_tries_others_first_and_depends_on_the_seed_alone() -> None:
    orders = [[trial.order for trial in searched(replace(RULES, seed=seed), steady).trials] for seed in (3, 3, 4)]
    assert len(set(orders[0])) == len(orders[0]) == 10
    assert orders[0] == orders[1] != orders[2]
    rules = replace(RULES, total_episodes=120 * 50 + 1000)  # an order is tried again when there are no others
    assert WorkflowSearch(rules, [tried(order, -1.0, episodes=50) for order in ORDERS]).propose() is not None
    assert WorkflowSearch(rules, [tried(order, -1.0, episodes=95) for order in ORDERS]).propose() is None


@pytest.mark.parametrize("strategy", get_args(Strategy))
def test_every_strategy_spends_the_same_episodes(strategy: Strategy) -> None:
    assert searched(replace(RULES, strategy=strategy, total_episodes=600), steady).spent == 600


def test_greedy_is_the_bound_without_exploration() -> None:
    best = ORDERS[40]
    trials = [tried(order, -2.0 * distance(order, best)) for order in ORDERS if distance(order, best) <= 2]
    rules = replace(RULES, strategy="gp", total_episodes=10_000, max_episodes=500)
    bold, timid = (WorkflowSearch(replace(rules, beta=beta), trials).propose() for beta in (50.0, 0.0))
    greedy = WorkflowSearch(replace(rules, strategy="greedy", beta=50.0), trials).propose()
    assert bold is not None
    assert greedy is not None
    assert greedy == timid
    assert (greedy.order, greedy.ucb) == (best, greedy.mean)
    assert bold.order is not None
    assert distance(bold.order, best) > 4
    assert bold.ucb == pytest.approx((bold.mean or 0.0) + 50.0 * (bold.std or 0.0))


def test_the_bound_is_the_highest_of_those_that_may_be_compliant() -> None:
    """Near one order returns are high and compliance is hopeless, so the search tries other orders while it can."""
    lure, safe = ORDERS[0], ORDERS[119]
    near = [order for order in ORDERS if distance(order, lure) <= 2]
    trials = [tried(order, -1.0, 0.1) for order in near[:8]]
    trials += [tried(order, -9.0, 1.0) for order in ORDERS if distance(order, safe) <= 1]
    proposal = WorkflowSearch(replace(RULES, strategy="gp", total_episodes=10_000, max_episodes=500), trials).propose()
    assert proposal is not None
    assert proposal.order is not None
    assert distance(proposal.order, lure) > 4
    assert proposal.feasibility is not None
    assert proposal.feasibility >= 0.2


def test_where_compliance_never_applied_it_constrains_nothing_and_fixed_episodes_are_passed_on() -> None:
    trials = [tried(ORDERS[0], -5.0, None), tried(ORDERS[1], -1.0, None)]
    proposal = WorkflowSearch(replace(RULES, strategy="gp", fixed_episodes=True), trials).propose()
    assert proposal is not None
    assert (proposal.feasibility, proposal.fixed) == (1.0, True)


def test_without_scikit_learn_a_modelled_search_fails_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "freewheel_cage2.workflow.surrogate", raising=False)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    for name in [name for name in sys.modules if name.startswith("sklearn.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SetupError, match=r"need sklearn.*: pip install 'freewheel-cage2\[workflow\]'"):
        WorkflowSearch(replace(RULES, strategy="gp")).propose()
    assert WorkflowSearch(RULES).propose() is not None


@pytest.mark.parametrize("strategy", ["random", "gp"])
def test_failed_orders_are_not_proposed_again(strategy: Strategy) -> None:
    bad = {order for order in ORDERS if order[0] in ("user", "op_host")}
    rules = replace(RULES, strategy=strategy, total_episodes=400, max_episodes=1000, least_episodes=40)
    search = searched(rules, lambda proposal: outcome(-1.0, 0.5 if proposal.order in bad else 0.9, episodes=40))
    orders = {trial.order for trial in search.trials if trial.order is not None}
    assert search.failed == orders & bad != set()
    assert set(search.candidates) & orders == orders - bad
    search = WorkflowSearch(RULES, [tried(ORDERS[k], -1.0, share) for k, share in enumerate((None, 0.79, 0.8))])
    assert search.failed == {ORDERS[1]}, "where compliance does not apply, nothing has failed"


@pytest.mark.parametrize(
    ("results", "best"),
    [
        ([], None),
        ([(0, -1.0, 0.5)], 0),
        ([(0, -1.0, 0.5), (1, -9.0, 0.8)], 1),  # compliant before good
        ([(0, -1.0, 0.5), (1, -9.0, 0.8), (2, -5.0, 0.95)], 2),
        ([(0, -1.0, 0.5), (1, -9.0, 0.7), (2, 0.0, None)], 1),  # none is compliant, so the nearest one is chosen
        ([(0, -1.0, 1.0), (1, -2.0, 1.0), (0, -3.0, 1.0)], 1),  # the last trial of an order counts
    ],
)
def test_which_trial_is_best(results: list[tuple[int, float, float | None]], best: int | None) -> None:
    trials = [tried(ORDERS[order], worth, compliance) for order, worth, compliance in results]
    assert WorkflowSearch(RULES, trials).best == (None if best is None else trials[best])


def test_training_begins_with_the_nearest_order() -> None:
    order = ORDERS[0]
    near, far = (order[1], order[0], *order[2:]), order[::-1]
    twin = (*order[:3], order[4], order[3])
    trials = [tried(near, -5.0, run_name="near"), tried(far, -1.0, run_name="far")]
    assert WorkflowSearch(RULES, trials).nearest(order) == "near"
    assert (
        WorkflowSearch(RULES, [*trials, tried(twin, -4.0, run_name="twin")]).nearest(order) == "twin"
    )  # as near, and better
    assert WorkflowSearch(RULES, [*trials, tried(order, -9.0, run_name="own")]).nearest(order) == "own"
    assert WorkflowSearch(replace(RULES, warm_start=False), trials).nearest(order) is None
    assert WorkflowSearch(RULES).nearest(order) is None


def test_a_workflow_has_its_cap_over_all_its_trials() -> None:
    search = WorkflowSearch(RULES, [tried(ORDERS[0], -1.0, episodes=60), tried(ORDERS[0], -1.0, episodes=25)])
    assert search.allowance(ORDERS[0]) == 15
    assert ORDERS[0] in search.candidates
    search.trials.append(tried(ORDERS[0], -1.0, episodes=6))
    assert ORDERS[0] not in search.candidates  # 9 are left, fewer than a trial needs


def test_the_total_ends_the_search_and_no_crumbs_are_left() -> None:
    assert WorkflowSearch(RULES, [tried(ORDERS[0], -1.0, episodes=991)]).propose() is None
    last = WorkflowSearch(RULES, [tried(ORDERS[0], -1.0, episodes=895)]).propose()
    assert last is not None
    assert last.episodes == 105  # 100 would leave 5, too few for another trial
    search = searched(RULES, lambda proposal: outcome(-1.0, episodes=proposal.episodes // 2))
    assert len(search.trials) > 15, "a trial that ends early leaves its episodes to others"
    assert search.left < RULES.least_episodes


@pytest.mark.parametrize(("strategy", "killed"), [("gp", 4), ("random", 1)])
def test_a_search_that_is_taken_up_decides_as_if_it_had_not_ended(strategy: Strategy, killed: int) -> None:
    rules, problem = replace(RULES, strategy=strategy, total_episodes=700, threshold=0.85), Problem(5)
    whole = searched(rules, problem.trial)
    again = WorkflowSearch(rules, whole.trials[:killed])
    run(again, problem.trial, lambda: None)
    assert again.trials == whole.trials


@pytest.mark.system
def test_the_process_beats_chance_at_equal_episodes() -> None:
    """Return the regret of the chosen orders in 20 problems with known best orders, after 10 trials each."""
    strategies: tuple[Strategy, ...] = ("gp", "random")
    final = {name: np.array([regrets(name, seed, 10)[-1][1] for seed in range(20)]) for name in strategies}
    difference = final["random"] - final["gp"]
    flips = np.random.default_rng(0).choice([-1.0, 1.0], size=(20_000, 20))
    chance = np.mean((flips * difference).mean(axis=1) >= difference.mean())
    assert final["gp"].mean() < 0.5 * final["random"].mean()
    assert chance < 0.01  # probability of such a difference if the signs were random


EVERY = precedence(ORDERS)


def kernel_by_hand(one: list[Order], other: list[Order], decay: float) -> NDArray:
    return np.array([[math.exp(-decay * distance(a, b)) for b in other] for a in one])


@pytest.mark.parametrize("decay", [*DECAY, 0.3])
def test_the_kernel_is_positive_definite_over_all_orders(decay: float) -> None:
    assert np.linalg.eigvalsh(MallowsKernel(decay)(EVERY)).min() > 0


@pytest.mark.parametrize("decay", [0.05, 0.3, 2.0])
def test_the_gradient_is_that_of_the_kernel(decay: float) -> None:
    points, step = EVERY[::9], 1e-6
    value, gradient = MallowsKernel(decay)(points, eval_gradient=True)
    np.testing.assert_array_equal(value, MallowsKernel(decay)(points))
    above, below = (MallowsKernel(math.exp(math.log(decay) + sign * step))(points) for sign in (1, -1))
    np.testing.assert_allclose(gradient[..., 0], (above - below) / (2 * step), atol=1e-9)
    assert gradient.shape == (*value.shape, 1)
    assert MallowsKernel(decay, "fixed")(points, eval_gradient=True)[1].shape == (*value.shape, 0)


def test_the_posterior_is_the_one_computed_by_hand() -> None:
    tried = [CANONICAL[name] for name in ("critical-first", "outside-in", "defender-first")]
    values = [-20.0, -50.0, -26.0]
    amplitude, decay, noise = 1.5, 0.25, 0.2
    kernel = ConstantKernel(amplitude, "fixed") * MallowsKernel(decay, "fixed") + WhiteKernel(noise, "fixed")
    about = [ORDERS[3], tried[1], ORDERS[77]]
    belief = Surrogate(kernel=kernel).fit(tried, values).predict(about)

    centre, scale = np.mean(values), np.std(values)
    known = amplitude * kernel_by_hand(tried, tried, decay) + noise * np.eye(3)
    across = amplitude * kernel_by_hand(about, tried, decay)
    mean = across @ np.linalg.solve(known, (np.array(values) - centre) / scale)
    variance = amplitude - np.einsum("ij,ji->i", across, np.linalg.solve(known, across.T))
    np.testing.assert_allclose(belief.mean, centre + scale * mean, rtol=1e-6)
    np.testing.assert_allclose(belief.std, scale * np.sqrt(variance), rtol=1e-6)


def test_the_hyper_parameters_are_the_most_likely_ones_within_their_bounds() -> None:
    rng = np.random.default_rng(0)
    tried = [ORDERS[index] for index in rng.choice(120, 40, replace=False)]
    values = [-2.0 * distance(order, ORDERS[50]) + rng.standard_normal() for order in tried]
    process = Surrogate().fit(tried, values).process
    fitted = process.log_marginal_likelihood(process.kernel_.theta)
    grid = [np.geomspace(*bounds, 7) for bounds in (AMPLITUDE, DECAY, NOISE)]
    points = np.log(np.stack(np.meshgrid(*grid), -1).reshape(-1, 3))
    assert fitted >= max(process.log_marginal_likelihood(point) for point in points) - 1e-6
    bounds = np.log([AMPLITUDE, DECAY, NOISE])
    assert (process.kernel_.theta >= bounds[:, 0] - 1e-9).all()
    assert (process.kernel_.theta <= bounds[:, 1] + 1e-9).all()
    belief, far = Surrogate().fit(tried, values).predict(ORDERS), [distance(order, ORDERS[50]) for order in ORDERS]
    assert np.corrcoef(far, belief.mean)[0, 1] < -0.95, "what is near a good order is believed to be good"


def test_one_trial_and_equal_trials_are_no_trouble() -> None:
    for tried in ([ORDERS[0]], [ORDERS[0], ORDERS[1], ORDERS[1]]):
        belief = Surrogate().fit(tried, [0.75] * len(tried)).predict(ORDERS)
        np.testing.assert_allclose(belief.mean, 0.75)
        assert (belief.std > 0).any()


def test_the_probability_of_reaching_a_bound_is_that_of_a_normal_number() -> None:
    belief = OrderPrediction(np.array([0.9, 1.0, 0.7, 0.9]), np.array([0.1, 0.1, 0.1, 0.0]))
    np.testing.assert_allclose(belief.at_least(0.9), [0.5, 0.8413447, 0.0227501, 0.5], atol=1e-6)
