"""PPO's objective by autograd, against the formula written out with torch's own distributions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.core import NDArray
from freewheel.learn.ppo.objective import Autograd, Coefficients, Losses, Minibatch
from freewheel.policies.nets import PolicyNet
from freewheel.policies.spec import LOG_STD, FlatParams, Head, PolicySpec

SPEC = PolicySpec(3, "float32", ((0, 3),), ((0, 3),), (), None, "categorical", 4, (5,), "tanh", -0.3, "")
COEFFICIENTS = Coefficients(clip=0.1, value=0.7, entropy=0.2)
ROWS = 64


def net_and_batch(head: Head, weighted: bool) -> tuple[PolicyNet, Minibatch]:
    rng = np.random.default_rng(3)
    net = PolicyNet(replace(SPEC, head=head), rng)
    net.host[:] = rng.normal(0, 0.5, net.host.shape)
    inputs = rng.normal(size=(ROWS, 3)).astype(np.float32)
    raw = rng.normal(size=(ROWS, 4)).astype(np.float32)
    action: NDArray = np.tanh(raw) if head == "squashed" else raw
    if head == "categorical":
        action = rng.integers(4, size=ROWS)
    _, log_prob = Autograd(net).evaluate(inputs, action)
    reference, advantage, value = (
        (scale * rng.normal(size=ROWS)).astype(np.float32) for scale in (0.2, 1.0, 1.0)
    )  # ratios on both sides of the clip
    weight = rng.random(ROWS).astype(np.float32) if weighted else None
    return net, Minibatch(inputs, action, log_prob + reference, weight, advantage, value)


def written_out(net: PolicyNet, batch: Minibatch, weights: Coefficients) -> tuple[Losses, dict[str, Tensor]]:
    """The same in float64 with torch's distributions: losses, and gradients by parameter."""
    leaves = {
        name: torch.tensor(view, dtype=torch.float64, requires_grad=True) for name, view in net.params.views.items()
    }
    inputs = torch.from_numpy(batch.inputs).double()
    head, value = (
        torch.tanh(inputs @ leaves[f"{part}.0.weight"] + leaves[f"{part}.0.bias"]) @ leaves[f"{part}.1.weight"]
        + leaves[f"{part}.1.bias"]
        for part in ("actor", "critic")
    )
    action = torch.from_numpy(batch.action)
    action = action if action.dtype == torch.int64 else action.double()
    law, wakeup = _laws(net.spec, head, leaves)
    log_prob, entropy = law.log_prob(action), wakeup.entropy()
    if net.spec.head != "categorical":
        log_prob, entropy = log_prob.sum(-1), entropy.sum(-1)
    ratio = (log_prob - torch.from_numpy(batch.reference)).exp()
    advantage = torch.from_numpy(batch.advantage).double()
    rho = torch.ones(ROWS) if batch.weight is None else torch.from_numpy(batch.weight)
    policy = -(rho * torch.min(ratio * advantage, ratio.clip(1 - weights.clip, 1 + weights.clip) * advantage)).mean()
    critic = (value[:, 0] - torch.from_numpy(batch.value)).pow(2).mean()
    (policy + weights.value * critic - weights.entropy * entropy.mean()).backward()
    kl, clipped = (ratio - 1 - ratio.log()).mean(), ((ratio - 1).abs() > weights.clip).double().mean()
    losses = Losses(*(part.item() for part in (policy, critic, entropy.mean(), kl, clipped)))
    return losses, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def _laws(spec: PolicySpec, head: Tensor, leaves: Mapping[str, Tensor]) -> tuple[Any, Any]:
    """The distribution of actions, and the one whose entropy is the bonus."""
    if spec.head == "categorical":
        law = torch.distributions.Categorical(logits=head)
        return law, law
    mean, log_std = head.chunk(2, -1) if spec.head == "squashed" else (head, leaves["actor.log_std"])
    wakeup = torch.distributions.Normal(mean, log_std.clamp(*LOG_STD).exp().expand(mean.shape))
    if spec.head == "gaussian":
        return wakeup, wakeup
    return torch.distributions.TransformedDistribution(wakeup, [torch.distributions.TanhTransform()]), wakeup


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("head", ["categorical", "gaussian", "squashed"])
def test_losses_and_gradients_are_the_formulas(head: Head, weighted: bool) -> None:
    net, batch = net_and_batch(head, weighted)
    net.grad.fill_(99.0)  # of the minibatch before
    losses = Autograd(net).gradient(batch, COEFFICIENTS)
    expected, gradients = written_out(net, batch, COEFFICIENTS)
    assert 0.2 < losses.clipped < 0.8
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-6)
    layout = {name: view.shape for name, view in net.params.views.items() if not name.startswith("norm.")}
    found = FlatParams(layout, net.grad.numpy()).views
    assert set(found) == set(gradients)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-4, atol=1e-5, err_msg=name)


def test_evaluation_gives_values_and_log_probabilities() -> None:
    net, batch = net_and_batch("categorical", weighted=False)
    objective = Autograd(net)
    value, log_prob = objective.evaluate(batch.inputs, batch.action)
    with torch.no_grad():
        output = net(torch.from_numpy(batch.inputs))
    assert np.array_equal(value, output.value)
    assert np.array_equal(objective.values(batch.inputs), value)
    expected = torch.log_softmax(output.head, -1)[torch.arange(ROWS), torch.from_numpy(batch.action)]
    assert np.array_equal(log_prob, expected)


def test_an_unmoved_policy_has_moved_nowhere() -> None:
    net, batch = net_and_batch("gaussian", weighted=False)
    objective = Autograd(net)
    _, log_prob = objective.evaluate(batch.inputs, batch.action)
    losses = objective.gradient(batch._replace(reference=log_prob), COEFFICIENTS)
    assert losses.kl == pytest.approx(0, abs=1e-9)
    assert losses.clipped == 0
    assert losses.policy == pytest.approx(-batch.advantage.mean(), rel=1e-5)
    assert losses.entropy == pytest.approx(
        float(net.params.views["actor.log_std"].sum()) + 4 * 0.5 * math.log(2 * math.pi * math.e), rel=1e-5
    )


def test_rows_are_taken_from_every_field() -> None:
    _, batch = net_and_batch("categorical", weighted=True)
    rows = np.array([5, 2])
    for part, whole in zip(batch.take(rows), batch, strict=True):
        assert part is not None
        assert whole is not None
        assert np.array_equal(part, whole[[5, 2]])
    assert batch._replace(weight=None).take(slice(0, 3)).weight is None
