"""Fitting: recovers planted worlds, keeps what is held out apart, stops in time, and repeats itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.learn.mbpo import fitting
from freewheel.learn.mbpo.config import MBPOConfig
from freewheel.learn.mbpo.dynamics import ModelSpec
from freewheel.learn.mbpo.fitting import Continuation, Fit, Fitter
from freewheel.learn.replay.rows import Columns, pack

SPEC = ModelSpec(Columns(2, 1), 3, (16,), "delta", True, False)
CONFIG = MBPOConfig(members=3, elites=2, model_hidden=(16,), model_batch=64, model_lr=3e-3, max_epochs=30)
NOISE = (0.05, 0.2)  # of the two observed columns, as deviations
SMALL = 1e-4  # the size of rewards


def world(count: int, seed: int = 0) -> Tensor:
    """x' = 0.9 x + 0.5 a, y' = y − 1000 x, each with noise; reward SMALL × (x + 2 a); ends where a > 0.5."""
    rng = torch.Generator().manual_seed(seed)
    x, y, a = torch.rand(3, count, generator=rng) * 2 - 1
    noise = torch.randn(2, count, generator=rng) * torch.tensor(NOISE)[:, None]
    successor = torch.stack([0.9 * x + 0.5 * a + noise[0], y - 1000 * (x + noise[1])], dim=1)
    return pack(torch.stack([x, y], dim=1), a[:, None], SMALL * (x + 2 * a), a > 0.5, torch.ones(count), successor)


@pytest.fixture(scope="module")
def fitted() -> tuple[Fitter, Fit]:
    fitter = Fitter(SPEC, CONFIG, 0, "cpu", "off")
    return fitter, fitter(world(3000).numpy())


def test_a_linear_world_with_noise_is_recovered_at_every_scale(fitted: tuple[Fitter, Fit]) -> None:
    fitter, fit = fitted
    x, a = torch.linspace(-0.8, 0.8, 9), torch.tensor([-0.8, 0.8])
    grid = torch.cartesian_prod(x, a).repeat(2000, 1)
    obs, action = torch.stack([grid[:, 0], torch.zeros(len(grid))], dim=1), grid[:, 1:]
    reported = fitter.ensemble.sample(obs, action, torch.as_tensor(fit.elites), torch.Generator().manual_seed(9))
    assert reported.reward is not None
    truth = torch.stack([0.9 * obs[:, 0] + 0.5 * action[:, 0], -1000 * obs[:, 0]], dim=1)
    errors = (reported.next_obs - truth).view(2000, 18, 2)
    assert errors.mean(0)[:, 0].abs().max() < 0.05
    assert errors.mean(0)[:, 1].abs().max() < 100  # of slopes that span 1600
    torch.testing.assert_close(errors.std((0, 1)), torch.tensor([NOISE[0], 1000 * NOISE[1]]), rtol=0.2, atol=0)
    assert (reported.reward / SMALL - obs[:, 0] - 2 * action[:, 0]).view(2000, 18).mean(0).abs().max() < 0.1


def test_its_metrics(fitted: tuple[Fitter, Fit]) -> None:
    fitter, fit = fitted
    metrics = fit.metrics
    assert metrics.keys() == {"model/holdout", "model/epochs", "model/steps", "model/rows", "model/train_loss"}
    assert metrics["model/rows"] == 3000
    assert metrics["model/steps"] == metrics["model/epochs"] * math.ceil(2400 / 64)
    spread = fitter.ensemble.statistics["out_scale"][1:].numpy()
    floor = float(np.square([NOISE[0], 1000 * NOISE[1]] / spread).sum()) / 3  # reward has no noise
    assert 0.85 * floor < metrics["model/holdout"] < 1.3 * floor
    assert math.isfinite(metrics["model/train_loss"])


def test_ends_are_learned_where_they_must_be() -> None:
    fitter = Fitter(replace(SPEC, learns_termination=True), CONFIG, 0, "cpu", "off")
    fit = fitter(world(2000))
    assert fit.metrics["model/termination_error"] < 0.15  # 0.375 for who knows the rate alone
    action = torch.tensor([[0.9], [0.1], [-0.9]])
    reported = fitter.ensemble.sample(torch.zeros(3, 2), action, torch.as_tensor(fit.elites), torch.Generator())
    assert reported.termination is not None
    assert reported.termination[0] > 0.9
    assert reported.termination[1:].max() < 0.1


class Scripted(Fitter):
    """Training does nothing but count; held-out errors are those of a script [epochs, E]; weights tell the epoch."""

    def __init__(self, script: list[list[float]], max_epochs: int = 100) -> None:
        super().__init__(SPEC, replace(CONFIG, max_epochs=max_epochs), 0, "cpu", "off")
        self.epoch = 0
        self.script = script
        self.ensemble.holdout_error = self.scripted  # type: ignore[method-assign]

    def scripted(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.script[self.epoch - 1]), torch.zeros(3)

    def _epoch(self, steps: int) -> Iterator[None]:
        self.epoch += 1
        self.ensemble.vector.fill_(self.epoch)
        yield


def test_a_fit_stops_when_no_member_improves_and_each_keeps_its_best() -> None:
    flat = [0.995, 1.0, 0.5]  # less than 1 % better, nothing new, best
    fitter = Scripted([[1.0, 2.0, 3.0], [0.995, 1.0, 3.0], [2.0, 2.0, 0.5], *[flat] * 20])
    fit = fitter(world(50))
    assert fit.metrics["model/epochs"] == 3 + 6  # more than 5 without progress
    assert fit.elites.tolist() == [2, 0]  # of the kept 1.0, 1.0 and 0.5, the first of equals
    assert fit.metrics["model/holdout"] == 0.75
    for value in fitter.ensemble.params.values():
        assert torch.equal(value, torch.tensor([1.0, 2.0, 3.0])[:, None, None].expand_as(value))


def test_progress_of_one_member_keeps_all_going_up_to_the_limit() -> None:
    script = [[1.0, 1.0, 0.9**epoch] for epoch in range(30)]
    assert Scripted(script, max_epochs=12)(world(50)).metrics["model/epochs"] == 12


def test_weights_that_explode_are_never_kept() -> None:
    fitter = Scripted([[1.0, math.nan, 1.0], *[[math.nan] * 3] * 9])
    before = fitter.ensemble.params["0.weight"].detach().clone()
    assert 1 not in fitter(world(50)).elites.tolist()
    assert torch.equal(fitter.ensemble.params["0.weight"][1], before[1])


def test_elites_are_the_members_that_predict_best() -> None:
    fitter = Fitter(SPEC, replace(CONFIG, model_lr=1e-9, max_epochs=1), 0, "cpu", "off")
    for member, noise in enumerate((3.0, 0.0, 1.0)):
        for name in ("0.weight", "1.weight"):
            weight = fitter.ensemble.params[name].data[member]
            weight += noise * torch.randn(weight.shape, generator=torch.Generator().manual_seed(member))
    assert fitter(world(400)).elites.tolist() == [1, 2]


def test_what_is_held_out_is_not_trained_on_and_every_member_has_its_own_sample() -> None:
    fitter = Fitter(SPEC, CONFIG, 0, "cpu", "off")
    fitter._append(world(1000))
    held, steps = fitter._draw()
    assert (len(held), steps) == (200, 13)
    samples = fitter._order[:, : 13 * 64]
    trained = fitter._data[torch.bincount(samples.flatten()).nonzero()[:, 0]]
    assert not (trained[:, None, 0] == held[None, :, 0]).any()
    assert torch.count_nonzero(torch.bincount(samples[0])) == pytest.approx(
        800 * (1 - math.exp(-832 / 800)), rel=0.05
    )  # with replacement
    counts = [torch.bincount(sample, minlength=1000) for sample in samples]
    assert not torch.equal(counts[0], counts[1])
    before = samples.clone()
    fitter._step = lambda: None  # type: ignore[assignment]
    assert len(list(fitter._epoch(steps))) == steps
    assert not torch.equal(before, samples)
    assert all(
        torch.equal(torch.bincount(sample, minlength=1000), count)
        for sample, count in zip(samples, counts, strict=True)
    )
    other, _ = fitter._draw()
    assert not torch.equal(held, other)  # a fresh draw for every fit


def test_no_more_rows_are_held_out_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "MOST_HELD_OUT", 30)
    fitter = Fitter(SPEC, CONFIG, 0, "cpu", "off")
    fitter._append(world(1000))
    assert len(fitter._draw()[0]) == 30


def test_an_epoch_sees_every_sample_of_every_member_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fitter = Fitter(SPEC, CONFIG, 0, "cpu", "off")
    fitter._append(world(300))
    _, steps = fitter._draw()
    seen: list[Tensor] = []

    def spy(rows: Tensor) -> Tensor:
        seen.append(rows)
        return torch.tensor(2.0)

    monkeypatch.setattr(fitter.ensemble, "gradient", spy)
    assert len(list(fitter._epoch(steps))) == steps
    assert [rows.shape for rows in seen] == [(3, 64, SPEC.columns.width)] * steps
    x = torch.cat(seen, dim=1)[:, :, 0].sort(dim=1).values
    assert torch.equal(x, fitter._data[fitter._order[:, : steps * 64]][:, :, 0].sort(dim=1).values)
    assert float(fitter._loss) == 2.0 * steps


def test_a_second_fit_goes_on_from_the_first() -> None:
    config = replace(CONFIG, max_epochs=1)
    fitter = Fitter(SPEC, replace(config, max_epochs=20), 0, "cpu", "off")
    fitter(world(1500))
    fitter.config = config
    warm = fitter(world(100, seed=1))
    cold = Fitter(SPEC, config, 0, "cpu", "off")(torch.cat([world(1500), world(100, seed=1)]))
    assert warm.metrics["model/rows"] == cold.metrics["model/rows"] == 1600
    assert warm.metrics["model/holdout"] < 0.5 * cold.metrics["model/holdout"]


def test_the_oldest_rows_make_room() -> None:
    fitter = Fitter(SPEC, replace(CONFIG, model_rows=100, max_epochs=1), 0, "cpu", "off")
    rows = world(270)
    for part in rows.split([60, 30, 30, 150]):
        fitter._append(part)
        last = rows[: fitter.seen][-100:]
        assert fitter._data[: fitter.rows][:, 0].sort().values.tolist() == last[:, 0].sort().values.tolist()
    assert fitter.rows == 100
    assert fitter(rows[:0]).metrics["model/rows"] == 100


def test_data_outgrows_its_first_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "FIRST_ALLOCATION", 50)
    fitter, rows = Fitter(SPEC, replace(CONFIG, max_epochs=1), 0, "cpu", "off"), world(300)
    for part in rows.split([40, 20, 240]):
        fitter(part)
        assert torch.equal(fitter._data[: fitter.seen], rows[: fitter.seen])


def test_an_answer_is_a_value() -> None:
    fitter = Fitter(SPEC, replace(CONFIG, max_epochs=1), 0, "cpu", "off")
    fit = fitter(world(100))
    kept = {name: np.array(value) for name, value in fit.state.items()}
    fitter(world(100, seed=1))
    assert all(np.array_equal(fit.state[name], value) for name, value in kept.items())
    assert all(isinstance(value, np.ndarray) for value in (*fit.state.values(), fit.elites))
    assert fit.elites.dtype == np.int64


def test_a_fit_that_is_not_finite_changes_nothing_and_says_so() -> None:
    fitter = Fitter(SPEC, replace(CONFIG, model_lr=1e12, max_epochs=2), 0, "cpu", "off")
    before = fitter.ensemble.vector.clone()
    assert fitter(world(100)).not_finite == "error on held-out rows"
    assert torch.equal(fitter.ensemble.vector, before)
    assert all(value.eq(0).all() for value in fitter._moments.values())
    fitter._adam.param_groups[0]["lr"] = 1e-3
    assert fitter(world(100)).not_finite == ""


@pytest.mark.parametrize("model_rows", [1000, 70])
def test_another_fitter_continues_bit_for_bit_with_the_rows_and_the_last_fit(model_rows: int) -> None:
    config, rows = replace(CONFIG, model_rows=model_rows, max_epochs=2), world(130).numpy()
    first = Fitter(SPEC, config, 0, "cpu", "off")
    first(rows[:50])
    fit = first(rows[50:90])
    expected = first(rows[90:])
    kept = rows[max(0, 90 - model_rows) : 90]
    found = Fitter(SPEC, config, 99, "cpu", "off")(Continuation(rows[90:], kept, fit.state, fit.fitter))
    assert found.metrics == expected.metrics
    assert found.fitter.keys() == expected.fitter.keys() == {"exp_avg", "exp_avg_sq", "step", "rng", "seen"}
    for ours, theirs in ((found.state, expected.state), (found.fitter, expected.fitter)):
        for name, value in theirs.items():
            np.testing.assert_array_equal(np.asarray(ours[name]), np.asarray(value), err_msg=name)


def test_where_rows_are_missing_it_continues_with_those_that_are_there() -> None:
    config, rows = replace(CONFIG, max_epochs=1), world(130).numpy()
    fit = Fitter(SPEC, config, 0, "cpu", "off")(rows[:90])
    second = Fitter(SPEC, config, 0, "cpu", "off")
    found = second(Continuation(rows[90:], rows[30:90], fit.state, fit.fitter))
    assert second.rows == found.metrics["model/rows"] == 100
    np.testing.assert_array_equal(second._data[:100].numpy(), rows[30:])
