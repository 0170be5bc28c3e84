"""Advantages and value targets against explicit sums, in float64, of numpy arrays and of tensors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freewheel.core import NDArray
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.ppo.targets import continues, estimate, temporal_difference


class Rows(NamedTuple):
    """[T, B] each, of a random world with ends of both kinds and gaps."""

    reward: NDArray
    terminated: NDArray
    truncated: NDArray
    valid: NDArray
    value: NDArray  # V(obs)
    next_value: NDArray  # V(next_obs)
    ratio: NDArray

    @classmethod
    def random(cls, shape: tuple[int, int], seed: int, ends: float, gaps: float) -> Rows:
        rng = np.random.default_rng(seed)
        terminated, truncated = rng.random((2, *shape)) < ends
        valid = rng.random(shape) >= gaps
        reward, value, fresh = rng.normal(size=(3, *shape))
        next_value = fresh.copy()  # that of the next row, unless an end or a gap lies between
        joined = ~(terminated | truncated)[:-1] & valid[:-1] & valid[1:]
        next_value[:-1][joined] = value[1:][joined]
        return cls(reward, terminated, truncated, valid, value, next_value, rng.lognormal(0, 1, shape))

    def targets(self, config: PPOConfig, ratio: NDArray | None) -> tuple[NDArray, NDArray]:
        """Computed in numpy, after a look whether torch finds the same."""
        found = compute(self, config, ratio)
        parts: Any = map(torch.from_numpy, self)
        tensors: Any = compute(Rows(*parts), config, None if ratio is None else torch.tensor(ratio))
        for ours, theirs in zip(found, tensors, strict=True):
            np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6, atol=1e-6)
            assert str(theirs.dtype).removeprefix("torch.") == str(ours.dtype)
        return found

    def piece(self, t: int, lane: int) -> range:
        """The steps from t to the end of its episode, or to where the rows are cut."""
        end = t
        while (
            end + 1 < len(self.valid)
            and self.valid[end + 1, lane]
            and not (self.terminated[end, lane] or self.truncated[end, lane])
        ):
            end += 1
        return range(t, end + 1)

    def delta(self, t: int, lane: int, gamma: float) -> float:
        future = 0.0 if self.terminated[t, lane] else gamma * self.next_value[t, lane]
        return float(self.reward[t, lane] + future - self.value[t, lane])


def compute(rows: Any, config: PPOConfig, ratio: Any) -> tuple[Any, Any]:
    delta = temporal_difference(rows.reward, rows.terminated, rows.value, rows.next_value, config.gamma)
    return estimate(delta, rows.value, continues(rows.terminated, rows.truncated, rows.valid), ratio, config)


def textbook(rows: Rows, t: int, lane: int, config: PPOConfig) -> float:
    """GAE: the discounted sum of temporal differences to the end of the piece."""
    decay = config.gamma * config.gae_lambda
    return math.fsum(decay ** (k - t) * rows.delta(k, lane, config.gamma) for k in rows.piece(t, lane))


def correction(rows: Rows, t: int, lane: int, config: PPOConfig) -> float:
    """Δ as the sum over the piece, each difference weighted by the clipped ratios on the way to it."""
    decay, terms = config.gamma * config.gae_lambda, []
    for k in rows.piece(t, lane):
        way = math.prod(min(config.c_bar, rows.ratio[i, lane]) for i in range(t, k))
        own = min(config.rho_bar, rows.ratio[k, lane])
        terms.append(decay ** (k - t) * way * own * rows.delta(k, lane, config.gamma))
    return math.fsum(terms)


def discount(gamma: float, lam: float, rho_bar: float = 1.0, c_bar: float = 1.0) -> PPOConfig:
    return PPOConfig(gamma=gamma, gae_lambda=lam, rho_bar=rho_bar, c_bar=c_bar)


unit = st.floats(0, 1)
shapes = st.tuples(st.integers(1, 12), st.integers(1, 3))
worlds = st.builds(
    Rows.random, shapes, st.integers(0, 2**32 - 1), st.sampled_from([0, 0.2, 0.6]), st.sampled_from([0, 0.2, 0.6])
)


@given(rows=worlds, gamma=unit, lam=unit)
def test_without_lag_it_is_generalised_advantage_estimation(rows: Rows, gamma: float, lam: float) -> None:
    config = discount(gamma, lam)
    advantage, value = rows.targets(config, None)
    for t, lane in zip(*rows.valid.nonzero(), strict=True):
        expected = textbook(rows, t, lane, config)
        assert advantage[t, lane] == pytest.approx(expected, rel=1e-12, abs=1e-12)
        assert value[t, lane] == pytest.approx(rows.value[t, lane] + expected, rel=1e-12, abs=1e-12)


@given(rows=worlds, gamma=unit, lam=unit, rho_bar=st.floats(1, 3), c_bar=st.floats(1, 3))
def test_a_ratio_of_one_is_no_ratio(rows: Rows, gamma: float, lam: float, rho_bar: float, c_bar: float) -> None:
    ones = rows.targets(discount(gamma, lam, rho_bar, c_bar), np.ones_like(rows.ratio))
    assert all(map(np.array_equal, ones, rows.targets(discount(gamma, lam), None)))


@given(rows=worlds, gamma=unit, lam=unit, rho_bar=st.floats(0.1, 3), c_bar=st.floats(0.1, 3))
def test_under_lag_differences_are_weighted_by_clipped_ratios(
    rows: Rows, gamma: float, lam: float, rho_bar: float, c_bar: float
) -> None:
    config = discount(gamma, lam, rho_bar, c_bar)
    advantages, values = rows.targets(config, rows.ratio)
    for t, lane in zip(*rows.valid.nonzero(), strict=True):
        later = correction(rows, t + 1, lane, config) if len(rows.piece(t, lane)) > 1 else 0.0
        advantage = rows.delta(t, lane, gamma) + gamma * lam * later
        target = rows.value[t, lane] + correction(rows, t, lane, config)
        assert advantages[t, lane] == pytest.approx(advantage, rel=1e-9, abs=1e-9)
        assert values[t, lane] == pytest.approx(target, rel=1e-9, abs=1e-9)


def test_the_future_counts_through_time_limits_and_not_through_true_ends() -> None:
    row = np.ones((1, 3))
    ended = np.array([[True, False, True]])
    delta = temporal_difference(row, ended, 5 * row, np.array([[np.nan, 8.0, np.inf]]), gamma=0.5)
    assert delta.tolist() == [[1 - 5, 1 + 4 - 5, 1 - 5]]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_dtype_is_kept(dtype: type[np.floating]) -> None:
    rows = Rows.random((4, 2), 0, 0.2, 0.0)
    narrow = rows._replace(
        **{name: getattr(rows, name).astype(dtype) for name in ("reward", "value", "next_value", "ratio")}
    )
    for ratio in (None, narrow.ratio):
        assert {part.dtype for part in narrow.targets(discount(0.99, 0.95), ratio)} == {np.dtype(dtype)}
