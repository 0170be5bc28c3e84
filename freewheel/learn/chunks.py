"""Conversion of the chunks that a learner holds to arrays and back, so that a resumed run has them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import torch

from freewheel.core import TRANSITION_FIELDS, WORKER_TIME, Array, Chunk, NDArray, Origin, Transitions, to_numpy


def to_arrays(chunks: Sequence[Chunk[Any]]) -> dict[str, Array]:
    """Return copies of all rows in one sequence, with a description of each chunk; without chunks, nothing. Finished
    episodes and times are left out, because they are counted when a chunk is delivered."""
    if not chunks:
        return {}
    about = [(*map(int, one.data.valid.shape), one.version, one.rows, *astuple(one.origin)) for one in chunks]
    state: dict[str, Array] = {"about": np.array(about, np.int64)}
    state["memory"] = np.concatenate([to_numpy(one.state) for one in chunks])
    for name in TRANSITION_FIELDS:
        parts = [to_numpy(getattr(one.data, name)) for one in chunks]
        state[name] = np.concatenate([part.reshape(-1, *part.shape[2:]) for part in parts])
    return state


def from_arrays(state: Mapping[str, Array], device: str | None) -> list[Chunk[Any]]:
    """Rebuild the chunks from `to_arrays`, with tensors on `device`, or with numpy arrays if it is None."""
    if "about" not in state:
        return []
    arrays = {name: np.asarray(value) for name, value in state.items()}
    chunks: list[Chunk[Any]] = []
    row = lane = 0
    for steps, lanes, version, rows, *origin in arrays["about"].tolist():
        data = {name: arrays[name][row : row + steps * lanes] for name in TRANSITION_FIELDS}
        grid = {name: _placed(part.reshape(steps, lanes, *part.shape[1:]), device) for name, part in data.items()}
        memory = _placed(arrays["memory"][lane : lane + lanes], device)
        time = np.zeros(len(WORKER_TIME), np.int64)
        chunks.append(Chunk(Transitions(**grid), version, Origin(*origin), (), memory, time, rows))
        row, lane = row + steps * lanes, lane + lanes
    return chunks


def under(prefix: str, state: Mapping[str, Array]) -> dict[str, Array]:
    """Return the part of a state whose names begin with `prefix`, and drop the prefix."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _placed(array: NDArray, device: str | None) -> Any:
    return array.copy() if device is None else torch.as_tensor(array.copy(), device=device)
