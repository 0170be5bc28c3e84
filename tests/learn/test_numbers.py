"""Numbers that learners carry along: running statistics, exact for any grouping, and Adam, which is torch's."""

from __future__ import annotations

import warnings
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freewheel.core import NDArray, Transitions
from freewheel.learn.adam import EPS, MEAN_DECAY, SQUARE_DECAY, Adam, FusedAdam
from freewheel.learn.moments import ReturnScale, RunningMoments
from freewheel.policies.spec import StartWeights
from tests.support.learning import sign, to_tensors

GAMMA = 0.9


KINDS = pytest.mark.parametrize("device", [None, "cpu"], ids=["numpy", "tensors"])


def as_kind(rows: NDArray, device: str | None) -> Any:
    return rows if device is None else torch.from_numpy(rows)


@KINDS
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    offset=st.sampled_from([0.0, 1e4]),
    dtype=st.sampled_from(["float32", "float64", "uint8"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_grouping_changes_no_moment(device: str | None, sizes: list[int], offset: float, dtype: str, seed: int) -> None:
    rows = np.random.default_rng(seed).normal(offset if dtype != "uint8" else 100, 10, (sum(sizes), 3)).astype(dtype)
    moments: RunningMoments[Any] = RunningMoments(3, device=device)
    for part in np.split(rows, np.cumsum(sizes)[:-1]):
        moments.add(as_kind(part, device))
    wide = rows.astype(np.float64)
    assert (moments.count, int(moments.left_out)) == (len(rows), 0)
    np.testing.assert_allclose(moments.mean, wide.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(moments.square / len(rows), wide.var(axis=0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(moments.deviation, np.sqrt(wide.var(axis=0) + 1e-8), rtol=1e-9)


@KINDS
def test_they_go_on_from_the_statistics_among_weights(device: str | None) -> None:
    """As if the rows behind these had been added here, but for the rounding of weights to float32; constant columns too."""
    before, after = np.random.default_rng(1).normal(5, 3, (2, 40, 3))
    before[:, 2] = after[:, 2] = 4.0
    one: RunningMoments = RunningMoments(3)
    one.add(before)
    params = {"norm.mean": one.mean.astype(np.float32), "norm.scale": (1 / one.deviation).astype(np.float32)}
    one.add(after)
    moments: RunningMoments[Any] = RunningMoments(3, StartWeights(params, rows=40), device=device)
    moments.add(as_kind(after, device))
    np.testing.assert_allclose(moments.state(), one.state(), rtol=1e-5, atol=1e-5)


@KINDS
def test_a_state_is_a_copy_and_is_restored(device: str | None) -> None:
    moments, copy = (RunningMoments[Any](2, device=device) for _ in range(2))
    rng = np.random.default_rng(0)
    moments.add(as_kind(rng.normal(size=(5, 2)), device))
    state = moments.state()
    more = as_kind(rng.normal(size=(4, 2)), device)
    moments.add(more)
    copy.restore(state)
    copy.add(more)
    assert np.array_equal(moments.state(), copy.state())
    assert (copy.count, state[-1]) == (9, 5)


def usual_rows(seed: int, count: int = 256) -> Any:
    return np.random.default_rng(seed).normal((0.0, 5.0), (1.0, 100.0), (count, 2)).astype(np.float32)


@pytest.mark.parametrize("value", [3e38, -3e38, 1e25])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_one_absurd_value_changes_next_to_nothing(value: float, first: bool, kind: str) -> None:
    hit, usual = RunningMoments[Any](2, device=None if kind == "numpy" else "cpu"), RunningMoments[Any](2)
    for number in range(4):
        batch = usual_rows(number)
        usual.add(batch)
        if number == (0 if first else 2):
            batch = batch.copy()
            batch[7, 1] = value
        with warnings.catch_warnings(record=True, action="always") as told:
            hit.add(batch if kind == "numpy" else torch.from_numpy(batch))
        assert len(told) == (kind == "numpy" and number == (0 if first else 2)), "told of once"
    assert int(hit.left_out) == 1
    np.testing.assert_allclose(np.asarray(hit.mean), np.asarray(usual.mean), rtol=0.2, atol=0.1)
    np.testing.assert_allclose(np.asarray(hit.deviation), np.asarray(usual.deviation), rtol=0.02)


def test_large_numbers_of_an_environment_are_no_fault() -> None:
    moments = RunningMoments[Any](1)
    moments.add(np.full((64, 1), 1e-3, np.float32))
    moments.add(np.full((64, 1), 1e9, np.float32))
    assert moments.left_out == 0
    assert moments.mean[0] == pytest.approx(5e8, rel=1e-3)


def rewards(steps: int, lanes: int, seed: int) -> Transitions:
    """Random rewards with ends and gaps; what stands in a gap means nothing, so it is the worst that could stand there."""
    rng = np.random.default_rng(seed)
    shape = (steps, lanes)
    terminated, truncated, gap = rng.random((3, *shape)) < 0.15
    nothing = np.zeros((*shape, 1), np.float32)
    reward = np.where(gap, np.nan, rng.normal(size=shape)).astype(np.float32)
    return Transitions(nothing, nothing, reward, reward, terminated, truncated, nothing, ~gap)


def slow(data: Transitions) -> list[float]:
    """The discounted return so far at every valid row: the sum over the rows of its episode since the last gap."""
    seen = []
    for t, lane in zip(*data.valid.nonzero(), strict=True):
        start = t
        while (
            start > 0
            and data.valid[start - 1, lane]
            and not (data.terminated[start - 1, lane] or data.truncated[start - 1, lane])
        ):
            start -= 1
        seen.append(sum(GAMMA ** (t - k) * float(data.reward[k, lane]) for k in range(start, t + 1)))
    return seen


@KINDS
@given(steps=st.integers(1, 12), lanes=st.integers(1, 3), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_returns_span_chunks(device: str | None, steps: int, lanes: int, seed: int, data: st.DataObject) -> None:
    rows = rewards(steps, lanes, seed)
    cuts = sorted(data.draw(st.sets(st.integers(1, steps)))) if steps > 1 else []
    scale: ReturnScale[Any] = ReturnScale(5, GAMMA, device=device)
    for start, stop in zip([0, *cuts], [*cuts, steps], strict=True):
        chunk = sign(rows, slice(start, stop))
        scale.add(chunk.data if device is None else to_tensors(chunk).data, 2, chunk.rows)
    seen = slow(rows)
    assert scale.moments.count == len(seen)
    assert not scale.running[:2].any()
    if seen:
        assert float(scale.factor) == pytest.approx(1 / np.sqrt(np.var(seen) + 1e-8), rel=1e-6)


def test_lanes_are_followed_apart() -> None:
    together, apart = (ReturnScale[NDArray](3, GAMMA) for _ in range(2))
    rows = rewards(8, 3, 1)
    together.add(rows, 0, int(rows.valid.sum()))
    for lane in (2, 0, 1):
        part = Transitions(*(getattr(rows, field.name)[:, [lane]] for field in fields(rows)))
        apart.add(part, lane, int(part.valid.sum()))
    assert np.array_equal(together.running, apart.running)
    assert together.factor == pytest.approx(apart.factor, rel=1e-12)


def test_before_anything_was_seen_rewards_are_left_alone() -> None:
    scale: ReturnScale = ReturnScale(1, GAMMA)
    assert scale.factor == 1.0
    rows = rewards(3, 1, 0)
    scale.add(replace(rows, valid=np.zeros_like(rows.valid)), 0, 0)
    assert scale.factor == 1.0


def gradients(count: int, size: int = 40) -> torch.Tensor:
    """Of all sizes, from rounding errors to explosions."""
    return torch.randn(count, size, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 3, size)


def test_fifty_steps_are_those_of_torch() -> None:
    start = torch.linspace(-1, 1, 40)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Adam([theirs], lr=1e-2, betas=(MEAN_DECAY, SQUARE_DECAY), eps=EPS)
    ours, grad = start.clone(), torch.zeros(40)
    adam = Adam(ours, grad)
    for step, gradient in enumerate(gradients(50)):
        lr = 1e-2 * (1 - step / 50)
        optimizer.param_groups[0]["lr"] = lr
        theirs.grad = gradient
        optimizer.step()
        grad.copy_(gradient)
        adam.step(lr)
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-7)
    assert adam.steps == 50
    assert (ours - start).abs().min() > 1e-5


def test_what_is_remembered_is_recalled_bit_for_bit() -> None:
    vector, grad = torch.linspace(-1, 1, 40), torch.zeros(40)
    adam = Adam(vector, grad)

    def run(parts: torch.Tensor) -> torch.Tensor:
        for gradient in parts:
            grad.copy_(gradient)
            adam.step(1e-2)
        return vector.clone()

    parts = gradients(12)
    run(parts[:5])
    before = adam.remember()
    once = run(parts[5:])
    adam.recall(*before)
    assert torch.equal(vector, before[0])
    assert adam.steps == 5
    assert torch.equal(run(parts[5:]), once)


def test_fused_steps_are_those_of_torch_and_what_has_no_gradient_stays() -> None:
    start = torch.linspace(-1, 1, 40)
    ours, theirs = ([torch.nn.Parameter(start[:10].clone()), torch.nn.Parameter(start.clone())] for _ in range(2))
    adam, optimizer = FusedAdam(ours, 1e-2, eps=EPS), torch.optim.Adam(theirs, lr=1e-2, eps=EPS)
    for gradient in gradients(20):
        adam.forget()
        assert ours[1].grad is None
        ours[1].grad = theirs[1].grad = gradient
        adam.step()
        optimizer.step()
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-7)
    assert torch.equal(ours[0], start[:10])
    assert not adam.mean[:10].any()
    assert int(adam.steps) == 20


def test_a_step_size_can_be_changed_in_place() -> None:
    parameter = torch.zeros(1)
    adam = FusedAdam([parameter], 0.5)
    for lr, place in ((0.5, -0.5), (0.25, -0.75)):
        adam.lr.fill_(lr)
        parameter.grad = torch.ones(1)
        adam.step()
        assert float(parameter) == pytest.approx(place, rel=1e-5)
