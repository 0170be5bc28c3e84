"""RowWriter: some rows of one lane, written without numpy."""

from __future__ import annotations

from typing import Any

from freewheel.core import NDArray
from freewheel.rollout.kernel import compiled

Columns = tuple[NDArray, NDArray, NDArray, NDArray, NDArray, NDArray, NDArray, NDArray]


class PythonRowWriter:
    """The columns of Transitions, [T, ...] of one lane, and where its env shows its observations, [D]."""

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
        """Write the rest of row t; the reward as it was written, in float32."""
        self._action[t] = action
        for column, value in zip(self._numbers, (log_prob, reward, terminated, truncated, True), strict=True):
            column[t] = value
        self._next_obs[t * self._width : (t + 1) * self._width] = self._successor
        return float(self._numbers[1][t])


def _bytes(values: NDArray) -> memoryview:
    return values.reshape(-1).data.cast("B")


RowWriter = compiled("RowWriter", PythonRowWriter)
