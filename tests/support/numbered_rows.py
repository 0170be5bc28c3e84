"""Rows of a replay buffer that say which they are, and how often they should be drawn."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from freewheel.core import NDArray
from freewheel.learn.replay.buffer import ReplayBuffer
from freewheel.learn.replay.rows import Columns

COLUMNS = Columns(1, 1)  # rows of 6 columns


def numbered(start: int, stop: int) -> Tensor:
    """Rows whose every column says which they are."""
    return torch.arange(start, stop, dtype=torch.float32)[:, None].expand(-1, COLUMNS.width)


def names(rows: Tensor) -> list[int]:
    assert (rows == rows[:, :1]).all(), "a row is made of parts of others"
    return [int(name) for name in rows[:, 0]]


def frequencies(replay: ReplayBuffer, draws: int) -> NDArray:
    """How often each row that is stored was drawn, in four goes, the oldest first."""
    drawn = np.concatenate([names(replay.draw(draws // 4).rows) for _ in range(4)])
    at = drawn - (replay.added - replay.count)
    assert at.min() >= 0
    assert at.max() < replay.count, "a row that is not there was drawn"
    return np.bincount(at, minlength=replay.count)


def assert_drawn_like(counts: NDArray, probability: NDArray) -> None:
    """Pearson's statistic: its mean is the degrees of freedom, its variance twice as much. Rows of which hardly any draw is
    expected count as one with another."""
    wanted = counts.sum() * probability
    few = wanted < 10
    counts, wanted = (np.append(part[~few][1:], part[~few][0] + part[few].sum()) for part in (counts, wanted))
    statistic, degrees = float((np.square(counts - wanted) / wanted).sum()), len(counts) - 1
    assert abs(statistic - degrees) < 4 * math.sqrt(2 * degrees), (statistic, degrees)


def restore(replay: ReplayBuffer, before: ReplayBuffer, block: int = 4) -> None:
    """As a resumed run does: counts first, then the rows, a few at a time."""
    replay.load_state_dict({name: np.array(value) for name, value in before.state_dict().items()})
    for begin in range(replay.added - replay.count, replay.added, block):
        replay.write(begin, before.read(begin, min(begin + block, before.added)))
