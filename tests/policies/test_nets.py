"""The torch side of a policy: what learners compute is what actors in numpy did, over one flat vector."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.core import NDArray, Snapshot
from freewheel.errors import SetupError
from freewheel.policies.nets import Categorical, Gaussian, PolicyNet, Squashed, TorchActor
from freewheel.policies.numpy_actor import NumpyActor
from freewheel.policies.spec import Head, PolicySpec, network_inputs
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
    if spec.head == "squashed" and not spec.module:  # near the edges atanh would magnify the rounding of the means
        net.params.views[f"actor.{len(spec.hidden)}.weight"][...] *= 0.3
    for start, stop in spec.normalised:
        spread = 74 if spec.obs_dtype == "uint8" else 1  # of evenly drawn bytes
        net.params.views["norm.mean"][start:stop] = spread * rng.normal(1, 0.5, stop - start)
        net.params.views["norm.scale"][start:stop] = rng.uniform(0.3, 1.5, stop - start) / spread
    return net


def observations(spec: PolicySpec, lanes: int, rng: np.random.Generator) -> NDArray:
    obs = (
        rng.integers(0, 256, (lanes, spec.obs_size))
        if spec.obs_dtype == "uint8"
        else rng.normal(size=(lanes, spec.obs_size))
    )
    if spec.mask is not None:
        allowed = rng.random((lanes, spec.action_size)) < 0.6
        allowed[np.arange(lanes), rng.integers(spec.action_size, size=lanes)] = True
        obs[:, slice(*spec.mask)] = allowed
    return obs.astype(spec.obs_dtype)


@st.composite
def specs(draw: st.DrawFn) -> PolicySpec:
    base = draw(st.sampled_from([PLAIN, SLICED]))
    base = replace(
        base,
        head=draw(st.sampled_from(["categorical", "gaussian", "squashed"])),
        action_size=draw(st.integers(1, 5)),
        hidden=tuple(draw(st.lists(st.integers(1, 24), max_size=3))),
        activation=draw(st.sampled_from(["tanh", "relu", "elu", "silu"])),
        obs_dtype=draw(st.sampled_from(["float32", "uint8"])),
        normalised=draw(st.sampled_from([(), ((0, 3),), ((0, 2), (3, 4))])),
    )
    if base.head != "categorical" or draw(st.booleans()):
        return base
    return replace(
        base, obs_size=base.obs_size + base.action_size, mask=(base.obs_size, base.obs_size + base.action_size)
    )


# ------------------------------------------------------------------------------------------------- numpy and torch are one policy


@settings(max_examples=150)
@given(spec=specs(), seed=st.integers(0, 2**32 - 1), greedy=st.booleans())
def test_learners_compute_the_log_probability_that_actors_wrote_down(spec: PolicySpec, seed: int, greedy: bool) -> None:
    net, rng = random_net(spec, seed), np.random.default_rng(seed)
    actor = NumpyActor(spec)
    actor.load(Snapshot(1, net.params.views))
    obs = observations(spec, 32, rng)
    decision = actor.act(obs, rng, greedy=greedy)
    inputs = torch.from_numpy(network_inputs(spec, net.params.views, obs))
    mask = None if spec.mask is None else inputs[:, slice(*spec.mask)]
    with torch.no_grad():
        log_prob = net.distribution(net(inputs).head, mask).log_prob(torch.from_numpy(decision.action))
    assert decision.log_prob.dtype == np.float32
    np.testing.assert_allclose(decision.log_prob, log_prob, rtol=1e-5, atol=1e-5)


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


# ----------------------------------------------------------------------------------------------------------- distributions


def test_categorical_is_torchs() -> None:
    torch_law: Any = torch.distributions.Categorical
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 3, (50, 4)).astype(np.float32))
    action = torch.arange(50) % 4
    ours, theirs = Categorical(logits, None), torch_law(logits=logits)
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    mask = torch.ones(50, 4)
    mask[:, 2] = 0
    masked, shorter = Categorical(logits, mask), torch_law(logits=logits[:, [0, 1, 3]])
    torch.testing.assert_close(masked.log_prob(torch.full((50,), 3)), shorter.log_prob(torch.full((50,), 2)))
    torch.testing.assert_close(masked.entropy(), shorter.entropy())


def test_gaussian_is_torchs() -> None:
    rng = np.random.default_rng(0)
    mean, action = (torch.from_numpy(rng.normal(size=(50, 3)).astype(np.float32)) for _ in range(2))
    log_std = torch.tensor([-1.0, 0.0, 0.5])
    theirs: Any = torch.distributions.Normal(mean, log_std.exp())
    ours = Gaussian(mean, log_std)
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action).sum(-1))
    torch.testing.assert_close(ours.entropy(), theirs.entropy().sum(-1))


def test_squashed_is_torchs() -> None:
    rng = np.random.default_rng(0)
    head = torch.from_numpy(rng.uniform(-1.5, 1.5, (50, 6)).astype(np.float32))
    mean, log_std = head.double().chunk(2, -1)
    wakeup: Any = torch.distributions.Normal(mean, log_std.exp())
    theirs: Any = torch.distributions.TransformedDistribution(wakeup, [torch.distributions.TanhTransform()])
    action = torch.tanh(torch.from_numpy(rng.normal(size=(50, 3)))).float()
    ours = Squashed(head)
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action.double()).sum(-1).float())
    torch.testing.assert_close(ours.entropy(), wakeup.entropy().sum(-1).float())


def test_a_squashed_deviation_is_bounded() -> None:
    law = Squashed(torch.tensor([[0.0, 0.0, -9.0, 9.0]]))
    assert law.log_std.tolist() == [[-5.0, 2.0]]


# ---------------------------------------------------------------------------------------------------------- one flat vector


@pytest.mark.parametrize("head", ["categorical", "gaussian", "squashed"])
def test_weights_and_gradients_are_views_of_two_vectors(head: Head) -> None:
    net = PolicyNet(replace(PLAIN, head=head), np.random.default_rng(0))
    trainable = {name: view for name, view in net.params.views.items() if not name.startswith("norm.")}
    parameters: dict[str, Any] = dict(net.module.named_parameters())
    if head == "gaussian":
        parameters["actor.log_std"] = net.log_std
    assert set(parameters) == set(trainable)
    net.vector.copy_(torch.arange(len(net.vector)))
    net.grad.copy_(-torch.arange(len(net.grad)))
    start = 0
    for name, view in trainable.items():
        expected = np.arange(start, start + view.size).reshape(view.shape)
        assert np.array_equal(view, expected)
        assert np.array_equal(parameters[name].detach(), expected)
        assert np.array_equal(parameters[name].grad, -expected)
        start += view.size
    assert start == len(net.vector)


def test_equal_seeds_give_equal_weights(custom: PolicySpec) -> None:
    for spec in (PLAIN, custom):
        first, again, other = (PolicyNet(spec, np.random.default_rng(seed)).params.vector for seed in (1, 1, 2))
        assert np.array_equal(first, again)
        assert not np.array_equal(first, other)


# ------------------------------------------------------------------------------------------------------- a network of one's own


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


@pytest.mark.parametrize("head", ["categorical", "gaussian", "squashed"])
def test_torch_actors_write_down_the_log_probability_that_learners_compute(custom: PolicySpec, head: Head) -> None:
    spec = replace(custom, head=head, normalised=((0, 4),))
    net, rng = random_net(spec, 5), np.random.default_rng(6)
    actor = TorchActor(spec)
    actor.load(Snapshot(1, {name: view.copy() for name, view in net.params.views.items()}))
    obs = observations(spec, 20, rng)
    sampled, greedy = actor.act(obs, rng), actor.act(obs, rng, greedy=True)
    with torch.no_grad():
        law = net.distribution(net(torch.from_numpy(network_inputs(spec, net.params.views, obs))).head, None)
        for decision in (sampled, greedy):
            expected = law.log_prob(torch.from_numpy(decision.action))
            np.testing.assert_allclose(decision.log_prob, expected, rtol=1e-6, atol=1e-6)
    mode = law.log_p.argmax(-1) if isinstance(law, Categorical) else law.mean
    np.testing.assert_allclose(greedy.action, torch.tanh(mode) if head == "squashed" else mode, rtol=1e-6)
    assert sampled.action.dtype == (np.int64 if head == "categorical" else np.float32)
    assert sampled.log_prob.dtype == np.float32
    assert (sampled.action != greedy.action).any()


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


def test_torch_actors_draw_bells(custom: PolicySpec) -> None:
    spec = replace(custom, head="gaussian", action_size=2)
    net, draws = random_net(spec, 8), 50_000
    actor = TorchActor(spec)
    actor.load(Snapshot(1, net.params.views))
    obs, rng = np.zeros((draws, 4), np.float32), np.random.default_rng(0)
    mean = actor.act(obs[:1], rng, greedy=True).action
    noise = (actor.act(obs, rng).action - mean) / np.exp(net.params.views["actor.log_std"])
    assert np.abs(noise.mean(axis=0)).max() < 4 / np.sqrt(draws)
    assert np.abs(noise.var(axis=0) - 1).max() < 4 * np.sqrt(2 / draws)


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


# ---------------------------------------------------------------------------------------------------------------- beginnings


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
