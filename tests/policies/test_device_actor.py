"""The policy on tensors says what the numpy actor says, squashes by the formula, and is loaded where it lives."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.core import NDArray, Snapshot
from freewheel.policies.device_actor import TensorActor, TensorPolicy, _Squash
from freewheel.policies.nets import PolicyNet
from freewheel.policies.numpy_actor import EDGE, NumpyActor, squashed_log_prob
from freewheel.policies.spec import LOG_STD, FlatParams, PolicySpec, full_layout, initialise

PLAIN = PolicySpec(5, "float32", ((0, 5),), ((0, 5),), (), None, "categorical", 3, (16, 16), "tanh", 0.0, "")
SPECS = {
    "categorical": PLAIN,
    "masked": replace(PLAIN, actor_columns=((0, 2),), critic_columns=((0, 2),), mask=(2, 5)),
    "masked and normalised": replace(
        PLAIN, actor_columns=((0, 2),), critic_columns=((0, 2),), mask=(2, 5), normalised=((0, 2),)
    ),
    "bytes": replace(PLAIN, obs_dtype="uint8"),
    "gaussian": replace(PLAIN, head="gaussian", action_size=2, log_std=-0.7),
    "gaussian and normalised": replace(PLAIN, head="gaussian", action_size=2, normalised=((0, 3), (4, 5))),
    "squashed": replace(PLAIN, head="squashed", action_size=2),
    "squashed and normalised": replace(
        PLAIN, head="squashed", action_size=2, normalised=((1, 5),), actor_columns=((0, 1), (2, 5)), activation="relu"
    ),
}


def weights(spec: PolicySpec, seed: int = 0) -> Snapshot:
    """Of some size, so that policies have opinions; with statistics wherever the spec has them."""
    rng, params = np.random.default_rng(seed), FlatParams(full_layout(spec))
    initialise(spec, params, rng)
    last = f"actor.{len(spec.hidden)}"
    params.views[f"{last}.weight"][...] *= 40
    params.views[f"{last}.bias"][...] = rng.normal(size=spec.outputs) * 0.3
    for start, stop in spec.normalised:
        params.views["norm.mean"][start:stop] = rng.normal(size=stop - start)
        params.views["norm.scale"][start:stop] = rng.uniform(0.5, 30.0, stop - start)
    return Snapshot(seed, {name: view.copy() for name, view in params.views.items()})


def observations(spec: PolicySpec, count: int, seed: int = 1) -> NDArray:
    rng = np.random.default_rng(seed)
    if spec.obs_dtype == "uint8":
        return rng.integers(0, 256, (count, spec.obs_size)).astype(np.uint8)
    obs = rng.normal(size=(count, spec.obs_size)).astype(np.float32)
    if spec.mask is not None:
        allowed = rng.random((count, spec.action_size)) < 0.6
        allowed[:, 0] |= ~allowed.any(1)
        obs[:, slice(*spec.mask)] = allowed
    return obs


def both(spec: PolicySpec, seed: int = 0) -> tuple[NumpyActor, TensorActor]:
    numpy, tensor, snapshot = NumpyActor(spec), TensorActor(spec, "cpu", 7), weights(spec, seed)
    numpy.load(snapshot)
    tensor.load(snapshot)
    return numpy, tensor


def drawn(actor: Any, obs: Any) -> tuple[NDArray, NDArray]:
    decision = actor.act(obs, np.random.default_rng(3))
    return np.asarray(decision.action), np.asarray(decision.log_prob)


# -------------------------------------------------------------------------------------------------------- as the numpy actor


@pytest.mark.parametrize("case", SPECS)
def test_greedy_actions_are_the_same(case: str) -> None:
    numpy, tensor = both(SPECS[case])
    obs, rng = observations(SPECS[case], 300), np.random.default_rng(0)
    theirs = numpy.act(obs, rng, greedy=True).action
    ours = tensor.act(torch.from_numpy(obs), rng, greedy=True).action
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-4, atol=1e-5)
    if SPECS[case].head == "categorical":
        assert len({*theirs.tolist()}) > 1, "a policy without opinions proves little"
        assert ours.dtype == torch.int64


@pytest.mark.parametrize("case", SPECS)
def test_the_same_action_has_the_same_probability(case: str) -> None:
    spec = SPECS[case]
    numpy, tensor = both(spec)
    obs = observations(spec, 500)
    action, log_prob = (np.asarray(part) for part in tensor.policy.act(torch.from_numpy(obs)))
    with torch.no_grad():
        head = tensor.policy.net.head(tensor.policy.inputs(torch.from_numpy(obs))).double().numpy()
    if spec.head == "categorical":
        if spec.mask is not None:
            head[obs[:, slice(*spec.mask)] == 0] = -np.inf
        expected = (head - np.log(np.exp(head).sum(1, keepdims=True)))[np.arange(500), action]
    elif spec.head == "gaussian":
        log_std = numpy.params.views["actor.log_std"].astype(np.float64)
        noise = (action - head) * np.exp(-log_std)
        expected = (-0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)).sum(1)
    else:
        mean, log_std = np.split(head, 2, axis=1)
        expected = squashed_log_prob(mean, np.clip(log_std, *LOG_STD), action)
        inner = (np.abs(action) < 0.999).all(1)  # float32 actions near the edge have lost where they came from
        assert inner.mean() > 0.5
        expected, log_prob = expected[inner], log_prob[inner]
    np.testing.assert_allclose(log_prob, expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("case", SPECS)
def test_actions_are_drawn_from_the_same_distribution(case: str) -> None:
    """At one observation each: frequencies, or quantiles of every column, of both actors."""
    spec, count = SPECS[case], 20_000
    numpy, tensor = both(spec)
    for one in observations(spec, 3):
        obs = np.tile(one, (count, 1))
        (theirs, their_log_prob), (ours, our_log_prob) = drawn(numpy, obs), drawn(tensor, torch.from_numpy(obs))
        if spec.head == "categorical":
            here, there = (np.bincount(a, minlength=spec.action_size) / count for a in (ours, theirs))
            assert np.abs(here - there).max() < 4 * math.sqrt(0.5 / count)
            assert {*np.flatnonzero(here)} == {*np.flatnonzero(there)}
            if spec.mask is not None:
                assert not here[one[slice(*spec.mask)] == 0].any()
        else:
            for column in range(spec.action_size):
                pooled = np.sort(np.concatenate([ours[:, column], theirs[:, column]]))
                here, there = (
                    np.searchsorted(np.sort(a[:, column]), pooled, side="right") / count for a in (ours, theirs)
                )
                assert np.abs(here - there).max() < 1.95 * math.sqrt(2 / count)  # Kolmogorov-Smirnov, p = 0.001
            correlation = np.corrcoef(ours.T)[0, 1]
            assert abs(correlation) < 4 / math.sqrt(count)
        deviation = math.hypot(their_log_prob.std(), our_log_prob.std()) / math.sqrt(count)
        assert abs(our_log_prob.mean() - their_log_prob.mean()) < 4 * deviation + 1e-4


@pytest.mark.parametrize("case", ["categorical", "gaussian", "squashed"])
def test_lanes_are_drawn_apart_and_dice_are_its_own(case: str) -> None:
    spec = SPECS[case]
    _, one = both(spec)
    _, same = both(spec)
    obs = torch.from_numpy(np.tile(observations(spec, 1), (400, 1)))
    before = torch.random.get_rng_state()
    first, second = one.policy.act(obs)[0], one.policy.act(obs)[0]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not torch.equal(first, second)
    assert len({str(row) for row in first.tolist()}) > 1
    assert torch.equal(same.policy.act(obs)[0], first)
    assert one.generators == [one.policy.dice]


def test_squashed_actions_stay_inside_the_edge() -> None:
    spec = replace(SPECS["squashed"], hidden=())
    policy = TensorPolicy(spec, np.random.default_rng(0), "cpu", 0)
    said = np.array([40.0, -40.0, 9.0, -9.0], np.float32)  # log deviations are clipped to 2 and -5
    policy.load(Snapshot(0, {**weights(spec).params, "actor.0.weight": np.zeros((5, 4)), "actor.0.bias": said}))
    action, log_prob = policy.act(torch.zeros(1_000, 5))
    assert torch.equal(action[:, 0], torch.full((1_000,), EDGE))
    assert torch.equal(action[:, 1], torch.full((1_000,), -EDGE))
    assert log_prob.isfinite().all()


def test_statistics_clip_what_they_normalise_and_nothing_else() -> None:
    spec = replace(PLAIN, normalised=((1, 3),))
    policy = TensorPolicy(spec, np.random.default_rng(0), "cpu", 0)
    policy.normalise(np.array([9.0, 2.0, -1.0, 9.0, 9.0]), np.array([9.0, 0.5, 100.0, 9.0, 9.0]))
    obs = torch.tensor([[50.0, 4.0, 3.0, -50.0, 2.0]])
    assert policy.inputs(obs).tolist() == [[50.0, 1.0, 10.0, -50.0, 2.0]]
    assert obs.tolist() == [[50.0, 4.0, 3.0, -50.0, 2.0]]
    assert policy.weights(on_device=False)["norm.mean"].tolist() == [0, 2, -1, 0, 0]
    plain = TensorPolicy(PLAIN, np.random.default_rng(0), "cpu", 0)
    assert plain.inputs(obs) is obs


# ------------------------------------------------------------------------------------------------------------------ squashing


def plainly(head: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The same as a textbook has it."""
    mean, log_std = head.chunk(2, dim=-1)
    std = log_std.clamp(*LOG_STD).exp()
    raw = mean + std * noise
    action = torch.tanh(raw)
    log_prob = torch.distributions.Normal(mean, std).log_prob(raw) - torch.log(1 - action.square())
    return action, log_prob.sum(-1)


def squash(head: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    action, log_prob = _Squash.apply(head, noise)  # type: ignore[no-untyped-call]
    return action, log_prob


def heads(count: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    head = torch.rand(count, 6, generator=rng, dtype=torch.float64) * 2 - 1
    noise = torch.rand(count, 3, generator=rng, dtype=torch.float64) * 2 - 1
    head[0, 3], head[1, 4], head[2, 5] = -7.0, 3.0, 2.5  # beyond the bounds of the log deviation
    noise[:3] *= 0.1  # so that the textbook loses no digits there
    return head.requires_grad_(), noise


def test_squashing_is_the_textbooks() -> None:
    for ours, theirs in zip(squash(*heads()), plainly(*heads()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_its_slopes_are_those_of_autograd() -> None:
    (ours, noise), (theirs, _) = heads(), heads()
    rng = torch.Generator().manual_seed(5)
    by_action = torch.randn(40, 3, generator=rng, dtype=torch.float64)
    by_log_prob = torch.randn(40, generator=rng, dtype=torch.float64)
    for head, function in ((ours, squash), (theirs, plainly)):
        torch.autograd.backward(function(head, noise), [by_action, by_log_prob])
    assert ours.grad is not None
    assert theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9)
    assert ours.grad[0, 3] == ours.grad[1, 4] == ours.grad[2, 5] == 0
    assert torch.count_nonzero(ours.grad) == ours.grad.numel() - 3


def test_its_slopes_are_those_of_differences() -> None:
    head, noise = heads(6, seed=2)
    assert torch.autograd.gradcheck(lambda h: squash(h, noise), (head,))


def test_digits_are_not_lost_far_out() -> None:
    """At x = 30, 1 - tanh² is 0 in float32; log(1 - tanh²) is log 4 - 60."""
    head = torch.tensor([[30.0, -30.0, 0.0, 0.0]], requires_grad=True)
    _, log_prob = squash(head, torch.zeros(1, 2))
    assert float(log_prob.detach()) == pytest.approx(2 * (-0.5 * math.log(2 * math.pi) - math.log(4) + 60), rel=1e-6)
    log_prob.sum().backward()
    assert head.grad is not None
    assert head.grad.tolist() == [[2.0, -2.0, -1.0, -1.0]]


# -------------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("case", SPECS)
def test_weights_are_loaded_in_place_and_handed_out_as_copies(case: str) -> None:
    spec = SPECS[case]
    policy = TensorPolicy(spec, np.random.default_rng(0), "cpu", 0)

    def held() -> list[Tensor]:
        return [policy.net.vector, policy.mean, policy.scale, *policy.net.module.parameters()]

    addresses = [tensor.data_ptr() for tensor in held()]
    wanted = weights(spec, seed=4)
    policy.load(wanted)
    assert [tensor.data_ptr() for tensor in held()] == addresses
    copies = policy.weights(on_device=False)
    assert copies.keys() == wanted.params.keys()
    for name, value in wanted.params.items():
        np.testing.assert_array_equal(copies[name], value, name)
    with torch.no_grad():
        for tensor in held()[:3]:
            tensor.add_(1)
    for name, value in wanted.params.items():
        np.testing.assert_array_equal(copies[name], value, name)
    other = TensorPolicy(spec, np.random.default_rng(9), "cpu", 0)
    other.load(Snapshot(1, copies))
    obs = torch.from_numpy(observations(spec, 20))
    again = TensorPolicy(spec, np.random.default_rng(8), "cpu", 0)
    again.load(wanted)
    assert torch.equal(other.greedy(obs), again.greedy(obs))


def test_what_it_starts_with_is_what_a_network_of_that_seed_has() -> None:
    spec = SPECS["squashed"]
    policy = TensorPolicy(spec, np.random.default_rng(3), "cpu", 0)
    net = PolicyNet(spec, np.random.default_rng(3))
    for name, value in policy.weights(on_device=True).items():
        np.testing.assert_array_equal(np.asarray(value), net.params.views[name], name)
