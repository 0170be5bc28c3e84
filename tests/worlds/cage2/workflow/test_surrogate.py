"""The Gaussian process over orders, against algebra done by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import ConstantKernel, WhiteKernel

from freewheel.core import NDArray
from freewheel.worlds.cage2.workflow.envs import CANONICAL, ORDERS, Order, distance, precedence
from freewheel.worlds.cage2.workflow.surrogate import AMPLITUDE, DECAY, NOISE, Belief, Mallows, Surrogate

EVERY = precedence(ORDERS)


def kernel_by_hand(one: list[Order], other: list[Order], decay: float) -> NDArray:
    return np.array([[math.exp(-decay * distance(a, b)) for b in other] for a in one])


def test_the_kernel_falls_with_kendalls_distance() -> None:
    some, others = list(ORDERS[::13]), list(ORDERS[5::17])
    ours = Mallows(0.4)(precedence(some), precedence(others))
    np.testing.assert_allclose(ours, kernel_by_hand(some, others, 0.4), rtol=1e-12)


@pytest.mark.parametrize("decay", [*DECAY, 0.001, 0.3, 10.0])
def test_the_kernel_is_positive_definite_over_all_orders(decay: float) -> None:
    assert np.linalg.eigvalsh(Mallows(decay)(EVERY)).min() > 0


@pytest.mark.parametrize("decay", [0.05, 0.3, 2.0])
def test_the_gradient_is_that_of_the_kernel(decay: float) -> None:
    points, step = EVERY[::9], 1e-6
    value, gradient = Mallows(decay)(points, eval_gradient=True)
    np.testing.assert_array_equal(value, Mallows(decay)(points))
    above, below = (Mallows(math.exp(math.log(decay) + sign * step))(points) for sign in (1, -1))
    np.testing.assert_allclose(gradient[..., 0], (above - below) / (2 * step), atol=1e-9)
    assert gradient.shape == (*value.shape, 1)
    assert Mallows(decay, "fixed")(points, eval_gradient=True)[1].shape == (*value.shape, 0)


def test_the_posterior_is_the_one_computed_by_hand() -> None:
    tried, values = (
        [CANONICAL[name] for name in ("critical-first", "outside-in", "defender-first")],
        [-20.0, -50.0, -26.0],
    )
    amplitude, decay, noise = 1.5, 0.25, 0.2
    kernel = ConstantKernel(amplitude, "fixed") * Mallows(decay, "fixed") + WhiteKernel(noise, "fixed")
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
    others = [
        process.log_marginal_likelihood(np.log(point)) for point in np.stack(np.meshgrid(*grid), -1).reshape(-1, 3)
    ]
    assert fitted >= max(others) - 1e-6
    bounds = np.log([AMPLITUDE, DECAY, NOISE])
    assert (process.kernel_.theta >= bounds[:, 0] - 1e-9).all()
    assert (process.kernel_.theta <= bounds[:, 1] + 1e-9).all()


def test_what_is_near_a_good_order_is_believed_to_be_good() -> None:
    best, rng = ORDERS[50], np.random.default_rng(1)
    tried = [ORDERS[index] for index in rng.choice(120, 40, replace=False)]
    belief = Surrogate().fit(tried, [-2.0 * distance(order, best) for order in tried]).predict(ORDERS)
    far = [distance(order, best) for order in ORDERS]
    assert np.corrcoef(far, belief.mean)[0, 1] < -0.95


def test_one_trial_and_equal_trials_are_no_trouble() -> None:
    for tried in ([ORDERS[0]], [ORDERS[0], ORDERS[1], ORDERS[1]]):
        belief = Surrogate().fit(tried, [0.75] * len(tried)).predict(ORDERS)
        np.testing.assert_allclose(belief.mean, 0.75)
        assert (belief.std > 0).any()


def test_the_probability_of_reaching_a_bound_is_that_of_a_normal_number() -> None:
    belief = Belief(np.array([0.9, 1.0, 0.7, 0.9]), np.array([0.1, 0.1, 0.1, 0.0]))
    np.testing.assert_allclose(belief.at_least(0.9), [0.5, 0.8413447, 0.0227501, 0.5], atol=1e-6)
