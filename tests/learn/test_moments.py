"""Running statistics: exact for any grouping, and returns followed across chunks."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freewheel.core import NDArray, Transitions
from freewheel.learn.moments import ReturnScale, RunningMoments
from freewheel.policies.spec import Start
from tests.support.learning import sign

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
def test_mean_and_variance_do_not_depend_on_the_grouping(
    device: str | None, sizes: list[int], offset: float, dtype: str, seed: int
) -> None:
    rows = np.random.default_rng(seed).normal(offset if dtype != "uint8" else 100, 10, (sum(sizes), 3)).astype(dtype)
    moments: RunningMoments[Any] = RunningMoments(3, device=device)
    for part in np.split(rows, np.cumsum(sizes)[:-1]):
        moments.add(as_kind(part, device))
    wide = rows.astype(np.float64)
    assert moments.count == len(rows)
    np.testing.assert_allclose(moments.mean, wide.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(moments.square / len(rows), wide.var(axis=0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(moments.deviation, np.sqrt(wide.var(axis=0) + 1e-8), rtol=1e-9)


@KINDS
def test_they_go_on_from_the_statistics_among_weights(device: str | None) -> None:
    """As if the rows behind these had been added here, but for the rounding of weights to float32; constant columns too."""
    rng = np.random.default_rng(1)
    before, after = rng.normal(5, 3, (2, 40, 3))
    before[:, 2] = after[:, 2] = 4.0
    one: RunningMoments = RunningMoments(3)
    one.add(before)
    params = {"norm.mean": one.mean.astype(np.float32), "norm.scale": (1 / one.deviation).astype(np.float32)}
    one.add(after)
    moments: RunningMoments[Any] = RunningMoments(3, Start(params, rows=40), device=device)
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


def tensors(data: Transitions) -> Transitions[Any]:
    return Transitions(*(torch.from_numpy(getattr(data, field.name).copy()) for field in fields(data)))


@KINDS
@given(steps=st.integers(1, 12), lanes=st.integers(1, 3), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_returns_are_followed_across_chunks(
    device: str | None, steps: int, lanes: int, seed: int, data: st.DataObject
) -> None:
    rows = rewards(steps, lanes, seed)
    cuts = sorted(data.draw(st.sets(st.integers(1, steps)))) if steps > 1 else []
    scale: ReturnScale[Any] = ReturnScale(5, GAMMA, device=device)
    for start, stop in zip([0, *cuts], [*cuts, steps], strict=True):
        chunk = sign(rows, slice(start, stop))
        scale.add(chunk.data if device is None else tensors(chunk.data), 2, chunk.rows)
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
