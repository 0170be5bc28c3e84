"""The torch side of a policy: networks over one flat vector, and users' own modules."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.core import Snapshot
from freewheel.errors import SetupError
from freewheel.policies.heads.head import HEADS
from freewheel.policies.nets import PolicyNet, TorchActor
from freewheel.policies.spec import PolicySpec
from tests.support.places import SUPPORT

PLAIN = PolicySpec(
    obs_size=4,
    obs_dtype="float32",
    actor_columns=((0, 4),),
    critic_columns=((0, 4),),
    normalised=(),
    mask=None,
    head="categorical",
    action_size=3,
    hidden=(8, 8),
    activation="tanh",
    log_std=0.0,
    module="",
)
#: Columns of a world with slices policy 0..3, critic 3..5, context 5..6 and perhaps a mask at the end.
SLICED = replace(PLAIN, obs_size=6, actor_columns=((0, 3), (5, 6)), critic_columns=((3, 6),))


@pytest.fixture
def custom(monkeypatch: pytest.MonkeyPatch) -> PolicySpec:
    """A spec whose network is in a module that can be imported by name."""
    monkeypatch.syspath_prepend(SUPPORT)
    return replace(PLAIN, module="custom_module:Shared")


def random_net(spec: PolicySpec, seed: int) -> PolicyNet:
    """Weights and statistics of all sizes that training may bring."""
    rng = np.random.default_rng(seed)
    net = PolicyNet(spec, rng)
    for name, view in net.params.views.items():
        if not name.startswith("norm."):
            view[...] = rng.normal(0, len(view) ** -0.5 if name.endswith("weight") else 0.3, view.shape)
    return net


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1))
def test_actor_and_critic_read_their_own_columns(seed: int) -> None:
    net, rng = random_net(SLICED, seed), np.random.default_rng(seed)
    inputs = torch.from_numpy(rng.normal(size=(2, 6)).astype(np.float32))
    head, value = net(inputs)
    for column, (for_actor, for_critic) in enumerate([(True, False)] * 3 + [(False, True)] * 2 + [(True, True)]):
        moved = inputs.clone()
        moved[:, column] += 1.0
        other = net(moved)
        assert bool((other.head != head).any()) == for_actor
        assert bool((other.value != value).any()) == for_critic


@pytest.mark.parametrize("head", [*HEADS])
def test_weights_are_views_of_one_vector(head: str) -> None:
    net = PolicyNet(replace(PLAIN, head=head), np.random.default_rng(0))
    named = {**dict(net.module.named_parameters()), **net._head_parameters}
    assert set(named) == set(net.trainable_layout)
    assert sum(parameter.numel() for parameter in net.parameters) == len(net.vector)
    net.vector.copy_(torch.arange(len(net.vector)))
    start = 0
    for name, shape in net.trainable_layout.items():
        expected = np.arange(start, start + math.prod(shape)).reshape(shape)
        assert np.array_equal(net.params.views[name], expected)
        assert np.array_equal(named[name].detach(), expected)
        start += expected.size
    assert start == len(net.vector)


def test_equal_seeds_give_equal_weights(custom: PolicySpec) -> None:
    for spec in (PLAIN, custom):
        first, again, other = (PolicyNet(spec, np.random.default_rng(seed)).params.vector for seed in (1, 1, 2))
        assert np.array_equal(first, again)
        assert not np.array_equal(first, other)


def test_torchs_own_generator_is_left_alone(custom: PolicySpec) -> None:
    before = torch.random.get_rng_state()
    TorchActor(custom).act(np.zeros((2, 4), np.float32), np.random.default_rng(0))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_parameters_keep_their_names(custom: PolicySpec) -> None:
    net = PolicyNet(replace(custom, head="gaussian", log_std=0.25), np.random.default_rng(0))
    trunk = [f"trunk.{layer}.{kind}" for layer in (0, 1) for kind in ("weight", "bias")]
    heads = [f"{part}.{kind}" for part in ("actor_0", "critic") for kind in ("weight", "bias")]
    assert set(net.params.views) == {"norm.mean", "norm.scale", *trunk, *heads, "actor.log_std"}
    assert (net.params.views["trunk.1.weight"] == 1).all()  # as LayerNorm was made
    assert (net.params.views["actor.log_std"] == 0.25).all()


def test_torch_actors_choose_as_often_as_they_should(custom: PolicySpec) -> None:
    spec = replace(custom, obs_size=7, mask=(4, 7))
    net, draws = random_net(spec, 7), 100_000
    actor = TorchActor(spec)
    actor.load(Snapshot(1, net.params.views))
    obs = np.tile(np.array([0.1, -0.2, 0.3, 0.4, 1, 0, 1], np.float32), (draws, 1))
    decision = actor.act(obs, np.random.default_rng(0))
    counts = np.bincount(decision.action, minlength=3)
    expected = np.exp([decision.log_prob[decision.action == choice][0] for choice in (0, 2)]) * draws
    assert expected.sum() == pytest.approx(draws, rel=1e-5)
    assert counts[1] == 0
    assert (np.square(counts[[0, 2]] - expected) / expected).sum() < 15.1  # p = 1e-4 with one degree of freedom


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("custom_module:Normed", "uses BatchNorm, whose running statistics do not travel; use LayerNorm"),
        ("custom_module:no_module", "returned int, not a torch.nn.Module"),
        ("custom_module:Missing", "cannot be imported .* write package.module:Factory"),
        ("no_such_module:Shared", "cannot be imported"),
        ("custom_module", "cannot be imported"),
        (":Shared", "cannot be imported"),
        ("custom_module:Tall", r"\(2, 3\), \(2, 1\).* not head \[N, 3\] and value \[N\]"),
        ("custom_module:Narrow", r"\(2, 1\), \(2,\).* not head \[N, 3\] and value \[N\]"),
        ("custom_module:Lonely", r"not head \[N, 3\] and value \[N\]"),
        ("custom_module:Clashing", "norm.scale.* rename"),
    ],
)
def test_a_network_that_cannot_serve_is_refused(custom: PolicySpec, name: str, complaint: str) -> None:
    with pytest.raises(SetupError, match=complaint):
        PolicyNet(replace(custom, module=name), np.random.default_rng(0))


def test_a_net_begins_with_the_weights_it_is_given(custom: PolicySpec) -> None:
    for spec in (PLAIN, replace(PLAIN, normalised=((0, 2),), head="squashed"), custom):
        net, given = PolicyNet(spec, np.random.default_rng(0)), random_net(spec, 1)
        net.begin(given.params.views)
        assert np.array_equal(net.params.vector, given.params.vector)
        assert np.array_equal(net.vector.numpy(), given.vector.numpy())
        given.params.vector[...] = 0
        assert net.params.vector.any(), "a copy"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"actor.0.weight": np.zeros((4, 9))}, "actor.0.weight is (4, 9) there and (4, 8) here"),
        ({"critic.2.bias": None}, "critic.2.bias is missing there and (1,) here"),
        ({"memory": np.zeros(())}, "memory is () there and missing here"),
    ],
)
def test_a_net_refuses_the_weights_of_another(change: dict[str, Any], text: str) -> None:
    net = PolicyNet(PLAIN, np.random.default_rng(0))
    before = net.params.vector.copy()
    params = {name: value for name, value in {**net.params.views, **change}.items() if value is not None}
    with pytest.raises(SetupError) as caught:
        net.begin(params)
    wanted = f"the weights to begin with are another network's: {text}; choose the same policy"
    assert str(caught.value) == wanted
    assert np.array_equal(net.params.vector, before)
