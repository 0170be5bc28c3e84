"""Acting in numpy: actions come with the right frequencies, masked ones never, greedy ones are the mode."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from freewheel.core import ActionSpec, EnvSpec, NDArray, Slice, Snapshot
from freewheel.policies.nets import TorchActor
from freewheel.policies.numpy_actor import NumpyActor, make_actor
from freewheel.policies.spec import ACTIVATIONS, FlatParams, PolicyConfig, PolicySpec, actor_layout, full_layout
from tests.support.places import SUPPORT

DRAWS = 100_000
#: A linear policy of three choices that reads one column of ones: its biases are its logits.
LINEAR = PolicySpec(1, "float32", ((0, 1),), ((0, 1),), (), None, "categorical", 3, (), "tanh", 0.0, "")


FOUR = replace(LINEAR, obs_size=5, mask=(1, 5), action_size=4)  # the same of four choices, with a mask


def actor_with(spec: PolicySpec, outputs: list[float], log_std: list[float] | None = None) -> NumpyActor:
    """An actor with the same outputs for every observation."""
    params = FlatParams(actor_layout(spec))
    params.views["norm.scale"][:] = 1
    params.views["actor.0.bias"][:] = outputs
    if log_std is not None:
        params.views["actor.log_std"][:] = log_std
    actor = NumpyActor(spec)
    actor.load(Snapshot(1, params.views))
    return actor


def chi_square(actions: NDArray, expected: NDArray) -> float:
    """Pearson's statistic of these draws against these probabilities, over the possible ones."""
    counts = np.bincount(actions, minlength=len(expected))[expected > 0]
    wanted = expected[expected > 0] * len(actions)
    return float((np.square(counts - wanted) / wanted).sum())


class Fixed(np.random.Generator):
    """A generator whose uniform draws are all the same number."""

    def __init__(self, value: float) -> None:
        super().__init__(np.random.SFC64(0))
        self.value = value

    def random(self, size: int) -> NDArray:  # type: ignore[override]
        return np.full(size, self.value)


@pytest.mark.parametrize("logits", [[0.0, 0.0, 0.0], [1.0, -1.0, 0.3], [1000.0, 999.0, 0.0], [-30.0, 2.0, 2.5]])
def test_choices_come_as_often_as_they_should(logits: list[float]) -> None:
    shifted = np.exp(np.array(logits) - max(logits))
    expected = shifted / shifted.sum()
    decision = actor_with(LINEAR, logits).act(np.ones((DRAWS, 1), np.float32), np.random.default_rng(0))
    possible = np.where(expected > 1e-6, expected, 0)
    assert chi_square(decision.action, possible) < 18.4  # p = 1e-4 with two degrees of freedom
    assert decision.action.dtype == np.int64
    np.testing.assert_allclose(decision.log_prob, np.log(expected[decision.action]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("allowed", [[1, 1, 0, 1], [0, 1, 0, 1], [1, 1, 1, 0], [0, 0, 1, 0], [1, 1, 1, 1]])
def test_masked_choices_are_never_made(allowed: list[int]) -> None:
    spec = FOUR
    logits = [0.5, -0.5, 3.0, 0.0]
    obs = np.tile(np.array([1, *allowed], np.float32), (DRAWS, 1))
    decision = actor_with(spec, logits).act(obs, np.random.default_rng(1))
    weights = np.exp(logits) * allowed
    expected = weights / weights.sum()
    assert np.isin(decision.action, np.flatnonzero(allowed)).all()
    assert chi_square(decision.action, expected) < 21.2  # p = 1e-4 with three
    np.testing.assert_allclose(decision.log_prob, np.log(expected[decision.action]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("draw", "choice"), [(0.0, 1), (1 - 2**-53, 2)], ids=["least", "greatest"])
def test_not_even_the_extreme_draws_land_on_a_masked_choice(draw: float, choice: int) -> None:
    spec = FOUR
    obs = np.array([[1, 0, 1, 1, 0]] * 7, np.float32)
    for logits in ([0.0, 0.0, 0.0, 0.0], [5.0, 0.1, -0.2, 9.0], [0.0, 1e-3, 2e-3, 0.0]):
        assert (actor_with(spec, logits).act(obs, Fixed(draw)).action == choice).all()


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_each_lane_has_its_own_mask(dtype: Literal["float32", "uint8"]) -> None:
    spec = replace(LINEAR, obs_size=4, mask=(1, 4), obs_dtype=dtype)
    obs = np.column_stack([np.ones(3), np.eye(3)]).astype(dtype)
    decision = actor_with(spec, [3.0, 0.0, -3.0]).act(obs, np.random.default_rng(0))
    assert decision.action.tolist() == [0, 1, 2]
    assert decision.log_prob.tolist() == [0, 0, 0]


def assert_normal(noise: NDArray) -> None:
    scale = 1 / math.sqrt(DRAWS)
    assert np.abs(noise.mean(axis=0)).max() < 4 * scale
    assert np.abs(noise.var(axis=0) - 1).max() < 4 * math.sqrt(2) * scale
    assert abs(noise.prod(axis=1).mean()) < 4 * scale
    assert np.abs((noise**3).mean(axis=0)).max() < 4 * math.sqrt(15) * scale


def test_gaussian_actions_have_the_right_moments() -> None:
    spec = replace(LINEAR, head="gaussian", action_size=2)
    log_std = [math.log(0.5), math.log(2.0)]
    decision = actor_with(spec, [1.0, -3.0], log_std).act(np.ones((DRAWS, 1), np.float32), np.random.default_rng(2))
    assert decision.action.dtype == np.float32
    noise = (decision.action.astype(np.float64) - [1.0, -3.0]) / [0.5, 2.0]
    assert_normal(noise)
    expected = -0.5 * np.square(noise).sum(axis=1) - math.log(2 * math.pi) - sum(log_std)
    np.testing.assert_allclose(decision.log_prob, expected, rtol=1e-5, atol=1e-5)


def test_squashed_actions_have_the_right_moments_and_stay_inside() -> None:
    actor = actor_with(replace(LINEAR, head="squashed", action_size=2), [0.3, -0.5, math.log(0.5), math.log(0.8)])
    action = actor.act(np.ones((DRAWS, 1), np.float32), np.random.default_rng(3)).action
    assert_normal((np.arctanh(action.astype(np.float64)) - [0.3, -0.5]) / [0.5, 0.8])


def test_greedy_is_the_mode_and_draws_nothing() -> None:
    obs = np.ones((2, 1), np.float32)
    rng = np.random.default_rng(0)
    before = rng.bit_generator.state
    masked = actor_with(replace(LINEAR, obs_size=4, mask=(1, 4)), [0.0, 9.0, 1.0])
    assert masked.act(np.array([[1, 1, 0, 1]], np.float32), rng, greedy=True).action.tolist() == [2]
    choice = actor_with(LINEAR, [0.0, 2.0, 1.0]).act(obs, rng, greedy=True)
    assert choice.action.tolist() == [1, 1]
    np.testing.assert_allclose(choice.log_prob, 2 - math.log(1 + math.exp(1) + math.exp(2)), rtol=1e-6)
    normal = actor_with(replace(LINEAR, head="gaussian"), [0.5, -1.0, 3.0], [-1.0, 0.0, 1.0]).act(obs, rng, greedy=True)
    assert normal.action.tolist() == [[0.5, -1.0, 3.0]] * 2
    np.testing.assert_allclose(normal.log_prob, [-1.5 * math.log(2 * math.pi)] * 2, rtol=1e-6)
    squashed = actor_with(replace(LINEAR, head="squashed", action_size=1), [0.5, -1.0]).act(obs, rng, greedy=True)
    np.testing.assert_allclose(squashed.action, np.tanh([[0.5]] * 2), rtol=1e-6)
    expected = 1.0 - 0.5 * math.log(2 * math.pi) - math.log(1 - math.tanh(0.5) ** 2)
    np.testing.assert_allclose(squashed.log_prob, [expected] * 2, rtol=1e-5)
    assert rng.bit_generator.state == before


def test_what_is_loaded_is_a_copy() -> None:
    spec = replace(LINEAR, head="gaussian", action_size=1)
    params = FlatParams(actor_layout(spec))
    params.views["actor.0.bias"][:] = 1
    actor, obs, rng = NumpyActor(spec), np.zeros((1, 1), np.float32), np.random.default_rng(0)
    actor.load(Snapshot(1, params.views))
    params.views["actor.0.bias"][:] = 2
    assert actor.act(obs, rng, greedy=True).action.tolist() == [[1]]
    actor.load(Snapshot(2, params.views))
    assert actor.act(obs, rng, greedy=True).action.tolist() == [[2]]


@pytest.mark.parametrize("hidden", [(), (6,)])
def test_the_observation_is_left_as_it_was_and_the_number_of_lanes_may_change(hidden: tuple[int, ...]) -> None:
    spec = replace(LINEAR, hidden=hidden, normalised=((0, 1),))
    params = FlatParams(actor_layout(spec))
    params.vector[:] = np.random.default_rng(0).normal(size=len(params.vector))
    actor = NumpyActor(spec)
    actor.load(Snapshot(0, params.views))
    rng = np.random.default_rng(1)
    for lanes in (3, 1, 5):
        obs = np.arange(lanes, dtype=np.float32)[:, None]
        decision = actor.act(obs, rng)
        assert obs[:, 0].tolist() == list(range(lanes))
        assert decision.action.shape == decision.log_prob.shape == (lanes,)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations(name: str) -> None:
    x = np.array([-200, -3, -1e-3, 0, 1e-3, 2, 200], np.float32)
    wide = x.astype(np.float64)
    expected = {
        "tanh": np.tanh(wide),
        "relu": wide * (wide > 0),
        "elu": np.where(wide > 0, wide, np.expm1(np.minimum(wide, 0))),
        "silu": wide / (1 + np.exp(-wide)),
    }[name]
    ACTIVATIONS[name](x, out=x)
    np.testing.assert_allclose(x, expected, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("greedy", [False, True])
def test_one_lane_alone_acts_as_it_would_beside_others(greedy: bool) -> None:
    """The path for one lane draws the same number, takes the same action and says the same log-probability, bit for bit."""
    space = EnvSpec("any", 2, 3, "float32", (Slice("obs", 0, 3, (3,)),), ActionSpec("discrete", 7))
    policy = PolicyConfig(hidden=(8,)).resolve(space)
    params = FlatParams(full_layout(policy))
    params.vector[:] = np.random.default_rng(1).standard_normal(len(params.vector))
    actor = NumpyActor(policy)
    actor.load(Snapshot(0, params.views))
    for seed in range(200):
        obs = np.random.default_rng(seed).standard_normal((1, 3)).astype(np.float32)
        alone = actor.act(obs, np.random.default_rng(seed), greedy=greedy)
        beside = actor.act(np.repeat(obs, 2, axis=0), np.random.default_rng(seed), greedy=greedy)
        assert alone.action[0] == beside.action[0]
        assert alone.log_prob[0] == pytest.approx(beside.log_prob[0], abs=1e-6)
        assert (alone.action.dtype, alone.log_prob.dtype) == (beside.action.dtype, beside.log_prob.dtype)


@pytest.mark.parametrize(("module", "kind"), [("", NumpyActor), ("custom_module:Shared", TorchActor)])
def test_networks_run_in_numpy_and_modules_in_torch(module: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SUPPORT)
    make = pickle.loads(pickle.dumps(make_actor(replace(LINEAR, module=module))))  # noqa: S301 - as it travels to a worker
    first, second = make(), make()
    assert {type(first), type(second)} == {kind}
    if isinstance(first, NumpyActor):
        assert not np.shares_memory(first.params.vector, second.params.vector)
