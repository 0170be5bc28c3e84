"""Every head is one distribution in all its forms: numpy, torch and slopes agree; and the squashed one near its edges."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freewheel.core import ActionSpec, NDArray, Snapshot
from freewheel.policies.heads.squashed import EDGE, LOG_STD, Squashed, SquashedActor, squash, squashed_log_prob
from freewheel.policies.nets import PolicyNet, TensorPolicy, TorchActor
from freewheel.policies.numpy_actor import NumpyActor
from freewheel.policies.spec import HEADS, Distribution, FlatParams, PolicySpec, Reparameterised
from tests.support.learning import observations
from tests.support.places import SUPPORT

ACTIONS = {"discrete": ActionSpec("discrete", 3), "box": ActionSpec("box", 2, (-1.0,) * 2, (1.0,) * 2)}
#: The kind of actions that each head serves.
KINDS = {name: next(kind for kind in ACTIONS if not head.misfit(ACTIONS[kind])) for name, head in HEADS.entries.items()}
PLAIN = PolicySpec(4, "float32", ((0, 4),), ((0, 4),), (), None, "", 3, (8, 8), "tanh", -0.3, "")
#: Columns of a world with slices policy 0..3, critic 3..5 and context 5..6.
SLICED = replace(PLAIN, obs_size=6, actor_columns=((0, 3), (5, 6)), critic_columns=((3, 6),))


def spec_for(head: str, base: PolicySpec = PLAIN, *, masked: bool = False, **changes: Any) -> PolicySpec:
    spec = replace(base, **{"head": head, "action_size": ACTIONS[KINDS[head]].size, **changes})
    end = spec.obs_size + spec.action_size
    return replace(spec, obs_size=end, mask=(spec.obs_size, end)) if masked else spec


CASES = {name: spec_for(name) for name in HEADS} | {
    f"{name}, normalised": spec_for(name, SLICED, normalised=((0, 3),)) for name in HEADS
}
CASES |= {f"{name}, masked": spec_for(name, masked=True) for name, kind in KINDS.items() if kind == "discrete"}
CASES |= {f"{name}, bytes": spec_for(name, obs_dtype="uint8") for name in HEADS}


def random_policy(spec: PolicySpec, seed: int) -> TensorPolicy:
    """Weights and statistics of all sizes that training may bring."""
    rng = np.random.default_rng(seed)
    policy = TensorPolicy(spec, rng, "cpu", seed)
    views = policy.net.params.views
    for name in policy.net.trainable_layout:
        view = views[name]
        view[...] = rng.normal(0, len(view) ** -0.5 if name.endswith("weight") else 0.3, view.shape)
    if not spec.module:  # near the edges of a squashed head, atanh would magnify the rounding of its means
        views[f"actor.{len(spec.hidden)}.weight"][...] *= 0.3
    for start, stop in spec.normalised:
        spread = 74 if spec.obs_dtype == "uint8" else 1  # of evenly drawn bytes
        views["norm.mean"][start:stop] = spread * rng.normal(1, 0.5, stop - start)
        views["norm.scale"][start:stop] = rng.uniform(0.3, 1.5, stop - start) / spread
    policy.begin({name: view.copy() for name, view in views.items()})
    return policy


def numpy_actor(policy: TensorPolicy) -> NumpyActor:
    actor = NumpyActor(policy.spec)
    actor.load(Snapshot(1, policy.weights(on_device=False)))
    return actor


@torch.no_grad()
def in_torch(policy: TensorPolicy, obs: NDArray) -> Distribution:
    return policy.distribution(policy.inputs(torch.from_numpy(obs)))


@st.composite
def specs(draw: st.DrawFn) -> PolicySpec:
    head = draw(st.sampled_from(sorted(HEADS)))
    return spec_for(
        head,
        draw(st.sampled_from([PLAIN, SLICED])),
        masked=KINDS[head] == "discrete" and draw(st.booleans()),
        action_size=draw(st.integers(1, 5)),
        hidden=tuple(draw(st.lists(st.integers(1, 24), max_size=3))),
        activation=draw(st.sampled_from(["tanh", "relu", "elu", "silu"])),
        obs_dtype=draw(st.sampled_from(["float32", "uint8"])),
        normalised=draw(st.sampled_from([(), ((0, 3),), ((0, 2), (3, 4))])),
    )


@settings(max_examples=150)
@given(spec=specs(), seed=st.integers(0, 2**32 - 1), greedy=st.booleans())
def test_numpy_and_torch_find_the_same_chances_and_greedy_actions(spec: PolicySpec, seed: int, greedy: bool) -> None:
    policy, rng = random_policy(spec, seed), np.random.default_rng(seed)
    obs = observations(spec, (32,), rng)
    decision, distribution = numpy_actor(policy).act(obs, rng, greedy=greedy), in_torch(policy, obs)
    with torch.no_grad():
        log_prob = distribution.log_prob(torch.from_numpy(decision.action))
    assert decision.log_prob.dtype == np.float32
    np.testing.assert_allclose(decision.log_prob, log_prob, rtol=1e-5, atol=1e-5)
    mode = distribution.mode().numpy()
    assert mode.dtype == decision.action.dtype
    if greedy and KINDS[spec.head] == "box":
        np.testing.assert_allclose(decision.action, mode, rtol=1e-4, atol=1e-5)
    elif greedy:  # two actions may be equally likely but for rounding
        with torch.no_grad():
            np.testing.assert_allclose(distribution.log_prob(distribution.mode()), log_prob, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_samples_have_the_same_distribution(case: str) -> None:
    """At one observation each: frequencies, or quantiles of every column, of both actors."""
    spec, count = CASES[case], 20_000
    policy = random_policy(spec, 3)
    for one in observations(spec, (3,), np.random.default_rng(1)):
        obs = np.tile(one, (count, 1))
        decision = numpy_actor(policy).act(obs, np.random.default_rng(3))
        ours, log_prob = (part.numpy() for part in policy.act(torch.from_numpy(obs)))
        theirs = decision.action
        assert (ours.dtype, log_prob.dtype) == (theirs.dtype, decision.log_prob.dtype)
        if KINDS[spec.head] == "discrete":
            here, there = (np.bincount(chosen, minlength=spec.action_size) / count for chosen in (ours, theirs))
            assert np.abs(here - there).max() < 4 * math.sqrt(0.5 / count)
            assert {*np.flatnonzero(here)} == {*np.flatnonzero(there)}
        else:
            for column in range(spec.action_size):
                pooled = np.sort(np.concatenate([ours[:, column], theirs[:, column]]))
                here, there = (
                    np.searchsorted(np.sort(chosen[:, column]), pooled, side="right") / count
                    for chosen in (ours, theirs)
                )
                assert np.abs(here - there).max() < 1.95 * math.sqrt(2 / count)  # Kolmogorov-Smirnov, p = 0.001
            assert abs(np.corrcoef(ours.T)[0, 1]) < 4 / math.sqrt(count)
        deviation = math.hypot(decision.log_prob.std(), log_prob.std()) / math.sqrt(count)
        assert abs(log_prob.mean() - decision.log_prob.mean()) < 4 * deviation + 1e-4


@pytest.mark.parametrize("case", CASES)
def test_samples_come_with_their_log_probability_and_entropy_is_its_mean(case: str) -> None:
    spec = CASES[case]
    policy, count = random_policy(spec, 4), 20_000
    distribution = in_torch(policy, np.tile(observations(spec, (1,), np.random.default_rng(2)), (count, 1)))
    with torch.no_grad():
        action, log_prob = distribution.sample(policy.generator)
        expected = distribution.log_prob(action)
    inner = torch.ones(count, dtype=torch.bool)
    if KINDS[spec.head] == "box":
        inner = (action.abs() < 0.999).all(-1)  # float32 actions near an edge have lost where they came from
    if not HEADS[spec.head].reparameterised:
        inner = torch.ones_like(inner)
        deviation = float(log_prob.std()) / math.sqrt(count)
        assert distribution.entropy()[0].item() == pytest.approx(-float(log_prob.mean()), abs=4 * deviation + 1e-5)
    np.testing.assert_allclose(log_prob[inner], expected[inner], rtol=1e-3, atol=2e-3)
    assert inner.float().mean() > 0.5


@pytest.mark.parametrize("head", [*HEADS])
def test_a_users_module_acts_with_the_same_head(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SUPPORT)
    policy = random_policy(spec_for(head, module="custom_module:Shared", normalised=((0, 4),)), 5)
    actor, rng = TorchActor(policy.spec), np.random.default_rng(6)
    actor.load(Snapshot(1, policy.weights(on_device=False)))
    obs = observations(policy.spec, (20,), rng)
    sampled, greedy = actor.act(obs, rng), actor.act(obs, rng, greedy=True)
    distribution = in_torch(policy, obs)
    for decision in (sampled, greedy):
        with torch.no_grad():
            expected = distribution.log_prob(torch.from_numpy(decision.action))
        np.testing.assert_allclose(decision.log_prob, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(greedy.action, distribution.mode(), rtol=1e-5, atol=1e-6)
    assert (sampled.action != greedy.action).any()
    again = TorchActor(policy.spec)
    again.load(Snapshot(1, policy.weights(on_device=False)))
    first, second = (again.act(obs, np.random.default_rng(seed)).action for seed in (1, 1))
    assert np.array_equal(first, second)


def reference(head: str, outputs: Tensor, log_std: Tensor) -> tuple[Any, Any]:
    """torch's own distribution, and the one whose entropy counts."""
    distributions: Any = torch.distributions
    if head == "categorical":
        choice = distributions.Categorical(logits=outputs)
        return choice, choice
    mean, log_std = (outputs, log_std) if head == "gaussian" else outputs.double().chunk(2, -1)
    normal = distributions.Independent(distributions.Normal(mean, log_std.exp()), 1)
    if head == "gaussian":
        return normal, normal
    return distributions.TransformedDistribution(normal, [distributions.TanhTransform()]), normal


@pytest.mark.parametrize("head", ["categorical", "gaussian", "squashed"])
def test_our_heads_are_torchs_distributions(head: str) -> None:
    rng, size = np.random.default_rng(0), 3
    outputs = torch.from_numpy(rng.uniform(-1.5, 1.5, (50, HEADS[head].outputs(size))).astype(np.float32))
    log_std = torch.tensor([-1.0, 0.0, 0.5])
    action = torch.from_numpy(rng.normal(size=(50, size)).astype(np.float32))
    action = {"categorical": torch.arange(50) % size, "gaussian": action, "squashed": torch.tanh(action)}[head]
    ours = HEADS[head].distribution(outputs, None, {"actor.log_std": log_std})
    theirs, entropic = reference(head, outputs, log_std)
    wide = action.double() if head == "squashed" else action
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(wide).float())
    torch.testing.assert_close(ours.entropy(), entropic.entropy().float())


@pytest.mark.parametrize("case", [case for case, spec in CASES.items() if HEADS[spec.head].analytic])
@pytest.mark.parametrize("by_entropy", [0.0, -0.3])
def test_slopes_are_those_of_autograd(case: str, by_entropy: float) -> None:
    spec, rng = CASES[case], np.random.default_rng(7)
    net = PolicyNet(spec, rng)
    grads = FlatParams(net.trainable_layout).views
    slopes = HEADS[spec.head].slopes(spec, net.params.views, grads)
    outputs = rng.normal(size=(40, spec.outputs)).astype(np.float32)
    inputs = observations(spec, (40,), rng).astype(np.float32)
    leaf = torch.tensor(outputs, requires_grad=True)
    distribution = net.distribution(torch.from_numpy(inputs), leaf)
    action, _ = distribution.sample(torch.Generator().manual_seed(1))
    by_log_prob = rng.normal(size=40).astype(np.float32)
    log_prob, entropy = distribution.log_prob(action.detach()), distribution.entropy()
    np.testing.assert_allclose(slopes.log_prob(outputs, inputs, action.detach().numpy()), log_prob.detach(), atol=1e-5)
    np.testing.assert_allclose(slopes.entropy(), entropy.detach(), atol=1e-5)
    (torch.from_numpy(by_log_prob) * log_prob).sum().add(by_entropy * entropy.sum()).backward()
    found: Any = leaf.grad
    np.testing.assert_allclose(slopes.slope(by_log_prob, by_entropy), found, rtol=1e-4, atol=1e-5)
    for name, parameter in net._head_parameters.items():
        found = parameter.grad
        np.testing.assert_allclose(grads[name], found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head", [name for name, head in HEADS.entries.items() if head.reparameterised])
def test_samples_with_a_gradient_are_the_same_samples(head: str) -> None:
    policy = random_policy(spec_for(head), 8)
    inputs = torch.from_numpy(observations(policy.spec, (30,), np.random.default_rng(0)))
    state = policy.generator.get_state()
    sampled = policy.act(inputs)
    policy.generator.set_state(state)
    action, log_prob = policy.rsample(inputs)
    assert isinstance(policy.distribution(inputs), Reparameterised)
    torch.testing.assert_close(action.detach(), sampled[0])
    assert torch.equal(log_prob.detach(), sampled[1])
    (action.sum() + log_prob.sum()).backward()
    assert all(weight.grad is not None for name, weight in policy.net.module.named_parameters() if "actor" in name)


def plainly(outputs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Squashing as a textbook has it."""
    mean, log_std = outputs.chunk(2, dim=-1)
    std = log_std.clamp(*LOG_STD).exp()
    raw = mean + std * noise
    action = torch.tanh(raw)
    return action, (torch.distributions.Normal(mean, std).log_prob(raw) - torch.log(1 - action.square())).sum(-1)


def outputs_and_noise(count: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    outputs = torch.rand(count, 6, generator=rng, dtype=torch.float64) * 2 - 1
    noise = torch.rand(count, 3, generator=rng, dtype=torch.float64) * 2 - 1
    outputs[0, 3], outputs[1, 4], outputs[2, 5] = -7.0, 3.0, 2.5  # beyond the bounds of the log deviation
    noise[:3] *= 0.1  # so that the textbook loses no digits there
    return outputs.requires_grad_(), noise


def test_squashing_and_its_slopes_are_the_textbooks() -> None:
    (ours, noise), (theirs, _) = outputs_and_noise(), outputs_and_noise()
    rng = torch.Generator().manual_seed(5)
    by_action = torch.randn(40, 3, generator=rng, dtype=torch.float64)
    by_log_prob = torch.randn(40, generator=rng, dtype=torch.float64)
    for found, expected in zip(squash()(ours, noise), plainly(theirs, noise), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for outputs, function in ((ours, squash()), (theirs, plainly)):
        torch.autograd.backward(function(outputs, noise), [by_action, by_log_prob])
    assert ours.grad is not None
    assert theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9)
    assert ours.grad[0, 3] == ours.grad[1, 4] == ours.grad[2, 5] == 0
    assert torch.count_nonzero(ours.grad) == ours.grad.numel() - 3
    few, small = outputs_and_noise(6, seed=2)
    assert torch.autograd.gradcheck(lambda values: squash()(values, small), (few,))


def test_digits_are_not_lost_far_out() -> None:
    """At x = 30, 1 - tanh² is 0 in float32; log(1 - tanh²) is log 4 - 60."""
    outputs = torch.tensor([[30.0, -30.0, 0.0, 0.0]], requires_grad=True)
    _, log_prob = squash()(outputs, torch.zeros(1, 2))
    assert float(log_prob.detach()) == pytest.approx(2 * (-0.5 * math.log(2 * math.pi) - math.log(4) + 60), rel=1e-6)
    log_prob.sum().backward()
    assert outputs.grad is not None
    assert outputs.grad.tolist() == [[2.0, -2.0, -1.0, -1.0]]


def test_actions_stay_inside_the_edge_and_deviations_inside_their_bounds() -> None:
    outputs = np.tile(np.array([40.0, -40.0, 9.0, -9.0], np.float32), (1_000, 1))
    acting = SquashedActor().choose(outputs, outputs, np.random.default_rng(0), False)
    drawn = Squashed(torch.from_numpy(outputs)).sample(torch.Generator().manual_seed(0))
    for action, log_prob in (acting, tuple(part.numpy() for part in drawn)):
        assert np.abs(action).max() <= np.float32(EDGE)
        assert np.isfinite(np.arctanh(action)).all()
        assert np.isfinite(log_prob).all()
    constant = 2 * 0.5 * math.log(2 * math.pi * math.e)
    assert float(Squashed(torch.from_numpy(outputs)).entropy()[0]) == pytest.approx(constant + sum(LOG_STD))


def test_the_density_integrates_to_one() -> None:
    for mean, log_std in ((0.0, 0.0), (0.7, -1.0), (-1.0, LOG_STD[0] + 3)):
        action = np.tanh(np.linspace(-7, 7, 20_001))[:, None]  # even before tanh, where the density is a bell
        density = np.exp(squashed_log_prob(np.full_like(action, mean), np.full_like(action, log_std), action))
        assert np.sum((density[1:] + density[:-1]) / 2 * np.diff(action[:, 0])) == pytest.approx(1, abs=2e-4)
