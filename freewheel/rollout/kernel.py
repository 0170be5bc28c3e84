"""The compiled functions (_kernel.c) with their Python equivalents, which are used if it was not built.

    FastCategorical   policies/                a choice among K actions
    RowWriter         here                     rows of one lane
    finite            envs/fault_tolerant.py   whether all numbers are finite
    outside           here                     rows with numbers beyond bounds
    watch             run/stopping/watchdog.py          a thread that checks when no Python thread can; it has no equivalent

A worker with one slow env calls these at every step. A process that has slept has cold caches, so the amount of code
and memory that it touches matters more than the amount of computation: with 100 such workers on 2 cores, choosing an
action and writing it costs 50 µs of a step in numpy and 15 µs here.
"""

from __future__ import annotations

import importlib
from typing import Any, TypeVar

import numpy as np

from freewheel.core import NDArray

Part = TypeVar("Part")
Columns = tuple[NDArray, NDArray, NDArray, NDArray, NDArray, NDArray, NDArray, NDArray]


def compiled(name: str, otherwise: Part) -> Part:
    """The compiled function of this name, or its Python equivalent."""
    try:
        module = importlib.import_module("freewheel.rollout._kernel")
    except ImportError:
        return otherwise
    part: Part = getattr(module, name, otherwise)  # an older build may lack this function
    return part


class PythonRowWriter:
    """Writes rows of one lane without numpy: the columns of Transitions, [T, ...], from the env's observations, [D]."""

    def __init__(self, columns: Columns, first: NDArray, successor: NDArray) -> None:
        obs, action, *numbers, next_obs, valid = columns
        self._action = action.reshape(len(valid), -1)
        self._obs, self._next_obs, self._first, self._successor = map(_bytes, (obs, next_obs, first, successor))
        self._numbers: list[Any] = [values.data for values in (*numbers, valid)]
        self._width = successor.nbytes

    def see(self, t: int, fresh: bool) -> None:
        """Write the observation of row t: the first of an episode, or the last step's successor."""
        self._obs[t * self._width : (t + 1) * self._width] = self._first if fresh else self._successor

    def put(self, t: int, action: Any, log_prob: float, reward: float, terminated: bool, truncated: bool) -> float:
        """Write the rest of row t; returns the reward in float32, as written."""
        self._action[t] = action
        for column, value in zip(self._numbers, (log_prob, reward, terminated, truncated, True), strict=True):
            column[t] = value
        self._next_obs[t * self._width : (t + 1) * self._width] = self._successor
        return float(self._numbers[1][t])


def _bytes(values: NDArray) -> memoryview:
    return values.reshape(-1).data.cast("B")


RowWriter = compiled("RowWriter", PythonRowWriter)


def numpy_outside(obs: NDArray, next_obs: NDArray, valid: NDArray, bounds: NDArray, steps: int) -> int:
    """Count valid rows [T, B] of the first steps with an observation [T, B, D] below or above its bounds [2, D]."""
    obs, next_obs, valid, (low, high) = obs[:steps], next_obs[:steps], valid[:steps], bounds
    beyond = (obs < low) | (obs > high) | (next_obs < low) | (next_obs > high)
    return int(np.count_nonzero(beyond.any(axis=-1) & valid))


outside = compiled("outside", numpy_outside)
