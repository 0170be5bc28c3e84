"""Chunks that a learner holds survive as arrays."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from freewheel.core import Transitions, to_numpy
from freewheel.learn.chunks import from_arrays, to_arrays
from tests.support.learning import play, sign
from tests.support.model_story import SPEC, mbpo_for


@pytest.mark.parametrize("device", [None, "cpu"])
def test_chunks_of_any_shapes_come_back_as_they_were(device: str | None) -> None:
    snapshot = mbpo_for().snapshot()
    first = sign(play(SPEC, snapshot, (5, 2), gaps=True), version=3, lane0=4, worker=2, incarnation=1, sequence=7)
    chunks = [
        replace(first, state=np.arange(6, dtype=np.float32).reshape(2, 3)),
        replace(sign(play(SPEC, snapshot, (1, 3), seed=1), version=4, lane0=0, worker=0), state=np.ones((3, 3))),
    ]
    chunks[1] = replace(chunks[1], state=chunks[1].state.astype(np.float32))
    found = from_arrays(to_arrays(chunks), device)
    assert [(one.version, one.rows, one.origin) for one in found] == [(c.version, c.rows, c.origin) for c in chunks]
    for ours, theirs in zip(found, chunks, strict=True):
        pairs = [(getattr(ours.data, part.name), getattr(theirs.data, part.name)) for part in fields(Transitions)]
        for mine, other in (*pairs, (ours.state, theirs.state)):
            assert isinstance(mine, np.ndarray if device is None else torch.Tensor)
            assert to_numpy(mine).dtype == other.dtype
            np.testing.assert_array_equal(to_numpy(mine), other)


def test_no_chunks_are_no_arrays() -> None:
    assert to_arrays([]) == {}
    assert from_arrays({}, None) == []
