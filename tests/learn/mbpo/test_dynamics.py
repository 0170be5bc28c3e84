"""The ensemble's loss, gradients, normalisation and draws, against closed forms."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.learn.mbpo.config import Predict
from freewheel.learn.mbpo.dynamics import DECAY, LAST_DECAY, Ensemble, ModelSpec
from freewheel.learn.mbpo.prediction import EnsembleOutput, divergence
from freewheel.learn.replay.rows import Columns, pack

SPEC = ModelSpec(Columns(3, 2), 4, (8, 8), "delta", True, True)
LINEAR = ModelSpec(Columns(1, 1), 2, (), "direct", True, True)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_rows(spec: ModelSpec, *shape: int, seed: int = 0) -> Tensor:
    generator = rng(seed)
    obs, next_obs = torch.randn(2, *shape, spec.columns.obs_size, generator=generator)
    action = torch.randn(*shape, spec.columns.action_size, generator=generator)
    reward, ends, known = torch.randn(3, *shape, generator=generator)
    return pack(obs, action, reward, ends > 1, known > -1, next_obs)


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def test_the_loss_of_two_linear_members_in_closed_form() -> None:
    """Direct prediction, one column each of observation and action; outputs: 2 means, 2 log-variances, 1 logit."""
    model = Ensemble(LINEAR, "cpu")
    weight, bias = model.params["0.weight"].data, model.params["0.bias"].data
    weight[0, 0] = torch.tensor([0.5, 2.0, 0.0, 0.1, 1.0])
    weight[1, 1] = torch.tensor([-1.0, 0.3, 0.2, 0.0, -2.0])
    bias[1, 0] = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    data = [[1.0, -1.0, 0.25, 1.0, 1.0, 3.0], [2.0, 0.5, -0.5, 0.0, 0.0, math.nan]]  # the second: successor unknown
    rows = torch.tensor([data, data])

    expected = 0.0
    for member in range(2):
        for x, a, reward, ended, known, successor in data:
            out = [
                x * float(weight[member, 0, k]) + a * float(weight[member, 1, k]) + float(bias[member, 0, k])
                for k in range(5)
            ]
            for k, target in enumerate((reward, successor)):
                logvar = 0.5 - softplus(0.5 - out[2 + k])
                logvar = -10.0 + softplus(logvar + 10.0)
                if k == 0 or known:
                    expected += ((out[k] - target) ** 2 * math.exp(-logvar) + logvar) / 4  # 2 rows × 2 targets
            expected += (softplus(out[4]) - ended * out[4]) / 2
    expected += 0.01 * 2 * (0.5 + 10.0)
    expected += LAST_DECAY * 0.5 * float(weight.square().sum())
    assert model.gradient(rows).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("predict", ["delta", "direct", "affine"])
@pytest.mark.parametrize("learns", [(True, True), (True, False), (False, True), (False, False)])
def test_the_flat_gradient_is_the_slope_of_the_loss(predict: Predict, learns: tuple[bool, bool]) -> None:
    spec = replace(SPEC, predict=predict, learns_reward=learns[0], learns_termination=learns[1])
    model, rows = Ensemble(spec, "cpu", rng()), random_rows(spec, spec.members, 16)
    model.normalise(rows.flatten(0, 1))
    model.gradient(rows)
    grad, start = model.grad.clone(), model.vector.clone()
    direction = torch.randn(len(start), generator=rng(1))
    direction /= direction.norm()
    losses = []
    for sign in (1, -1):
        model.vector.copy_(start + sign * 1e-2 * direction)
        losses.append(model.gradient(rows).double().item())
    assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(float(grad @ direction), rel=2e-2, abs=1e-3)
    model.vector.copy_(start)
    model.gradient(rows)
    assert torch.equal(model.grad, grad)  # nothing of other calls adds up


def test_weight_decay_grows_by_layer_and_spares_biases() -> None:
    model = Ensemble(replace(SPEC, hidden=(4, 4, 4, 4)), "cpu", rng())
    model.vector.fill_(0.3)
    rows = random_rows(model.spec, 4, 8)
    with_decay = model.gradient(rows), model.grad.clone()
    decay, model._decay = model._decay, torch.zeros_like(model.vector)
    without = model.gradient(rows), model.grad.clone()
    torch.testing.assert_close(with_decay[0] - without[0], 0.5 * 0.09 * decay.sum(), rtol=0.02, atol=0)
    values = [*DECAY, DECAY[-1], LAST_DECAY]
    start = 2 * 4 * model.spec.targets
    for i, value in enumerate(values):
        for name, each in ((f"{i}.weight", value), (f"{i}.bias", 0.0)):
            size = model.params[name].numel()
            assert torch.equal(decay[start : start + size], torch.full((size,), each))
            start += size
    torch.testing.assert_close(with_decay[1] - without[1], 0.3 * decay, rtol=0.05, atol=2e-6)


def test_members_do_not_know_each_other() -> None:
    model, rows = Ensemble(SPEC, "cpu", rng()), random_rows(SPEC, 4, 16)
    model.gradient(rows)
    before = {name: value.grad.clone() for name, value in model.params.items() if value.grad is not None}
    rows[2] = random_rows(SPEC, 16, seed=5)
    model.gradient(rows)
    assert len(before) == len(model.params)
    for name, value in model.params.items():
        assert value.grad is not None
        assert [torch.equal(value.grad[e], before[name][e]) for e in range(4)] == [True, True, False, True], name


def test_members_begin_different_and_a_seed_repeats_them() -> None:
    once, again = Ensemble(SPEC, "cpu", rng(3)), Ensemble(SPEC, "cpu", rng(3))
    assert torch.equal(once.vector, again.vector)
    weight = once.params["0.weight"].detach()
    assert not torch.equal(weight[0], weight[1])
    assert weight.abs().max() <= 1 / math.sqrt(5)
    assert weight.std() > 0.3 / math.sqrt(5)


def test_what_a_row_without_successor_says_of_it_does_not_matter() -> None:
    results = []
    for garbage in (1e6, math.nan):
        model, rows = Ensemble(SPEC, "cpu", rng()), random_rows(SPEC, 4, 32)
        row = SPEC.columns.split(rows)
        row.next_obs[row.has_successor == 0] = garbage
        assert 0 < row.has_successor.mean() < 1
        model.normalise(rows.flatten(0, 1))
        results.append((model.gradient(rows), model.grad, *model.holdout_error(rows[0]), *model.statistics.values()))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()


def test_statistics_of_columns_of_all_sizes() -> None:
    spec = replace(SPEC, columns=Columns(5, 2))
    rows = random_rows(spec, 2000).double()
    row = spec.columns.split(rows)
    row.has_successor.fill_(1)
    row.obs[:, 0] = row.obs[:, 0] * 1e-5 + 3e-5
    row.obs[:, 1] *= 1e6
    row.obs[:, 2], row.next_obs[:, 2] = 1 / 3, 1 / 3  # constant
    row.obs[:, 3], row.next_obs[:, 3] = 0, 0
    row.reward[:] = 1e4
    rows = rows.float()
    model = Ensemble(spec, "cpu", rng())
    model.normalise(rows)
    x = model._inputs(*spec.columns.split(rows)[:2])
    target, weight = model._targets(spec.columns.split(rows))
    normal, constant = [0, 1, 4, 5, 6], [2, 3]
    torch.testing.assert_close(x[:, normal].mean(0), torch.zeros(5), rtol=0, atol=1e-3)
    torch.testing.assert_close(x[:, normal].std(0), torch.ones(5), rtol=1e-3, atol=0)
    assert not x[:, constant].any()
    assert not weight[:, [0, 3, 4]].any()  # targets: reward, then the observation
    assert weight[:, [1, 2, 5]].all()
    torch.testing.assert_close(target[:, [1, 2, 5]].std(0), torch.ones(3), rtol=1e-3, atol=0)
    moved = rows.clone()
    spec.columns.split(moved).obs[:, constant] = 1e9  # what has never moved moves after the fit
    assert torch.equal(model._inputs(*spec.columns.split(moved)[:2]), x)
    reported = model.sample(rows[:, :5], rows[:, 5:7], torch.arange(4), rng())
    assert reported.reward is not None
    torch.testing.assert_close(reported.reward, torch.full((2000,), 1e4))
    torch.testing.assert_close(reported.next_obs[:, constant], rows[:, constant])


def planted(predict: Predict = "direct") -> Ensemble:
    """Member e says next observation (x, y) = (e, 10 e) and reward −e, with its own noise, and ends at odds by e."""
    model = Ensemble(ModelSpec(Columns(2, 1), 4, (), predict, True, True), "cpu")
    for e in range(4):
        model.params["0.bias"].data[e, 0] = torch.tensor([-e, e, 10 * e, -8, -2 * e, -9, e])
    return model


def test_rows_are_drawn_from_the_gaussian_of_a_member() -> None:
    model, obs = planted(), torch.zeros(1000, 2)
    logvar = model.forward(torch.zeros(4, 1, 3)).logvar[:, 0]
    for e in range(4):
        drawn = model.sample(obs, torch.zeros(1000, 1), torch.tensor([e]), rng())
        assert drawn.reward is not None
        assert drawn.termination is not None
        deviation = torch.exp(0.5 * logvar[e])
        errors = (torch.cat([drawn.reward[:, None], drawn.next_obs], 1) - torch.tensor([-e, e, 10.0 * e])) / deviation
        assert errors.mean(0).abs().max() < 4 / math.sqrt(1000)
        torch.testing.assert_close(errors.std(0), torch.ones(3), rtol=0.1, atol=0)
        torch.testing.assert_close(drawn.termination, torch.sigmoid(torch.full((1000,), float(e))))
    assert logvar.min() > -10
    torch.testing.assert_close(logvar[3, 1], torch.tensor(-5.97), rtol=0, atol=0.03)


def test_elites_share_the_rows_evenly_and_at_random() -> None:
    model, elites = planted("delta"), torch.tensor([3, 1])
    obs = torch.arange(2001.0)[:, None] * torch.tensor([100.0, 1000.0])
    generator = rng()
    chosen = []
    for _ in range(2):
        reported = model.sample(obs, torch.zeros(2001, 1), elites, generator)
        assert reported.reward is not None
        assert reported.termination is not None
        member = -reported.reward.round()
        assert dict(zip(*np.unique(member.numpy(), return_counts=True), strict=True)) == {1.0: 1000, 3.0: 1001}
        torch.testing.assert_close(
            reported.next_obs - obs, member[:, None] * torch.tensor([1.0, 10.0]), rtol=0, atol=3.0
        )
        torch.testing.assert_close(torch.logit(reported.termination), member, rtol=1e-4, atol=1e-4)
        chosen.append(member == 3)
    first, second = chosen
    assert (first & second).float().mean() == pytest.approx(0.25, abs=0.04)  # a fresh draw for every step
    assert (first[:1000].float().mean(), first[1000:].float().mean()) == pytest.approx((0.5, 0.5), abs=0.06)


def test_what_elites_expect_on_average() -> None:
    model = planted("delta")
    model.statistics["out_mean"].copy_(torch.tensor([7.0, 0.5, 0.0]))
    model.statistics["out_scale"].copy_(torch.tensor([1.0, 2.0, 0.1]))
    expected = model.expect(torch.tensor([[1.0, 2.0]]), torch.zeros(1, 1), torch.tensor([0, 1, 3]))
    torch.testing.assert_close(expected, torch.tensor([[1 + 4 / 3 * 2 + 0.5, 2 + 4 / 3]]))


@pytest.mark.parametrize("rows", [1, 6])
def test_what_is_not_learned_is_not_said(rows: int) -> None:
    """Also of fewer rows than there are elites."""
    spec = replace(SPEC, learns_reward=False, learns_termination=False)
    reported = Ensemble(spec, "cpu", rng()).sample(torch.zeros(rows, 3), torch.zeros(rows, 2), torch.arange(2), rng())
    assert (reported.reward, reported.termination, reported.next_obs.shape) == (None, None, (rows, 3))


def test_held_out_error_is_the_squared_error_and_not_the_likelihood() -> None:
    model = planted()
    rows = pack(
        torch.zeros(2, 2), torch.zeros(2, 1), torch.zeros(2), torch.ones(2), torch.tensor([1, 0]), torch.ones(2, 2)
    )
    error, wrong = model.holdout_error(rows)
    e = torch.arange(4.0)
    torch.testing.assert_close(error, (2 * e.square() + (e - 1).square() + (10 * e - 1).square()) / 4)
    torch.testing.assert_close(wrong, 1 - torch.sigmoid(e))


def test_disagreement_is_the_mean_divergence_from_the_geometric_mean() -> None:
    """Against torch's own KL divergence, in float64."""
    mean, logvar = torch.randn(2, 2, 50, 3, dtype=torch.float64, generator=rng())
    one, other = (EnsembleOutput(mean[i], logvar[i], mean[i]) for i in range(2))
    first, second = (torch.distributions.Normal(part.mean, (0.5 * part.logvar).exp()) for part in (one, other))
    precision = 0.5 * (first.variance.reciprocal() + second.variance.reciprocal())
    between = 0.5 * (first.mean / first.variance + second.mean / second.variance) / precision
    middle = torch.distributions.Normal(between, precision.rsqrt())
    weight = torch.tensor([1.0, 0.0, 1.0])
    kl = torch.distributions.kl_divergence
    wanted = 0.5 * (kl(first, middle) + kl(second, middle))
    torch.testing.assert_close(divergence(one, other, weight), (wanted * weight).sum(-1))
    torch.testing.assert_close(divergence(one, one, weight), torch.zeros(50, dtype=torch.float64))


def test_two_different_elites_are_compared_for_each_row() -> None:
    """Members that differ in their bias only: the divergence of a row tells which two were compared."""
    model = Ensemble(SPEC, "cpu")
    for member, value in enumerate((0.0, 1.0, 10.0)):
        model.params[f"{model.depth - 1}.bias"].data[member, 0, 0] = value
    drawn = model.sample(torch.zeros(301, 3), torch.zeros(301, 2), torch.tensor([2, 0, 1]), rng(), compare=True)
    found = drawn.disagreement
    assert found is not None
    assert found.shape == (301,)
    assert set((found / found.min()).sqrt().round().int().tolist()) == {1, 9, 10}, "1 - 0, 10 - 1, 10 - 0"


def fitted(spec: ModelSpec, rows: Tensor, steps: int = 200) -> Ensemble:
    """Trained on all the rows at once."""
    model = Ensemble(spec, "cpu", rng())
    model.normalise(rows)
    weights = torch.nn.Parameter(model.vector)
    weights.grad = model.grad
    adam = torch.optim.Adam([weights], 0.03)
    for _ in range(steps):
        model.gradient(rows.expand(spec.members, -1, -1))
        adam.step()
    return model


@pytest.mark.parametrize("learns", [(True, True), (False, False)])
def test_an_affine_model_is_affine_in_the_action_whatever_its_weights(learns: tuple[bool, bool]) -> None:
    """By differences: of first order the same everywhere in the next observation and the logit, of second in the reward."""
    spec = replace(SPEC, predict="affine", learns_reward=learns[0], learns_termination=learns[1])
    model = Ensemble(spec, "cpu")
    model.vector.normal_(0, 0.5, generator=rng())
    model.normalise(random_rows(spec, 100))
    obs = torch.randn(1, 3, generator=rng(1)).expand(6, -1)
    action = torch.tensor([0.0, 1.0, 2.0, 3.0, 50.0, 51.0])[:, None] * torch.tensor([1.0, -2.0])
    out = model.forward(model._inputs(obs, action).expand(4, -1, -1))
    torch.testing.assert_close(out.logvar, out.logvar[:, :1].expand_as(out.logvar))
    for part in (out.mean[..., spec.learns_reward :], out.logit):
        step = part.diff(dim=1)
        torch.testing.assert_close(step[:, [1, 2, 4]], step[:, :1].expand(-1, 3, -1), rtol=2e-3, atol=2e-4)
        assert not part.numel() or step.abs().mean() > 0.05
    if spec.learns_reward:
        bend = out.mean[:, :4, 0].diff(n=2)
        torch.testing.assert_close(bend[:, 0], bend[:, 1], rtol=1e-2, atol=1e-3)
        assert bend.abs().max() > 1e-2


def test_an_affine_model_recovers_a_linear_system() -> None:
    """x' = x + f + G u, by networks without hidden layers: f, G and the price of effort can be read off."""
    spec = ModelSpec(Columns(1, 1), 2, (), "affine", True, False)
    obs, action = torch.randn(300, 1, generator=rng()), torch.randn(300, 1, generator=rng(1))
    none = torch.zeros(300)
    reward = 3 - 0.5 * action.square().sum(-1)
    model = fitted(spec, pack(obs, action, reward, none, none + 1, obs + 0.25 - 2 * action))
    for e in range(2):
        one, elite = torch.tensor([[0.7], [0.7], [-1.0]]), torch.tensor([e])
        expected = model.expect(one, torch.tensor([[0.0], [1.0], [3.0]]), elite)
        torch.testing.assert_close(expected, torch.tensor([[0.95], [-1.05], [-6.75]]), rtol=0.01, atol=0.05)
        reported = model.sample(one, torch.tensor([[0.0], [1.0], [3.0]]), elite, rng()).reward
        assert reported is not None
        torch.testing.assert_close(reported, torch.tensor([3.0, 2.5, -1.5]), rtol=0, atol=0.15)


CHOICES = ModelSpec(Columns(2, 1), 2, (), "delta", True, False, choices=3)


def test_of_discrete_actions_the_model_reads_which_one_it_is() -> None:
    """Linear members whose weights of the one-hot columns say what each action does: by number and by column of a row."""
    model = Ensemble(CHOICES, "cpu")
    weight, effect = model.params["0.weight"].data, torch.tensor([[1.0, 0.5, 0], [2.0, 0, 0.25], [3.0, -1, -1]])
    weight[:, 2:, :3] = effect
    number = torch.tensor([2, 0, 1, 2])
    obs = torch.randn(4, 2, generator=rng())
    elites = torch.tensor([0, 1])
    for action in (number, number[:, None].float()):
        torch.testing.assert_close(model.expect(obs, action, elites), obs + effect[number, 1:])
    rows = pack(obs, number, torch.zeros(4), torch.zeros(4), torch.ones(4), obs)
    assert rows.shape == (4, CHOICES.columns.width)
    assert CHOICES.columns.split(rows).action.squeeze(-1).tolist() == [2, 0, 1, 2]
    assert (CHOICES.inputs, weight.shape[1]) == (5, 5)


@pytest.mark.parametrize("predict", ["delta", "affine"])
def test_columns_of_choices_are_not_scaled(predict: Predict) -> None:
    """A choice that was made once in a thousand rows is a 1 like any other, and one that was never made is a 0."""
    obs = torch.randn(1000, 2, generator=rng()) * 3 + 1
    number = torch.zeros(1000, dtype=torch.int64)
    number[7] = 1
    rows = pack(obs, number, torch.randn(1000, generator=rng()), torch.zeros(1000), torch.ones(1000), obs)
    model = Ensemble(replace(CHOICES, predict=predict), "cpu", rng())
    model.normalise(rows)
    inputs = model._inputs(obs, number)
    assert inputs[:, 2:].sum(0).tolist() == [999, 1, 0]
    torch.testing.assert_close(inputs[:, :2].std(0, unbiased=False), torch.ones(2))
    assert model.gradient(rows.expand(2, -1, -1)).isfinite()
    assert model.grad.isfinite().all()
