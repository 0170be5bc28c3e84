"""The gradient step of soft actor-critic: what it moves, by how much, and that it is what autograd makes of the formulas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.core import BatchSpec
from freewheel.learn.replay.rows import ReplayMinibatch
from freewheel.learn.sac.config import SACConfig
from freewheel.learn.sac.continuous import ContinuousUpdate
from freewheel.learn.spec import LearnerSpec
from freewheel.policies.spec import PolicySpec
from tests.support.sac_reference import ACTOR, CRITICS, TEMPERATURE, Reference, assert_goes_on

SPEC = PolicySpec(4, "float32", ((0, 3),), ((1, 4),), (), None, "squashed", 2, (12, 8), "tanh", 0.0, "")
LINEAR = replace(SPEC, hidden=())
ROWS = 16


def batch_of(rows: int = ROWS, seed: int = 0, *, weighted: bool = False) -> ReplayMinibatch:
    rng = torch.Generator().manual_seed(seed)
    obs, next_obs = torch.randn(2, rows, 4, generator=rng)
    action = torch.rand(rows, 2, generator=rng) * 2 - 1
    discount = 0.95 * (torch.rand(rows, generator=rng) > 0.3).float()
    reward = torch.randn(rows, generator=rng)
    weight = 2 * torch.rand(rows, generator=rng) if weighted else None
    return ReplayMinibatch(obs, action, reward, discount, next_obs, weight)


def update_for(
    spec: PolicySpec = SPEC,
    config: SACConfig | None = None,
    draw: Callable[[], ReplayMinibatch] = batch_of,
    seed: int = 0,
) -> ContinuousUpdate:
    given = LearnerSpec(policy=spec, batch=BatchSpec(4, 2), seed=seed)
    return ContinuousUpdate(config or SACConfig(), given, draw, generators=[])


def test_a_learned_temperature_begins_where_it_is_told_and_moves_by_the_same_share() -> None:
    update = update_for(config=SACConfig(first_temperature=0.02))
    update.step()
    assert update.losses()["policy/temperature"] == pytest.approx(0.02)  # as it was in the step
    moved = float(update.log_temperature) - math.log(0.02)
    assert abs(moved) == pytest.approx(SACConfig().lr, rel=1e-2)  # Adam's first step is one lr long


def test_every_step_draws_and_losses_are_means_since_they_were_asked() -> None:
    drawn = list[ReplayMinibatch]()

    def draw() -> ReplayMinibatch:
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


class Paper(Reference):
    """Soft actor-critic as the paper has it."""

    def scaled(self, obs: Tensor) -> Tensor:
        mean, scale = (torch.tensor(self.weights[name]).double() for name in ("norm.mean", "norm.scale"))
        return ((obs - mean) * scale).clamp(-10, 10)

    def act(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.mlp(self.actor, x[:, 0:3]).chunk(2, dim=-1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp(), validate_args=False)
        raw = mean + normal.scale * noise
        action = torch.tanh(raw)
        return action, (normal.log_prob(raw) - torch.log(1 - action.square())).sum(-1)

    def q(self, critics: Sequence[Sequence[Tensor]], x: Tensor, action: Tensor) -> Tensor:
        seen = torch.cat([x[:, 1:4], action], -1)
        return torch.stack([self.mlp(c, seen, norm=self.config.critic_norm).squeeze(-1) for c in critics])

    def step(self, batch: ReplayMinibatch, noises: Sequence[Tensor]) -> None:
        obs, action, reward, discount, next_obs = (part.double() for part in batch[:5] if part is not None)
        weight = torch.ones(len(obs)) if batch.weight is None else batch.weight
        x, following = self.scaled(obs), self.scaled(next_obs)
        alpha = self.log_temperature.exp().detach()
        with torch.no_grad():
            then, log_prob = self.act(following, noises[0].double())
            goal = self.q(self.targets, following, then).min(0).values - alpha * log_prob
            goal = reward + discount * goal
        loss: Any = sum(0.5 * (weight * (q - goal).square()).mean() for q in self.q(self.critics, x, action))
        self.descend(CRITICS, loss)
        self.follow()
        chosen, log_prob = self.act(x, noises[1].double())
        lower = self.q(self.critics, x, chosen).min(0).values
        self.descend(ACTOR, (alpha * log_prob - lower).mean())
        self.say(loss.detach(), alpha, lower.detach().mean(), -log_prob.detach().mean())
        wanted = -float(self.spec.action_size) if self.config.target_entropy is None else self.config.target_entropy
        if self.config.temperature is None:
            self.descend(TEMPERATURE, -(self.log_temperature * (log_prob.detach() + wanted)).mean())


CASES = {
    "plain": (SPEC, SACConfig(lr=1e-3)),
    "many steps' tau": (SPEC, SACConfig(lr=1e-2, tau=0.2)),
    "fixed temperature": (SPEC, SACConfig(temperature=0.3)),
    "layer norm": (SPEC, SACConfig(critic_norm=True, target_entropy=-1.0)),
    "normalised": (replace(SPEC, normalised=((0, 4),)), SACConfig()),
    "linear": (LINEAR, SACConfig()),
    "weighted": (SPEC, SACConfig(lr=1e-3)),
}


@pytest.mark.parametrize("case", CASES)
def test_updates_are_those_of_plain_autograd(case: str) -> None:
    (spec, config), weighted = CASES[case], case == "weighted"
    drawn = itertools.count()
    update = update_for(spec, config, lambda: batch_of(seed=next(drawn), weighted=weighted))
    if spec.normalised:
        update.policy.normalise(np.array([0.5, -1.0, 0.0, 2.0]), np.array([2.0, 0.5, 9.0, 1.0]))
    reference = Paper.of(update)
    value = {name: view.copy() for name, view in update.net.params.views.items() if name.startswith("critic.")}
    for number in range(3):
        generator = torch.Generator()
        generator.set_state(update.policy.generator.get_state())
        noises = [torch.empty(ROWS, 2).normal_(generator=generator) for _ in range(2)]
        update.step()
        reference.step(batch_of(seed=number, weighted=weighted), noises)
        assert torch.equal(generator.get_state(), update.policy.generator.get_state()), "it drew more random numbers"
        reference.assert_equal(update)
    for name, before in value.items():
        assert np.array_equal(update.net.params.views[name], before), "the value network of the policy is not used"


@pytest.mark.parametrize("critics", [2, 5])
def test_a_restored_agent_goes_on_bit_for_bit(critics: int) -> None:
    assert_goes_on(lambda seed: update_for(config=SACConfig(critics=critics), seed=seed))
