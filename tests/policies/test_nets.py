"""The torch side of a policy: networks over one flat vector, users' own modules, and the policy on tensors."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freewheel.core import Snapshot
from freewheel.errors import SetupError
from freewheel.policies.nets import PolicyNet, TensorActor, TensorPolicy, TorchActor
from freewheel.policies.numpy_actor import make_actor
from freewheel.policies.spec import HEADS, FlatParams, NamedWeights, PolicySpec, full_layout, initialise
from freewheel.registry import own_object
from tests.support.learning import observations
from tests.support.places import SUPPORT

PLAIN = PolicySpec(4, "float32", ((0, 4),), ((0, 4),), (), None, "categorical", 3, (8, 8), "tanh", 0.0, "")
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


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("custom_module:Normed", "uses BatchNorm, whose running statistics are not sent to workers; use LayerNorm"),
        ("custom_module:no_module", "returned int, not a torch.nn.Module"),
        ("custom_module:Missing", "cannot be imported: .* write package.module:Factory"),
        ("no_such_module:Shared", "cannot be imported"),
        ("custom_module", "cannot be imported"),
        ("__main__:Mine", "'Mine' was defined in a script or a notebook, and is known only there: put it into a file"),
        (":Shared", "cannot be imported"),
        ("custom_module:Tall", r"\(2, 3\), \(2, 1\).* not head \[N, 3\] and value \[N\]"),
        ("custom_module:Narrow", r"\(2, 1\), \(2,\).* not head \[N, 3\] and value \[N\]"),
        ("custom_module:Lonely", r"not head \[N, 3\] and value \[N\]"),
        ("custom_module:Clashing", "norm.scale.* rename"),
        (
            "custom_module:Unasked",
            r"called with a PolicySpec \(obs_size 4, outputs 3\), raised TypeError: Unasked.__init__\(\) takes 1 positional",
        ),
        (
            "custom_module:Askew",
            r"(?s)given two observations \[2, 4\], raised RuntimeError: mat1 [^\n]*\nTraceback[^\n]*\n[^\n]*custom_module.py",
        ),
    ],
)
def test_a_network_that_cannot_serve_is_refused(custom: PolicySpec, name: str, complaint: str) -> None:
    with pytest.raises(SetupError, match=complaint):
        PolicyNet(replace(custom, module=name), np.random.default_rng(0))


def test_a_network_of_a_script_travels_to_its_workers(custom: PolicySpec, monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "Mine", own_object("module", custom.module, ""), raising=False)
    make = make_actor(replace(custom, module="__main__:Mine"))
    monkeypatch.delattr(main, "Mine")  # as it is in a worker
    assert type(make()) is TorchActor


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
    assert str(caught.value) == f"the initial weights belong to another network: {text}; choose the same policy"
    assert np.array_equal(net.params.vector, before)


FIVE = replace(PLAIN, obs_size=5, actor_columns=((0, 5),), critic_columns=((0, 5),))
MASKED = replace(FIVE, actor_columns=((0, 2),), critic_columns=((0, 2),), mask=(2, 5))
SQUASHED = replace(FIVE, head="squashed", action_size=2)
SPECS = {
    "categorical": FIVE,
    "masked": MASKED,
    "masked and normalised": replace(MASKED, normalised=((0, 2),)),
    "bytes": replace(FIVE, obs_dtype="uint8"),
    "gaussian": replace(FIVE, head="gaussian", action_size=2, log_std=-0.7),
    "gaussian and normalised": replace(FIVE, head="gaussian", action_size=2, normalised=((0, 3), (4, 5))),
    "squashed": SQUASHED,
    "squashed and normalised": replace(SQUASHED, normalised=((1, 5),), actor_columns=((0, 1), (2, 5))),
}


def weights(spec: PolicySpec, seed: int = 0) -> Snapshot:
    """Large enough that actions differ; with statistics wherever the spec has them."""
    rng, params = np.random.default_rng(seed), FlatParams(full_layout(spec))
    initialise(spec, params, rng)
    last = f"actor.{len(spec.hidden)}"
    params.views[f"{last}.weight"][...] *= 40
    params.views[f"{last}.bias"][...] = rng.normal(size=spec.outputs) * 0.3
    for start, stop in spec.normalised:
        params.views["norm.mean"][start:stop] = rng.normal(size=stop - start)
        params.views["norm.scale"][start:stop] = rng.uniform(0.5, 30.0, stop - start)
    return Snapshot(seed, {name: view.copy() for name, view in params.views.items()})


@pytest.mark.parametrize("case", ["categorical", "gaussian", "squashed"])
def test_lanes_are_drawn_apart_by_a_generator_of_its_own(case: str) -> None:
    spec = SPECS[case]
    one, same = (TensorActor(spec, "cpu", 7) for _ in range(2))
    for actor in (one, same):
        actor.load(weights(spec))
    obs = torch.from_numpy(np.tile(observations(spec, (1,), np.random.default_rng(1)), (400, 1)))
    before = torch.random.get_rng_state()
    first, second = one.policy.act(obs)[0], one.policy.act(obs)[0]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not torch.equal(first, second)
    assert len({str(row) for row in first.tolist()}) > 1
    assert torch.equal(same.policy.act(obs)[0], first)
    assert one.generators == [one.policy.generator]


def test_statistics_clip_what_they_normalise_and_nothing_else() -> None:
    policy = TensorPolicy(replace(FIVE, normalised=((1, 3),)), np.random.default_rng(0), "cpu", 0)
    policy.normalise(np.array([9.0, 2.0, -1.0, 9.0, 9.0]), np.array([9.0, 0.5, 100.0, 9.0, 9.0]))
    obs = torch.tensor([[50.0, 4.0, 3.0, -50.0, 2.0]])
    assert policy.inputs(obs).tolist() == [[50.0, 1.0, 10.0, -50.0, 2.0]]
    assert obs.tolist() == [[50.0, 4.0, 3.0, -50.0, 2.0]]
    assert policy.weights(on_device=False)["norm.mean"].tolist() == [0, 2, -1, 0, 0]
    assert TensorPolicy(FIVE, np.random.default_rng(0), "cpu", 0).inputs(obs) is obs


@pytest.mark.parametrize("case", SPECS)
def test_weights_are_loaded_in_place_and_handed_out_as_copies(case: str) -> None:
    spec = SPECS[case]
    policy = TensorPolicy(spec, np.random.default_rng(0), "cpu", 0)

    def held() -> list[Tensor]:
        return [policy.net.vector, *policy.statistics.values(), *policy.net.parameters]

    addresses = [tensor.data_ptr() for tensor in held()]
    wanted = weights(spec, seed=4)
    policy.load(wanted)
    assert [tensor.data_ptr() for tensor in held()] == addresses
    copies = policy.weights(on_device=False)
    assert copies.keys() == wanted.params.keys()
    with torch.no_grad():
        for tensor in held()[:3]:
            tensor.add_(1)
    for name, value in wanted.params.items():
        np.testing.assert_array_equal(copies[name], value, name)
    other, again = (TensorPolicy(spec, np.random.default_rng(seed), "cpu", 0) for seed in (8, 9))
    other.load(Snapshot(1, copies))
    again.load(wanted)
    obs = torch.from_numpy(observations(spec, (20,), np.random.default_rng(1)))
    assert torch.equal(other.greedy(obs), again.greedy(obs))


def test_weights_in_another_order_are_loaded_by_name() -> None:
    spec = SPECS["squashed"]
    one, other = (TensorPolicy(spec, np.random.default_rng(seed), "cpu", 0) for seed in (3, 4))
    found = one.weights(on_device=False)
    layout = {name: found.layout[name] for name in reversed(list(found))}
    turned = NamedWeights(np.concatenate([found[name].ravel() for name in layout]), layout)
    other.load(Snapshot(1, turned))
    assert list(turned) != list(found)
    assert torch.equal(other.flat, one.flat)


def test_what_it_starts_with_is_what_a_network_of_that_seed_has() -> None:
    spec = SPECS["squashed"]
    policy = TensorPolicy(spec, np.random.default_rng(3), "cpu", 0)
    net = PolicyNet(spec, np.random.default_rng(3))
    for name, value in policy.weights(on_device=True).items():
        np.testing.assert_array_equal(np.asarray(value), net.params.views[name], name)
