"""Running means and deviations in float64: of observations, and of the discounted return that rewards are scaled by."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from freewheel.core import NDArray, Transitions, to_numpy
from freewheel.policies.spec import Start


class RunningMoments:
    """Mean and variance of all rows ever added, a column each."""

    def __init__(self, columns: int, start: Start | None = None) -> None:
        self.count = 0.0
        self.mean = np.zeros(columns)
        self.square = np.zeros(columns)  # sum of squared distances from the mean
        if start is not None:
            self.restore(_known(start))

    def add(self, rows: NDArray) -> None:
        """rows [N, columns], joined by Chan's formula: exact for any grouping."""
        if not len(rows):
            return
        mean = rows.mean(axis=0, dtype=np.float64)
        distance = mean - self.mean
        total = self.count + len(rows)
        self.square += np.square(rows - mean).sum(axis=0) + np.square(distance) * self.count * len(rows) / total
        self.mean += distance * len(rows) / total
        self.count = total

    @property
    def deviation(self) -> NDArray:
        return np.sqrt(self.square / max(self.count, 1.0) + 1e-8)

    def state(self) -> NDArray:
        """Mean, square and count in a row, float64."""
        return np.concatenate([self.mean, self.square, [self.count]])

    def restore(self, state: NDArray) -> None:
        columns = len(self.mean)
        self.mean[...], self.square[...], self.count = state[:columns], state[columns:-1], float(state[-1])


def _known(start: Start) -> NDArray:
    """The state of RunningMoments that have seen what the statistics among these weights were taken from."""
    mean, scale = (np.asarray(to_numpy(start.params[f"norm.{name}"]), np.float64) for name in ("mean", "scale"))
    return np.concatenate([mean, start.rows * np.maximum(scale**-2 - 1e-8, 0.0), [start.rows]])


class TensorRunningMoments:
    """RunningMoments of rows on a device, kept there: nothing waits for them."""

    def __init__(self, columns: int, device: str, start: Start | None = None) -> None:
        self.count, self.mean, self.square = (
            torch.zeros(size, dtype=torch.float64, device=device) for size in ((), columns, columns)
        )
        if start is not None:
            self.restore(_known(start))

    def add(self, rows: Tensor) -> None:
        """rows [N, columns]."""
        mean = rows.mean(0, dtype=torch.float64)
        distance, total = mean - self.mean, self.count + len(rows)
        self.square += (rows - mean).square().sum(0) + distance.square() * (self.count * len(rows) / total)
        self.mean += distance * (len(rows) / total)
        self.count.copy_(total)

    def normaliser(self) -> tuple[Tensor, Tensor]:
        """Mean and scale as networks take them."""
        deviation = (self.square / self.count.clamp(min=1) + 1e-8).sqrt()
        return self.mean.float(), deviation.reciprocal().float()

    def state(self) -> NDArray:
        """As RunningMoments has it."""
        parts = [self.mean, self.square, self.count[None]]
        return np.asarray(torch.cat(parts).cpu())

    def restore(self, state: NDArray) -> None:
        columns = len(self.mean)
        for part, saved in ((self.mean, state[:columns]), (self.square, state[columns:-1]), (self.count, state[-1])):
            part.copy_(torch.as_tensor(saved))


class ReturnScale:
    """How large discounted returns are: every lane's running return, followed over its rows in order."""

    def __init__(self, lanes: int, gamma: float) -> None:
        self.moments = RunningMoments(1)
        self._gamma = gamma
        self.running = np.zeros(lanes)

    def add(self, data: Transitions, lane0: int) -> None:
        running = self.running[lane0 : lane0 + data.reward.shape[1]]
        seen = np.empty(data.reward.shape)
        going_on = data.valid & ~(data.terminated | data.truncated)
        for t in range(len(seen)):
            running *= self._gamma
            running += np.where(data.valid[t], data.reward[t], 0)
            seen[t] = running
            running *= going_on[t]
        self.moments.add(seen[data.valid][:, None])

    @property
    def factor(self) -> float:
        return 1.0 / float(self.moments.deviation[0]) if self.moments.count else 1.0
