"""Gradients written by hand equal autograd's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.core import Snapshot
from freewheel.learn.ppo.analytic import Analytic, supports
from freewheel.learn.ppo.objective import Autograd, Coefficients, Minibatch
from freewheel.policies.nets import PolicyNet
from freewheel.policies.numpy_actor import NumpyActor
from freewheel.policies.spec import PolicySpec

SPEC = PolicySpec(6, "float32", ((0, 6),), ((0, 6),), (), None, "categorical", 4, (64, 64), "tanh", -0.3, "")
ROWS = 128


@st.composite
def specs(draw: st.DrawFn) -> PolicySpec:
    spec = replace(
        SPEC,
        head=draw(st.sampled_from(["categorical", "gaussian"])),
        activation=draw(st.sampled_from(["tanh", "relu", "elu"])),
        hidden=tuple(draw(st.lists(st.sampled_from([1, 7, 64]), max_size=3))),
        action_size=draw(st.integers(1, 5)),
        actor_columns=draw(st.sampled_from([((0, 6),), ((1, 3),), ((0, 2), (4, 6))])),
        critic_columns=draw(st.sampled_from([((0, 6),), ((2, 6),), ((0, 1), (3, 5))])),
    )
    masked = spec.head == "categorical" and draw(st.booleans())
    return replace(spec, obs_size=6 + spec.action_size, mask=(6, 6 + spec.action_size)) if masked else spec


def batch_for(net: PolicyNet, rng: np.random.Generator, *, weighted: bool, moved: float) -> Minibatch:
    """Rows that the policy itself chose; their ratios are spread around 1 by `moved`."""
    spec, actor = net.spec, NumpyActor(net.spec)
    actor.load(Snapshot(0, net.params.views))
    inputs = rng.normal(size=(ROWS, spec.obs_size)).astype(np.float32)
    if spec.mask is not None:
        allowed = rng.random((ROWS, spec.action_size)) < 0.6
        allowed[:, 0] |= ~allowed.any(axis=1)
        inputs[:, slice(*spec.mask)] = allowed
    action = actor.act(inputs, rng).action
    _, log_prob = Autograd(net).evaluate(inputs, action)
    drift, advantage, value = rng.normal(size=(3, ROWS)).astype(np.float32)
    weight = rng.random(ROWS).astype(np.float32) if weighted else None
    return Minibatch(inputs, action, log_prob + np.float32(moved) * drift, weight, advantage, value)


def random_net(spec: PolicySpec, rng: np.random.Generator) -> PolicyNet:
    net = PolicyNet(spec, rng)
    for name, view in net.params.views.items():
        if not name.startswith("norm."):
            view[...] = rng.normal(0, len(view) ** -0.5 if name.endswith("weight") else 0.3, view.shape)
    return net


@settings(max_examples=120)
@given(
    spec=specs(),
    seed=st.integers(0, 2**32 - 1),
    weighted=st.booleans(),
    moved=st.sampled_from([0.0, 0.05, 0.5]),
    entropy=st.sampled_from([0.0, 0.1]),
)
def test_gradients_and_losses_are_those_of_autograd(
    spec: PolicySpec, seed: int, weighted: bool, moved: float, entropy: float
) -> None:
    rng = np.random.default_rng(seed)
    net = random_net(spec, rng)
    batch = batch_for(net, rng, weighted=weighted, moved=moved)
    coefficients = Coefficients(clip=0.2, value=0.5, entropy=entropy)
    expected = Autograd(net).gradient(batch, coefficients)
    gradient = net.grad.numpy().copy()
    net.grad.fill_(99.0)  # every element has to be written
    found = Analytic(net).gradient(batch, coefficients)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(net.grad, gradient, rtol=1e-5, atol=1e-5 * np.abs(gradient).max())


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("head", ["categorical", "gaussian"])
def test_rows_beyond_the_clip_pull_no_more(head: str, sign: int) -> None:
    """A ratio of e with a positive advantage is clipped and flat; with a negative one it still pulls."""
    rng = np.random.default_rng(0)
    net = random_net(replace(SPEC, head="categorical" if head == "categorical" else "gaussian"), rng)
    batch = batch_for(net, rng, weighted=False, moved=0.0)
    batch = batch._replace(reference=batch.reference - 1, advantage=np.full(ROWS, sign, np.float32))
    losses = Analytic(net).gradient(batch, Coefficients(clip=0.2, value=0.0, entropy=0.0))
    assert losses.clipped == 1
    assert losses.policy == pytest.approx(-1.2 if sign > 0 else np.e, rel=1e-5)
    assert bool(net.grad.any()) == (sign < 0)


@pytest.mark.parametrize("masked", [False, True])
def test_evaluation_is_that_of_autograd(masked: bool) -> None:
    rng = np.random.default_rng(1)
    spec = replace(SPEC, obs_size=10, mask=(6, 10)) if masked else SPEC
    net = random_net(spec, rng)
    batch = batch_for(net, rng, weighted=False, moved=0.0)
    kept = batch.inputs.copy()
    for mine, theirs in zip(
        Analytic(net).evaluate(batch.inputs, batch.action),
        Autograd(net).evaluate(batch.inputs, batch.action),
        strict=True,
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        Analytic(net).values(batch.inputs), Autograd(net).values(batch.inputs), rtol=1e-5, atol=1e-6
    )
    assert np.array_equal(batch.inputs, kept)


def test_minibatches_may_change_their_size() -> None:
    rng = np.random.default_rng(2)
    net = random_net(SPEC, rng)
    batch, coefficients = batch_for(net, rng, weighted=True, moved=0.3), Coefficients(0.2, 0.5, 0.01)
    analytic, autograd = Analytic(net), Autograd(net)
    for rows in (ROWS, 3, 50):
        part = batch.take(slice(0, rows))
        autograd.gradient(part, coefficients)
        gradient = net.grad.numpy().copy()
        analytic.gradient(part, coefficients)
        np.testing.assert_allclose(net.grad, gradient, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("spec", "device", "possible"),
    [
        (SPEC, "cpu", True),
        (replace(SPEC, head="gaussian", activation="relu"), "cpu", True),
        (replace(SPEC, activation="elu", hidden=()), "cpu", True),
        (SPEC, "cuda", False),
        (replace(SPEC, head="squashed"), "cpu", False),
        (replace(SPEC, activation="silu"), "cpu", False),
        (replace(SPEC, module="package.module:Factory"), "cpu", False),
    ],
)
def test_it_knows_what_it_can_do(spec: PolicySpec, device: str, possible: bool) -> None:
    assert supports(spec, device) == possible
