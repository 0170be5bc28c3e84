"""Running means and deviations of observations and returns, in float64, as numpy arrays or as tensors on a device."""

from __future__ import annotations

import warnings
from typing import Any, Generic

import numpy as np
import torch

from freewheel.core import A, Array, NDArray, Transitions, to_numpy
from freewheel.learn.replay.buffer import ReplayBuffer
from freewheel.policies.nets import TensorPolicy
from freewheel.policies.spec import StartWeights, namespace


def zeros(size: int, device: str | None) -> Any:
    """Return float64 zeros: a tensor on `device`, or a numpy array if it is None."""
    return np.zeros(size) if device is None else torch.zeros(size, dtype=torch.float64, device=device)


#: A value beyond these bounds is an error of the environment. One such value would make all others look equal.
LARGEST = 1e19  # bound of the size; the square of a larger value overflows float32
FAR = 1e15  # bound as a multiple of the usual size
GROWTH = 1.01  # StoredMoments move when the number of stored rows has grown by this factor: less and less often


class RunningMoments(Generic[A]):
    """Mean and variance of all rows ever added, by column, without implausibly large values. Nothing waits for a
    device. shared: each of several learners has a part of the rows, and `pool` combines the parts."""

    def __init__(
        self, columns: int, start: StartWeights | None = None, *, device: str | None = None, shared: bool = False
    ) -> None:
        self.count = 0.0
        self.shared = shared
        self.left_out: Any = 0  # number of implausible values
        self.mean: A = zeros(columns, device)
        self.square: A = zeros(columns, device)  # sum of squared distances from the mean
        self._since = RunningMoments[A](columns, device=device) if shared else None  # this learner's rows since `pool`
        self._pooled = np.zeros(2 * columns + 1)  # state of all learners' rows up to `pool`
        if start is not None:  # begin as if the rows of its statistics had been added here
            mean, scale = (to_numpy(start.params[f"norm.{name}"]).astype(np.float64) for name in ("mean", "scale"))
            self.restore(np.concatenate([mean, start.rows * np.maximum(scale**-2 - 1e-8, 0.0), [start.rows]]))

    def add(self, rows: A) -> None:
        """Add rows [N, columns] by Chan's formula, which is exact for any grouping."""
        if not len(rows):
            return
        xp: Any = namespace(rows)
        rows = self._plausible(rows, xp)
        mean: Any = rows.mean(0, dtype=xp.float64)
        square: Any = xp.square(rows - mean).sum(0)
        self._join(len(rows), mean, square)
        if self._since is not None:
            self._since._join(len(rows), mean, square)

    def _join(self, rows: float, mean: Any, square: Any) -> None:
        """Add this number of rows, with their mean and the sum of squared distances from it."""
        xp: Any = namespace(mean)
        distance: Any = mean - self.mean
        total = self.count + rows
        self.square += square + xp.square(distance) * self.count * rows / total
        self.mean += distance * rows / total
        self.count = total

    @property
    def since(self) -> NDArray:
        """The state of this learner's rows since the last `pool`, which takes it from every learner."""
        return np.zeros(0) if self._since is None else self._since.state()

    def pool(self, parts: NDArray) -> None:
        """Add the new rows of all learners, [count, n] by rank, to the pooled state. All learners get the same bits."""
        if self._since is None:
            return
        self._write_state(self._pooled)
        for part in parts:
            self._join_state(part)
        self._pooled = self._own_state()
        self._since.restore(np.zeros_like(self._pooled))

    def _join_state(self, state: NDArray) -> None:
        if state[-1]:
            columns, like = len(self.mean), self.mean
            mean, square = (_as(part, like) for part in (state[:columns], state[columns:-1]))
            self._join(float(state[-1]), mean, square)

    def _plausible(self, rows: A, xp: Any) -> A:
        """Return the rows with implausible values replaced by the mean, and count these values."""
        usual: Any = self.deviation
        usual += abs(self.mean)
        size: Any = abs(rows)
        far: Any = size > xp.clip(FAR * usual, None, LARGEST) if self.count else size > LARGEST
        if isinstance(rows, np.ndarray):
            if not far.any():
                return rows
            if not self.left_out:
                _, column = np.argwhere(far)[0]
                bound = min(FAR * float(usual[column]), LARGEST) if self.count else LARGEST
                told = f"column {column} was {float(rows[far][0]):.3g}, beyond {bound:.3g}"
                warnings.warn(
                    f"a value is left out of the normaliser's statistics: {told}", RuntimeWarning, stacklevel=2
                )
        self.left_out = self.left_out + far.sum()
        kept: A = xp.where(far, xp.asarray(self.mean, dtype=rows.dtype), rows)
        return kept

    @property
    def deviation(self) -> A:
        root: A = namespace(self.square).sqrt(self.square / max(self.count, 1.0) + 1e-8)
        return root

    def state(self) -> NDArray:
        """Return mean, square and count in one float64 vector. shared: the pooled ones, then those since `pool`."""
        return self._own_state() if self._since is None else np.concatenate([self._pooled, self.since])

    def restore(self, state: NDArray) -> None:
        self._pooled, since = np.split(state, [2 * len(self.mean) + 1])
        self._write_state(self._pooled)
        if len(since):
            self._join_state(since)
        if self._since is not None:
            self._since.restore(since if len(since) else np.zeros_like(self._pooled))

    def _own_state(self) -> NDArray:
        return np.concatenate([to_numpy(self.mean), to_numpy(self.square), [self.count]])

    def _write_state(self, state: NDArray) -> None:
        columns = len(self.mean)
        _write(self.mean, state[:columns])
        _write(self.square, state[columns:-1])
        self.count = float(state[-1])


class StoredMoments(RunningMoments[NDArray]):
    """Moments of the observations that a replay buffer has stored. They move once there are enough new rows."""

    measured = 0  # stored rows at the last move

    def follow(self, replay: ReplayBuffer, rows: int) -> None:
        """Add the rows stored since the last move, if they are enough. `rows` counts all rows stored so far."""
        if rows >= GROWTH * self.measured:
            new = replay.newest(min(rows - self.measured, replay.count))
            self.add(to_numpy(new[:, : len(self.mean)]))
            self.measured = rows

    def write_to(self, policy: TensorPolicy, rows: int, *, now: bool = False) -> bool:
        """Set the policy's normaliser if the moments have just moved. Return False if they are not finite."""
        if not (np.isfinite(self.mean).all() and np.isfinite(self.square).all()):
            return False
        if now or self.measured == rows or self.shared:
            policy.normalise(self.mean, 1.0 / self.deviation)
        return True


class ReturnScale(Generic[A]):
    """The size of discounted returns, from the running return of every lane over its rows in order."""

    def __init__(self, lanes: int, gamma: float, *, device: str | None = None, shared: bool = False) -> None:
        self.moments: RunningMoments[A] = RunningMoments(1, device=device, shared=shared)
        self._gamma = gamma
        self.running: A = zeros(lanes, device)

    def add(self, data: Transitions[Any], lane0: int, rows: int) -> None:
        """Add these transitions, of which `rows` are valid."""
        xp: Any = namespace(data.reward)
        running: Any = self.running[lane0 : lane0 + data.reward.shape[1]]
        seen = xp.empty_like(data.reward, dtype=xp.float64)
        continuing = data.valid & ~(data.terminated | data.truncated)
        for t in range(len(seen)):
            running *= self._gamma
            running += xp.where(data.valid[t], data.reward[t], 0)
            seen[t] = running
            running *= continuing[t]
        whole = rows == data.reward.shape[0] * data.reward.shape[1]  # then nothing has to be read from the device
        self.moments.add((seen.reshape(-1) if whole else seen[data.valid])[:, None])

    @property
    def factor(self) -> Any:
        """The factor for rewards: a number, or a scalar of the rows' kind."""
        return 1.0 / self.moments.deviation[0] if self.moments.count else 1.0

    def state(self) -> dict[str, Array]:
        return {"return_moments": self.moments.state(), "running_return": to_numpy(self.running).copy()}

    def restore(self, moments: NDArray, running: NDArray) -> None:
        self.moments.restore(moments)
        _write(self.running, running)


def _as(values: NDArray, like: Any) -> Any:
    return values if isinstance(like, np.ndarray) else torch.as_tensor(values, device=like.device)


def _write(target: Any, values: NDArray) -> None:
    if isinstance(target, np.ndarray):
        target[...] = values
    else:
        target.copy_(torch.as_tensor(values))
