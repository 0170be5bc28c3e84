"""The gradient step of soft actor-critic: what it moves, by how much, and that it is what autograd makes of the formulas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from freewheel.core import BatchSpec
from freewheel.learn.replay import Minibatch
from freewheel.learn.sac.config import SACConfig
from freewheel.learn.sac.continuous import ContinuousUpdate
from freewheel.learn.spec import LearnerSpec
from freewheel.policies.spec import PolicySpec

SPEC = PolicySpec(4, "float32", ((0, 3),), ((1, 4),), (), None, "squashed", 2, (12, 8), "tanh", 0.0, "")
LINEAR = replace(SPEC, hidden=())
ROWS = 16


def batch_of(rows: int = ROWS, seed: int = 0, *, weighted: bool = False) -> Minibatch:
    rng = torch.Generator().manual_seed(seed)
    obs, next_obs = torch.randn(2, rows, 4, generator=rng)
    action = torch.rand(rows, 2, generator=rng) * 2 - 1
    discount = 0.95 * (torch.rand(rows, generator=rng) > 0.3).float()
    reward = torch.randn(rows, generator=rng)
    weight = 2 * torch.rand(rows, generator=rng) if weighted else None
    return Minibatch(obs, action, reward, discount, next_obs, weight)


def update_for(
    spec: PolicySpec = SPEC, config: SACConfig | None = None, draw: Callable[[], Minibatch] = batch_of, seed: int = 0
) -> ContinuousUpdate:
    given = LearnerSpec(policy=spec, batch=BatchSpec(4, 2), seed=seed)
    return ContinuousUpdate(config or SACConfig(), given, draw, generators=[])


def fill(views: dict[str, Any], weight: float, bias: Sequence[float]) -> None:
    """Make a linear policy say the same to every observation."""
    views["actor.0.weight"][...] = weight
    views["actor.0.bias"][...] = bias


@pytest.mark.parametrize(("log_std", "sign"), [(-4.0, 1), (0.0, -1)], ids=["too sharp", "too wide"])
def test_the_temperature_moves_against_the_error_of_the_entropy(log_std: float, sign: int) -> None:
    update = update_for(LINEAR, SACConfig(lr=0.01))
    fill(update.net.params.views, 0.0, [0.0, 0.0, log_std, log_std])
    update.step()
    losses = update.losses()
    grad = update.log_temperature.grad
    assert grad is not None
    assert float(grad) == pytest.approx(losses["policy/entropy"] - -2.0, rel=1e-5)  # the target: minus the columns
    assert math.copysign(1, -float(grad)) == sign
    assert float(update.log_temperature) == pytest.approx(sign * 0.01, rel=1e-4)  # Adam's first step is one lr long
    assert losses["policy/temperature"] == 1.0  # as it was in the step


def test_a_sharp_gaussian_has_the_entropy_of_its_formula() -> None:
    update = update_for(LINEAR, SACConfig(), lambda: batch_of(20_000))
    fill(update.net.params.views, 0.0, [0.5, -0.5, -3.0, -4.0])
    update.step()
    squash = 2 * math.log(1 - math.tanh(0.5) ** 2)
    expected = 2 * 0.5 * math.log(2 * math.pi * math.e) - 7 + squash
    assert update.losses()["policy/entropy"] == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("target", [-7.0, 3.0])
def test_the_entropy_to_steer_to_can_be_given(target: float) -> None:
    update = update_for(config=SACConfig(target_entropy=target))
    update.step()
    assert update.log_temperature.grad is not None
    assert float(update.log_temperature.grad) == pytest.approx(update.losses()["policy/entropy"] - target, rel=1e-5)


def test_a_learned_temperature_begins_where_it_is_told_and_moves_by_the_same_share() -> None:
    update = update_for(config=SACConfig(first_temperature=0.02))
    update.step()
    assert update.losses()["policy/temperature"] == pytest.approx(0.02)  # as it was in the step
    moved = float(update.log_temperature) - math.log(0.02)
    assert abs(moved) == pytest.approx(
        SACConfig().lr, rel=1e-2
    )  # Adam's first step is one lr long, whatever it begins with


def test_a_fixed_temperature_stays() -> None:
    update = update_for(config=SACConfig(temperature=0.2))
    for _ in range(3):
        update.step()
    assert float(update.log_temperature.exp()) == pytest.approx(0.2)


@pytest.mark.parametrize("tau", [0.005, 0.3, 1.0])
def test_targets_follow_exactly_once_a_step(tau: float) -> None:
    update = update_for(config=SACConfig(tau=tau, lr=0.05))
    target = update.critics.target.clone()
    for _ in range(3):
        update.step()
        target = (1 - tau) * target + tau * update.critics.vector
        torch.testing.assert_close(update.critics.target, target, rtol=1e-6, atol=1e-7)
    assert (update.critics.target - update.critics.vector).abs().max() > 0.01 or tau == 1.0


def test_the_actors_step_leaves_no_gradient_in_the_critics(monkeypatch: pytest.MonkeyPatch) -> None:
    update, seen = update_for(), list[Tensor]()
    before = update.critics.vector.clone()

    def grads() -> list[Tensor]:
        return [parameter.grad.clone() for parameter in update.critics.parameters if parameter.grad is not None]

    def spied(step: Callable[[], None]) -> Callable[[], None]:
        def inner() -> None:
            seen.extend(grads())
            step()

        return inner

    monkeypatch.setattr(update._critics_adam, "step", spied(update._critics_adam.step))
    update.step()
    assert len(seen) == len(update.critics.parameters)
    assert all(torch.equal(*pair) for pair in zip(seen, grads(), strict=True))
    assert not torch.equal(before, update.critics.vector)


def test_every_step_draws_and_losses_are_means_since_they_were_asked() -> None:
    drawn = list[Minibatch]()

    def draw() -> Minibatch:
        drawn.append(batch_of(seed=len(drawn)))
        return drawn[-1]

    update = update_for(draw=draw)
    twin = update_for(draw=lambda: batch_of(seed=len(each)))
    each = list[dict[str, float]]()
    for number in range(3):
        update.step()
        twin.step()
        each.append(twin.losses())
        assert len(drawn) == update.unread == number + 1
    means = update.losses()
    assert means == pytest.approx({name: sum(losses[name] for losses in each) / 3 for name in means}, rel=1e-5)
    assert update.unread == 0
    assert set(update.losses().values()) == {0.0}


@dataclass
class Reference:
    """Soft actor-critic as the paper has it, in float64, with autograd and torch's Adam for each of three losses."""

    config: SACConfig
    spec: PolicySpec
    actor: list[nn.Parameter]
    critics: list[list[nn.Parameter]]
    log_temperature: nn.Parameter
    mean: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        lr = self.config.lr
        self.targets = [[part.detach().clone() for part in critic] for critic in self.critics]
        self.optimisers = [
            torch.optim.Adam(parts, lr=lr)
            for parts in (self.actor, [*itertools.chain(*self.critics)], [self.log_temperature])
        ]

    @classmethod
    def of(cls, update: ContinuousUpdate) -> Reference:
        views = update.policy.weights(on_device=False)
        count = len(update.net.spec.hidden) + 1
        actor = [views[f"actor.{i}.{part}"] for i in range(count) for part in ("weight", "bias")]
        critics = [
            [nn.Parameter(part[twin].detach().double().clone()) for part in update.critics.parameters]
            for twin in range(2)
        ]
        return cls(
            update.config,
            update.net.spec,
            [nn.Parameter(torch.tensor(part).double()) for part in actor],
            critics,
            nn.Parameter(update.log_temperature.double().clone()),
            torch.tensor(views["norm.mean"]).double(),
            torch.tensor(views["norm.scale"]).double(),
        )

    def mlp(self, parts: Sequence[Tensor], x: Tensor, *, norm: bool = False) -> Tensor:
        for i in range(0, len(parts), 2):
            x = x @ parts[i] + parts[i + 1]
            if i < len(parts) - 2:
                x = torch.tanh(functional.layer_norm(x, x.shape[-1:]) if norm else x)
        return x

    def act(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.mlp(self.actor, x[:, 0:3]).chunk(2, dim=-1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp(), validate_args=False)
        raw = mean + normal.scale * noise
        action = torch.tanh(raw)
        return action, (normal.log_prob(raw) - torch.log(1 - action.square())).sum(-1)

    def q(self, critics: Sequence[Sequence[Tensor]], x: Tensor, action: Tensor) -> Tensor:
        seen = torch.cat([x[:, 1:4], action], -1)
        return torch.stack([self.mlp(c, seen, norm=self.config.critic_norm).squeeze(-1) for c in critics])

    def step(self, batch: Minibatch, noises: Sequence[Tensor]) -> None:
        obs, action, reward, discount, next_obs = (part.double() for part in batch[:5] if part is not None)
        weight = torch.ones(len(obs)) if batch.weight is None else batch.weight
        x, following = (((part - self.mean) * self.scale).clamp(-10, 10) for part in (obs, next_obs))
        alpha = self.log_temperature.exp().detach()
        with torch.no_grad():
            then, log_prob = self.act(following, noises[0].double())
            goal = self.q(self.targets, following, then).min(0).values - alpha * log_prob
            goal = reward + discount * goal
        loss = sum(0.5 * (weight * (q - goal).square()).mean() for q in self.q(self.critics, x, action))
        self._descend(1, loss)
        with torch.no_grad():
            for target, part in zip(itertools.chain(*self.targets), itertools.chain(*self.critics), strict=True):
                target.copy_((1 - self.config.tau) * target + self.config.tau * part)
        chosen, log_prob = self.act(x, noises[1].double())
        self._descend(0, (alpha * log_prob - self.q(self.critics, x, chosen).min(0).values).mean())
        wanted = -float(self.spec.action_size) if self.config.target_entropy is None else self.config.target_entropy
        if self.config.temperature is None:
            self._descend(2, -(self.log_temperature * (log_prob.detach() + wanted)).mean())

    def _descend(self, which: int, loss: Any) -> None:
        self.optimisers[which].zero_grad()
        loss.backward()
        self.optimisers[which].step()


CASES = {
    "plain": (SPEC, SACConfig(lr=1e-3)),
    "many steps' tau": (SPEC, SACConfig(lr=1e-2, tau=0.2)),
    "fixed temperature": (SPEC, SACConfig(temperature=0.3)),
    "layer norm": (SPEC, SACConfig(critic_norm=True, target_entropy=-1.0)),
    "normalised": (replace(SPEC, normalised=((0, 4),)), SACConfig()),
    "linear": (LINEAR, SACConfig()),
    "weighted": (SPEC, SACConfig(lr=1e-3)),
}


def assert_close(ours: Tensor, reference: Tensor) -> None:
    torch.testing.assert_close(ours.double(), reference, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_updates_are_those_of_plain_autograd(case: str) -> None:
    (spec, config), weighted = CASES[case], case == "weighted"
    drawn = itertools.count()
    update = update_for(spec, config, lambda: batch_of(seed=next(drawn), weighted=weighted))
    if spec.normalised:
        update.policy.normalise(np.array([0.5, -1.0, 0.0, 2.0]), np.array([2.0, 0.5, 9.0, 1.0]))
    reference = Reference.of(update)
    value = {name: view.copy() for name, view in update.net.params.views.items() if name.startswith("critic.")}
    for number in range(3):
        generator = torch.Generator()
        generator.set_state(update.policy.generator.get_state())
        noises = [torch.empty(ROWS, 2).normal_(generator=generator) for _ in range(2)]
        update.step()
        reference.step(batch_of(seed=number, weighted=weighted), noises)
        assert torch.equal(generator.get_state(), update.policy.generator.get_state()), "it drew more random numbers"
        for parameter, wanted in zip(update._actor, reference.actor, strict=True):
            assert_close(parameter, wanted)
        flat = update.critics.views(update.critics.target)
        for i, (parameter, target) in enumerate(zip(update.critics.parameters, flat, strict=True)):
            for twin in range(2):
                assert_close(parameter[twin], reference.critics[twin][i])
                assert_close(target[twin], reference.targets[twin][i])
        assert_close(update.log_temperature, reference.log_temperature)
    for name, before in value.items():
        assert np.array_equal(update.net.params.views[name], before), "the value network of the policy is not used"


@pytest.mark.parametrize("critics", [2, 5])
def test_a_restored_agent_goes_on_bit_for_bit(critics: int) -> None:
    ours, theirs = (update_for(config=SACConfig(critics=critics), seed=seed) for seed in (0, 3))
    for _ in range(2):
        ours.step()
    theirs.load_state_dict(ours.state_dict())
    for update in (ours, theirs):
        update.step()
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == other.keys()
    assert all(np.array_equal(mine[name], other[name]) for name in mine)
    assert not np.array_equal(mine["params"], update_for().state_dict()["params"])
