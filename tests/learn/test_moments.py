"""A single absurd observation does not ruin the statistics of a run; usual ones are counted as they are, to the bit."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from freewheel.learn.moments import RunningMoments


def rows(seed: int, count: int = 256) -> Any:
    return np.random.default_rng(seed).normal((0.0, 5.0), (1.0, 100.0), (count, 2)).astype(np.float32)


@pytest.mark.parametrize("value", [3e38, -3e38, 1e25])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_one_absurd_value_changes_next_to_nothing(value: float, first: bool, kind: str) -> None:
    hit, usual = RunningMoments[Any](2, device=None if kind == "numpy" else "cpu"), RunningMoments[Any](2)
    for number in range(4):
        batch = rows(number)
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


def test_usual_values_count_as_they_are() -> None:
    moments, tensors, parts = (
        RunningMoments[Any](2),
        RunningMoments[Any](2, device="cpu"),
        [rows(number) for number in range(4)],
    )
    for part in parts:
        moments.add(part)
        tensors.add(torch.from_numpy(part))
    together = np.concatenate(parts).astype(np.float64)
    np.testing.assert_allclose(moments.mean, together.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.deviation, together.std(0), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(tensors.deviation), moments.deviation, rtol=1e-6)
    assert moments.left_out == 0


def test_large_numbers_of_an_environment_are_no_fault() -> None:
    moments = RunningMoments[Any](1)
    moments.add(np.full((64, 1), 1e-3, np.float32))
    moments.add(np.full((64, 1), 1e9, np.float32))
    assert moments.left_out == 0
    assert moments.mean[0] == pytest.approx(5e8, rel=1e-3)
