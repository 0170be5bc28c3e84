"""PPO against a plain one written out in torch, without lag and under lag, and the rows that its engine is given."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.core import BatchSpec, NDArray, Snapshot, Transitions
from freewheel.errors import SetupError
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.ppo.learner import PPO
from freewheel.learn.ppo.numpy_engine import NumpyEngine
from freewheel.learn.ppo.targets import LOSSES
from freewheel.learn.ppo.torch_engine import TorchEngine
from freewheel.learn.spec import LearnerSpec, WorldFacts
from freewheel.policies.heads.squashed import LOG_STD
from freewheel.policies.spec import PolicySpec
from freewheel.seeding import generator
from tests.support.learning import Spy, play, sign

SPEC = PolicySpec(4, "float32", ((0, 4),), ((0, 4),), (), None, "categorical", 3, (16, 8), "tanh", -0.2, "")
MASKED = replace(SPEC, obs_size=7, mask=(4, 7))
GAUSSIAN = replace(SPEC, head="gaussian")
STEPS, LANES = 24, 3
ROWS = STEPS * LANES
#: Long gradients, so that clipping is at work, and an uneven number of minibatches.
CONFIG = PPOConfig(lr=2e-3, epochs=3, minibatch=20, entropy=0.02, max_grad_norm=0.3)


def learner_for(spec: PolicySpec, config: PPOConfig = CONFIG, *, rows: int = ROWS) -> PPO:
    """A learner whose weights are no longer the first ones, so that heads and values say something."""
    learner = PPO(config, LearnerSpec(policy=spec, batch=BatchSpec(rows, 1), seed=5))
    weights = learner.engine.net.array
    weights += np.random.default_rng(9).normal(0, 0.2, weights.shape).astype(np.float32)
    return learner


class Plain:
    """PPO as one would write it down: lanes in Python, losses with torch's distributions, torch's optimiser."""

    def __init__(self, spec: PolicySpec, config: PPOConfig, snapshot: Snapshot, seed: int) -> None:
        self.spec, self.config, self.rng = spec, config, generator(seed, "learner")
        self.params = {
            name: torch.nn.Parameter(torch.tensor(np.asarray(value)))
            for name, value in snapshot.params.items()
            if not name.startswith("norm.")
        }
        self.optimizer = torch.optim.Adam(self.params.values(), eps=1e-5)

    def forward(self, part: str, obs: NDArray) -> Tensor:
        x = torch.from_numpy(obs[..., :4])
        for layer in range(3):
            x = x @ self.params[f"{part}.{layer}.weight"] + self.params[f"{part}.{layer}.bias"]
            x = torch.tanh(x) if layer < 2 else x
        return x

    def chances(self, obs: NDArray, action: NDArray) -> tuple[Tensor, Tensor]:
        """Log-probabilities, and entropies."""
        distributions: Any = torch.distributions
        head, chosen = self.forward("actor", obs), torch.from_numpy(action)
        if self.spec.head == "categorical":
            if self.spec.mask:
                head = head.masked_fill(torch.from_numpy(obs[..., 4:7] == 0), -math.inf)
            choice = distributions.Categorical(logits=head)
            return choice.log_prob(chosen), choice.entropy()
        mean, log_std = head.chunk(2, -1) if self.spec.head == "squashed" else (head, self.params["actor.log_std"])
        normal = distributions.Independent(distributions.Normal(mean, log_std.clamp(*LOG_STD).exp()), 1)
        if self.spec.head == "gaussian":
            return normal.log_prob(chosen), normal.entropy()
        squashed = distributions.TransformedDistribution(normal, [distributions.TanhTransform()])
        return squashed.log_prob(chosen.double()).float(), normal.entropy()

    def targets(self, data: Transitions, ratio: NDArray) -> tuple[NDArray, NDArray]:
        """Advantages and value targets [T, B], lane by lane and from the back."""
        gamma, lam = self.config.gamma, self.config.gae_lambda
        with torch.no_grad():
            value, successor = (self.forward("critic", obs)[..., 0].double() for obs in (data.obs, data.next_obs))
        advantage, target = np.zeros(data.valid.shape), np.zeros(data.valid.shape)
        for lane in range(data.valid.shape[1]):
            following, joined = 0.0, False
            for t in range(len(data.valid) - 1, -1, -1):
                if not data.valid[t, lane]:
                    joined = False
                    continue
                going_on = joined and not (data.terminated[t, lane] or data.truncated[t, lane])
                future = 0.0 if data.terminated[t, lane] else successor[t, lane].item()
                delta = data.reward[t, lane] + gamma * future - value[t, lane].item()
                carried = gamma * lam * following if going_on else 0.0
                rho, c = (min(bound, ratio[t, lane]) for bound in (self.config.rho_bar, self.config.c_bar))
                rho, c = (rho, c) if self.config.targets == "corrected" else (1.0, 1.0)
                advantage[t, lane] = delta + carried
                following, joined = rho * delta + c * carried, True
                target[t, lane] = value[t, lane].item() + following
        return advantage.astype(np.float32), target.astype(np.float32)

    def update(self, data: Transitions, *, lagging: bool = False) -> dict[str, float]:
        """What it should say."""
        config, valid, shown = self.config, data.valid, []
        reference, ratio = data.log_prob, np.ones(valid.shape)
        if lagging:
            with torch.no_grad():
                start = self.chances(data.obs, data.action)[0].numpy()
            ratio = np.exp(start - data.log_prob)
            reference = start if config.surrogate == "decoupled" else data.log_prob
        advantage, target = self.targets(data, ratio)
        with torch.no_grad():
            left = (target - self.forward("critic", data.obs)[..., 0].numpy())[valid]
        explained = 1 - left.var() / target[valid].var()
        weighting = lagging and config.surrogate == "decoupled"
        weight = np.minimum(config.rho_bar, ratio) if weighting else np.ones(valid.shape)
        flat = [values[valid] for values in (data.obs, data.action, reference, weight, advantage, target)]
        assert config.minibatch != "auto"
        parts = max(1, len(flat[0]) // config.minibatch)
        for _ in range(config.epochs):
            order = self.rng.permutation(len(flat[0]))
            for begin, end in itertools.pairwise([len(order) * part // parts for part in range(parts + 1)]):
                shown.append(self.step(*(values[order[begin:end]] for values in flat)))
        means = zip((*LOSSES, "gradient/norm"), np.mean(shown, axis=0).tolist(), strict=True)
        return {**dict(means), "value/explained_variance": float(explained)}

    def step(self, obs: NDArray, action: NDArray, *others: NDArray) -> list[float]:
        reference, weight, advantage, target = (torch.from_numpy(values) for values in others)
        config, (log_prob, entropy) = self.config, self.chances(obs, action)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = (log_prob - reference).exp()
        clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
        policy = -(weight * torch.min(ratio * advantage, clipped * advantage)).mean()
        value = (self.forward("critic", obs)[:, 0] - target).square().mean()
        self.optimizer.param_groups[0]["lr"] = config.lr
        self.optimizer.zero_grad()
        (policy + config.value * value - config.entropy * entropy.mean()).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.params.values(), config.max_grad_norm)
        self.optimizer.step()
        kl, outside = (ratio - 1 - ratio.log()).mean(), ((ratio - 1).abs() > config.clip).float().mean()
        return [float(one.detach()) for one in (policy, value, entropy.mean(), kl, outside, norm)]


def assert_same(learner: PPO, about: Mapping[str, float], plain: Plain, expected: Mapping[str, float]) -> None:
    """Weights, and what is said about the update."""
    for name, value in plain.params.items():
        np.testing.assert_allclose(
            learner.engine.net.params.views[name], value.detach(), rtol=1e-5, atol=1e-5, err_msg=name
        )
    assert {name: about[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-5)


HEADS = {"categorical": SPEC, "masked": MASKED, "gaussian": GAUSSIAN, "squashed": replace(SPEC, head="squashed")}


@pytest.mark.parametrize(
    ("head", "gradient"), [*((head, "autograd") for head in HEADS), *((head, "analytic") for head in [*HEADS][:3])]
)
def test_without_lag_it_is_plain_ppo(head: str, gradient: Literal["analytic", "autograd"]) -> None:
    spec = HEADS[head]
    learner = learner_for(spec, replace(CONFIG, gradient=gradient))
    plain = Plain(spec, CONFIG, learner.snapshot(), seed=5)
    first = learner.engine.net.array.copy()
    for version in range(3):
        data = play(spec, learner.snapshot(), (STEPS, LANES), seed=version)
        learner.observe(sign(data, version=version, sequence=version))
        about = learner.update()
        assert_same(learner, about, plain, plain.update(data))
        assert about["gradient/norm"] > CONFIG.max_grad_norm
        assert (about["lag_mean"], about["lag_max"], about["lag/effective_samples"]) == (0, 0, 1)
        assert {key: about[key] for key in about if "share" in key} == {"lag/share_0": 1.0}
    assert np.abs(learner.engine.net.array - first).max() > 0.02


@pytest.mark.parametrize("targets", ["corrected", "plain"])
@pytest.mark.parametrize("surrogate", ["decoupled", "behaviour"])
@pytest.mark.parametrize("bounds", [(1.0, 1.0), (0.8, 1.5)], ids=str)
@pytest.mark.parametrize(
    ("head", "gradient"),
    [("masked", "analytic"), ("gaussian", "analytic"), ("gaussian", "autograd"), ("squashed", "autograd")],
)
def test_under_lag_rows_are_weighted_once_and_the_clip_starts_where_the_update_does(
    head: str,
    gradient: Literal["analytic", "autograd"],
    bounds: tuple[float, float],
    surrogate: Literal["decoupled", "behaviour"],
    targets: Literal["corrected", "plain"],
) -> None:
    config = replace(CONFIG, surrogate=surrogate, targets=targets, rho_bar=bounds[0], c_bar=bounds[1])
    config, spec = replace(config, gradient=gradient), HEADS[head]
    learner = learner_for(spec, config)
    learner.version = 7
    plain = Plain(spec, config, learner.snapshot(), seed=5)
    old = play(spec, learner_for(spec).snapshot(), (STEPS, LANES))
    drift = np.random.default_rng(1).normal(0, 0.3, old.log_prob.shape).astype(np.float32)
    drift[10:] = 0  # chosen by the present version
    data = replace(old, log_prob=old.log_prob + drift)
    learner.observe(sign(data, slice(0, 10), version=5, sequence=3))
    learner.observe(sign(data, slice(10, None), version=7, sequence=4))
    about = learner.update()
    assert_same(learner, about, plain, plain.update(data, lagging=True))
    assert surrogate == "decoupled" or about["policy/clipped"] > 0.1
    assert (about["lag_mean"], about["lag_max"]) == (2 * 10 / STEPS, 2)
    shares = {key: about[key] for key in about if "share" in key}
    assert shares == pytest.approx({"lag/share_0": 14 / STEPS, "lag/share_1": 0.0, "lag/share_2": 10 / STEPS})
    ratio = np.exp(-drift.astype(np.float64))
    assert about["lag/effective_samples"] == pytest.approx(ratio.sum() ** 2 / np.square(ratio).sum() / ROWS, rel=1e-5)


def whole(spec: PolicySpec, **changes: Any) -> PPO:
    """A learner that passes each batch on in one piece, as it is."""
    rows = changes.pop("rows", ROWS)
    return learner_for(spec, PPOConfig(epochs=1, minibatch=10**6, normalize_advantage=False, **changes), rows=rows)


def by_observation(spy: Spy) -> dict[float, tuple[float, float]]:
    """(advantage, value target) of every row that came, by the first column of its observation."""
    return {
        float(inputs[0]): (float(advantage), float(value))
        for batch in spy.batches
        for inputs, advantage, value in zip(batch.inputs, batch.advantage, batch.value, strict=True)
    }


@pytest.mark.parametrize("cuts", [[24], [8, 8, 8], [1, 22, 1], [5, 7, 12]], ids=str)
def test_rows_of_one_author_have_the_same_targets_however_they_are_cut(cuts: list[int]) -> None:
    learner = whole(SPEC)
    spy = Spy(learner)
    data = play(SPEC, learner.snapshot(), (STEPS, LANES), gaps=True)
    learner.spec = replace(learner.spec, batch=BatchSpec(int(data.valid.sum()), 1))
    ends = np.cumsum(cuts).tolist()
    for sequence, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        learner.observe(sign(data, slice(begin, end), sequence=sequence))
    learner.update()
    advantage, target = Plain(SPEC, learner.config, learner.snapshot(), 5).targets(data, np.ones(data.valid.shape))
    found = by_observation(spy)
    assert len(found) == data.valid.sum()
    for t, lane in zip(*data.valid.nonzero(), strict=True):
        expected = (advantage[t, lane], target[t, lane])
        assert found[float(data.obs[t, lane, 0])] == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_what_stands_in_a_gap_means_nothing() -> None:
    ends = []
    for rubbish in (0.0, np.nan, np.inf):
        learner = learner_for(SPEC, rows=50)
        data = play(SPEC, learner.snapshot(), (STEPS, LANES), gaps=True)
        gap = ~data.valid
        for values in (data.reward, data.obs, data.next_obs, data.log_prob):
            values[gap] = rubbish
        data.terminated[gap] = rubbish != 0
        learner.observe(sign(data))
        assert learner.update()["update/skipped"] == 0
        ends.append(learner.engine.net.array.copy())
    assert np.isfinite(ends[0]).all()
    assert np.array_equal(ends[0], ends[1])
    assert np.array_equal(ends[0], ends[2])


@pytest.mark.parametrize(("rows", "minibatch", "sizes"), [(72, 20, [24] * 3), (70, 16, [17, 18] * 2), (72, 500, [72])])
def test_every_epoch_takes_every_row_once(rows: int, minibatch: int, sizes: list[int]) -> None:
    learner = learner_for(SPEC, PPOConfig(epochs=4, minibatch=minibatch), rows=rows)
    spy = Spy(learner)
    data = play(SPEC, learner.snapshot(), (STEPS, LANES))
    learner.observe(sign(data))
    learner.update()
    assert [len(batch.action) for batch in spy.batches] == sizes * 4
    taken = np.sort(data.obs.reshape(-1, 4)[:rows, 0])
    epochs = [spy.batches[k : k + len(sizes)] for k in range(0, len(spy.batches), len(sizes))]
    orders = [np.concatenate([batch.inputs[:, 0] for batch in epoch]) for epoch in epochs]
    for order in orders:
        assert np.array_equal(np.sort(order), taken)
    if len(sizes) > 1:
        assert not np.array_equal(orders[0], orders[1])
    for batch in spy.batches:
        assert batch.advantage.mean() == pytest.approx(0, abs=1e-6)
        assert batch.advantage.std(ddof=1) == pytest.approx(1, rel=1e-5)


def test_a_single_row_is_not_standardised() -> None:
    learner = learner_for(SPEC, PPOConfig(epochs=1, minibatch=1), rows=2)
    spy = Spy(learner)
    learner.observe(sign(play(SPEC, learner.snapshot(), (2, 1))))
    learner.update()
    assert all(np.abs(batch.advantage) > 1e-3 for batch in spy.batches)


@pytest.mark.parametrize(
    ("spec", "gradient", "kind"),
    [
        (SPEC, "auto", NumpyEngine),
        (GAUSSIAN, "analytic", NumpyEngine),
        (replace(GAUSSIAN, activation="relu", hidden=()), "auto", NumpyEngine),
        (SPEC, "autograd", TorchEngine),
        (replace(SPEC, head="squashed"), "auto", TorchEngine),
        (replace(SPEC, activation="silu"), "auto", TorchEngine),
    ],
)
def test_the_numpy_engine_is_used_where_it_can(
    spec: PolicySpec, gradient: Literal["auto", "analytic", "autograd"], kind: type
) -> None:
    assert type(learner_for(spec, PPOConfig(gradient=gradient)).engine) is kind


@pytest.mark.parametrize(
    ("spec", "simulated"),
    [(replace(SPEC, activation="silu"), False), (replace(SPEC, head="squashed"), False), (SPEC, True)],
)
def test_the_numpy_engine_is_refused_where_it_cannot_be_used(spec: PolicySpec, simulated: bool) -> None:
    given = LearnerSpec(policy=spec, batch=BatchSpec(2, 1), seed=0, world=WorldFacts(batched_on_device=simulated))
    with pytest.raises(SetupError, match=r"analytic serves plain MLPs .* use auto"):
        PPO(PPOConfig(gradient="analytic"), given)
