"""The gradient step of soft actor-critic for discrete actions, against plain autograd of the formulas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from freewheel.core import BatchSpec
from freewheel.learn.replay.rows import ReplayMinibatch
from freewheel.learn.sac.config import SACConfig
from freewheel.learn.sac.discrete import DiscreteUpdate
from freewheel.learn.sac.learner import SAC
from freewheel.learn.spec import LearnerSpec
from freewheel.policies.spec import Enumerated, PolicySpec
from freewheel.testing.conformance import check_learner
from tests.support.learning import play, sign
from tests.support.model_story import BOX_LANES, CHUNK, box_world
from tests.support.sac_reference import ACTOR, CRITICS, TEMPERATURE, Reference, assert_goes_on

K, ROWS, SHARE = 3, 16, SACConfig().entropy_share
SPEC = PolicySpec(4, "float32", ((0, 3),), ((1, 4),), (), None, "categorical", K, (12, 8), "tanh", 0.0, "")
MASKED = replace(SPEC, obs_size=4 + K, mask=(4, 4 + K))


def batch_of(rows: int = ROWS, seed: int = 0, *, masked: bool = False) -> ReplayMinibatch:
    rng = torch.Generator().manual_seed(seed)
    obs, next_obs = torch.randn(2, rows, 4, generator=rng)
    discount = 0.95 * (torch.rand(rows, generator=rng) > 0.3).float()
    reward = torch.randn(rows, generator=rng)
    allowed = torch.ones(2, rows, K)
    if masked:
        allowed = (torch.rand(2, rows, K, generator=rng) < 0.5).float()
        allowed.scatter_(-1, torch.randint(K, (2, rows, 1), generator=rng), 1.0)  # at least one
        obs, next_obs = (torch.cat(parts, -1) for parts in zip((obs, next_obs), allowed, strict=True))
    action = torch.multinomial(allowed[0], 1, generator=rng).float()
    weight = 2 * torch.rand(rows, generator=rng) if masked else None
    return ReplayMinibatch(obs, action, reward, discount, next_obs, weight)


def update_for(
    spec: PolicySpec = SPEC,
    config: SACConfig | None = None,
    draw: Callable[[], ReplayMinibatch] = batch_of,
    seed: int = 0,
) -> DiscreteUpdate:
    given = LearnerSpec(policy=spec, batch=BatchSpec(4, 2), seed=seed)
    return DiscreteUpdate(config or SACConfig(), given, draw, generators=[])


def test_forbidden_actions_are_in_no_sum() -> None:
    """Whatever the critics say about them."""
    update, temperature, only = update_for(MASKED), torch.tensor([0.5]), batch_of(masked=True).obs
    only[:, 4:] = torch.tensor([1.0, 0.0, 1.0])
    *_, bias = update.critics.views(update.critics.target)
    bias[..., 1] += 1e6
    torch.testing.assert_close(update.future(only, temperature), update.future(only, temperature).clamp(max=1e3))
    found = update.improve(only, temperature)
    grads = [one.grad for one in update._actor if one.shape == (K,)]
    assert grads[-1] is not None
    assert grads[-1][1] == 0 != grads[-1][0]
    assert float(found.entropy) == pytest.approx(math.log(2), abs=1e-3)  # the first policy is close to uniform


@pytest.mark.parametrize(
    ("masks", "excess"),
    [
        ([(1, 1, 1)], (1 - SHARE) * math.log(3)),
        ([(1, 0, 1), (0, 1, 1)], (1 - SHARE) * math.log(2)),
        ([(0, 1, 0)], 0.0),
        ([(1, 1, 1), (1, 0, 0)], (1 - SHARE) * math.log(3) / 2),
    ],
    ids=["all", "two", "one", "some"],
)
def test_the_greatest_entropy_is_that_of_the_allowed_actions(masks: list[tuple[int, ...]], excess: float) -> None:
    update = update_for(MASKED)
    with torch.no_grad():
        update.net.vector.zero_()  # a uniform policy
    obs = torch.cat([torch.zeros(len(masks), 4), torch.tensor(masks).float()], -1)
    assert float(update.improve(obs, torch.ones(1)).excess) == pytest.approx(excess, abs=1e-6)


class Formulas(Reference):
    def policy(self, x: Tensor) -> tuple[torch.distributions.Categorical, Tensor]:
        """And which actions are allowed."""
        logits = self.mlp(self.actor, x[:, 0:3])
        allowed = x[:, slice(*self.spec.mask)] > 0 if self.spec.mask else torch.ones_like(logits) > 0
        return torch.distributions.Categorical(logits=logits.masked_fill(~allowed, -1e18)), allowed

    def q(self, critics: Sequence[Sequence[Tensor]], x: Tensor) -> Tensor:
        return torch.stack([self.mlp(c, x[:, 1:4], norm=self.config.critic_norm) for c in critics])

    def step(self, batch: ReplayMinibatch) -> None:
        obs, action, reward, discount, next_obs = (part.double() for part in batch[:5] if part is not None)
        weight = torch.ones(len(obs)) if batch.weight is None else batch.weight
        alpha = self.log_temperature.exp().detach()
        with torch.no_grad():
            then, _ = self.policy(next_obs)
            soft = (then.probs * self.q(self.targets, next_obs).min(0).values).sum(-1) + alpha * then.entropy()
            goal = reward + discount * soft
        taken = action.long()[:, 0]
        errors = [q[torch.arange(len(q)), taken] - goal for q in self.q(self.critics, obs)]
        loss: Any = sum(0.5 * (weight * error.square()).mean() for error in errors)
        self.descend(CRITICS, loss)
        self.follow()
        now, allowed = self.policy(obs)
        lower = self.q(self.critics, obs).min(0).values.detach()
        self.descend(ACTOR, (-alpha * now.entropy() - (now.probs * lower).sum(-1)).mean())
        value, entropy = (now.probs * lower).sum(-1).detach().mean(), now.entropy().detach().mean()
        self.say(loss.detach(), alpha, value, entropy)
        wanted = self.config.target_entropy
        goal = self.config.entropy_share * allowed.sum(-1).log() if wanted is None else torch.full((len(obs),), wanted)
        if self.config.temperature is None:
            self.descend(TEMPERATURE, (self.log_temperature * (now.entropy().detach() - goal)).mean())


CASES = {
    "plain": (SPEC, SACConfig(lr=1e-3)),
    "masked": (MASKED, SACConfig(lr=1e-2, tau=0.2, entropy_share=0.9)),
    "fixed temperature": (MASKED, SACConfig(temperature=0.3)),
    "layer norm": (SPEC, SACConfig(critic_norm=True, target_entropy=0.4)),
}


@pytest.mark.parametrize("case", CASES)
def test_updates_are_those_of_plain_autograd(case: str) -> None:
    spec, config = CASES[case]
    drawn = itertools.count()
    update = update_for(spec, config, lambda: batch_of(seed=next(drawn), masked=spec.mask is not None))
    reference, noise = Formulas.of(update), update.policy.generator.get_state()
    for number in range(3):
        update.step()
        reference.step(batch_of(seed=number, masked=spec.mask is not None))
        reference.assert_equal(update)
    assert torch.equal(noise, update.policy.generator.get_state()), "sums need no random numbers"


def test_a_restored_agent_goes_on_bit_for_bit() -> None:
    assert_goes_on(lambda seed: update_for(seed=seed))


@pytest.mark.parametrize("normalised", [False, True])
def test_it_keeps_the_promises_of_a_learner(normalised: bool) -> None:
    """In a world with a mask; the buffer wraps."""
    config = SACConfig(batch=16, buffer=60, learning_starts=CHUNK)
    collect, spec = box_world("tests.support.worlds:Wandering", {"discrete": 5}, normalize_obs=normalised)
    assert (spec.head, spec.mask is not None) == ("categorical", True)
    task = LearnerSpec(policy=spec, batch=BatchSpec(CHUNK // BOX_LANES, BOX_LANES), seed=1)
    check_learner(lambda: SAC(config, task), collect)


def test_an_action_is_one_column_of_a_row() -> None:
    """However many there are to choose from: the buffer of a world with 145 actions is no larger."""
    many = replace(SPEC, action_size=145)
    learner = SAC(SACConfig(buffer=2_000), LearnerSpec(policy=many, batch=BatchSpec(4, 2), seed=0))
    assert learner.replay.columns.width == 2 * 4 + 1 + 3


def goal(later: float = -0.1, adopted: SAC | None = None, **options: Any) -> tuple[float, float]:
    """One action of three ends the episode with +5, the others cost 0.1, and `later` after the first 60 rows: the temperature of
    the first of 120 updates, and how likely that action is after the last."""
    config = SACConfig(batch=32, learning_starts=60, updates_per_row=2, lr=3e-3, tau=0.05, **options)
    learner = SAC(config, LearnerSpec(policy=SPEC, batch=BatchSpec(30, 2), seed=0))
    data, begins = play(SPEC, learner.snapshot(), (60, 2)), 0.0
    data.terminated[:], data.truncated[:] = (data.action == 1) & (data.obs[..., 1] > -0.5), False
    data.reward[:30], data.reward[30:] = -0.1, later
    data.reward[data.terminated] = 5.0
    learner.observe(sign(data))
    if adopted is not None:
        learner.adopt(adopted.learned())
    learner.burst = 1
    while learner.ready:
        learner.update()
        begins = begins or learner.updater.losses()["policy/temperature"]
    with torch.no_grad():
        weights = learner.updater.policy.distribution(torch.from_numpy(data.obs).flatten(0, 1))
    return begins, float(cast(Enumerated, weights).log_p[:, 1].exp().mean())


def test_a_temperature_follows_from_the_first_rows_unless_it_is_given_and_then_it_pays_to_arrive() -> None:
    """With a temperature of 1 entropy is worth more than a step costs."""
    other = SAC(SACConfig(first_temperature=0.7), LearnerSpec(policy=SPEC, batch=BatchSpec(4, 2), seed=0))
    found = [goal(), goal(-3.0), goal(first_temperature=1.0), goal(temperature=0.3), goal(adopted=other)]
    assert [begins for begins, _ in found] == pytest.approx([0.05, 0.05, 1.0, 0.3, 0.7])
    assert found[0][1] > 0.9 > 0.7 > found[2][1], found
