"""Priorities that draw some rows of a replay buffer more often than others: by their last error, or by their age."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from freewheel.core import Array, to_numpy

WIDTH = 128  # places of a block in a tree; a million rows take three levels
UNIT = 2**20  # the integer for priority 1. Integer sums are exact, in any order and on any device
LEAST_ERROR = 1e-6  # added to every error, so that every row can be drawn
MOST_SUM = 2**62


class Choice(NamedTuple):
    """Chosen rows of a ring. A place counts modulo the capacity of the ring."""

    places: Tensor  # [n] int64
    weight: Tensor | None = None  # [n] float32, 1 on average; None: all are 1


class Uniform:
    """Draws all rows equally often. Other priorities derive from this class. They keep data about stored rows.

    Rows are numbered from 0, and row r is at place r modulo the capacity.
    """

    wants_errors: ClassVar[bool] = False  # whether `learned` must be called after every update

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that `learned` changes."""
        return []

    def choose(self, count: int, span: Tensor, generator: torch.Generator) -> Choice:
        """Draw `count` rows. `span` [2], on the device, holds the place of the oldest row and the number of rows."""
        draw = torch.rand(count, dtype=torch.float64, device=span.device, generator=generator)
        return Choice((draw * span[1]).long() + span[0])

    def add(self, first: int, end: int) -> None:
        """Take note of new rows at places [first, end)."""

    def remove(self, first: int, end: int) -> None:
        """Forget the rows at places [first, end)."""

    def learned(self, places: Tensor, error: Tensor) -> None:
        """Take the critics' absolute errors [n] of the rows at these places."""

    def state_dict(self, first: int, end: int) -> dict[str, Array]:
        """Return the data about rows [first, end), by their numbers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Array], first: int, end: int) -> None:
        """Restore the data about rows [first, end), which are all the rows."""


class SumTree:
    """A tree of integer sums. A leaf is the number of a place; a node is the sum of WIDTH nodes below, up to the root.

    A million leaves take 3 levels instead of 20 in a binary tree. A level takes a few operations over all rows of a
    batch. All shapes are fixed, so that a CUDA graph can hold `find` and `put`.
    """

    def __init__(self, size: int, device: str) -> None:
        sizes = [size, -(-size // WIDTH)]
        while sizes[-1] > 1:
            sizes.append(-(-sizes[-1] // WIDTH))
        padded = [-(-one // WIDTH) * WIDTH for one in sizes]
        self.flat = torch.zeros(sum(padded), dtype=torch.int64, device=device)
        self._levels = list(self.flat.split(padded))

    @property
    def leaves(self) -> Tensor:
        leaves: Tensor = self._levels[0]
        return leaves

    @property
    def total(self) -> Tensor:
        """The sum [1] of all leaves."""
        total: Tensor = self._levels[-1][:1]
        return total

    def put(self, index: Tensor, value: Tensor) -> None:
        """Write numbers [n] to places [n]. The largest of several numbers for one place counts."""
        self.leaves.index_fill_(0, index, 0)
        self.leaves.scatter_reduce_(0, index, value, "amax")
        for below, above in pairwise(self._levels):
            index = index // WIDTH
            above.index_copy_(0, index, below.view(-1, WIDTH).index_select(0, index).sum(-1))

    def fill(self, first: int, end: int, value: Tensor | int) -> None:
        """Write one number to all places [first, end), or one each."""
        self.leaves[first:end] = value
        for below, above in pairwise(self._levels):
            first, end = first // WIDTH, -(-end // WIDTH)
            above[first:end] = below.view(-1, WIDTH)[first:end].sum(-1)

    def find(self, target: Tensor) -> Tensor:
        """Return the places where the running sum of the leaves first exceeds the targets [n], from [0, total)."""
        block = torch.zeros_like(target)
        for level in self._levels[-2::-1]:
            numbers = level.view(-1, WIDTH).index_select(0, block)
            sums = numbers.cumsum(-1)
            at = torch.searchsorted(sums, target[:, None], right=True)
            target = target - (sums.gather(1, at) - numbers.gather(1, at)).squeeze(1)
            block = block * WIDTH + at.squeeze(1)
        return block


class ByError(Uniform):
    """Draws a row in proportion to (its last error + LEAST_ERROR) ** alpha. A row that was never drawn has the largest
    priority so far.

    A row's weight is (N × probability) ** -beta, divided by its mean over the batch. With beta 1 the expected loss is
    that of uniform draws, and the step size keeps its meaning. Priorities are 1 / UNIT .. MOST_SUM / (UNIT × capacity).
    """

    wants_errors = True

    def __init__(self, capacity: int, device: str, *, alpha: float, beta: float) -> None:
        self.capacity, self.alpha, self.beta = capacity, alpha, beta
        self.tree = SumTree(capacity, device)
        self.largest = torch.full((1,), UNIT, dtype=torch.int64, device=device)
        self._most = MOST_SUM // capacity

    @property
    def tensors(self) -> list[Tensor]:
        return [self.tree.flat, self.largest]

    def choose(self, count: int, span: Tensor, generator: torch.Generator) -> Choice:
        draw = torch.rand(count, dtype=torch.float64, device=span.device, generator=generator)
        total = self.tree.total
        index = self.tree.find(torch.minimum((draw * total).long(), total - 1))
        weight = (self.tree.leaves.index_select(0, index) * (span[1].double() / total)).pow(-self.beta)
        return Choice(index, (weight / weight.mean()).float())

    def add(self, first: int, end: int) -> None:
        self.tree.fill(first, end, self.largest)

    def remove(self, first: int, end: int) -> None:
        self.tree.fill(first, end, 0)

    def learned(self, places: Tensor, error: Tensor) -> None:
        """Take the errors. An error that is not finite gets the largest priority so far."""
        if not len(places):
            return
        priority = ((error.double() + LEAST_ERROR).pow(self.alpha) * UNIT).clamp(1, self._most)
        value = torch.where(error.isfinite(), priority.nan_to_num().long(), self.largest)
        self.tree.put(places, value)
        self.largest.copy_(torch.maximum(self.largest, value.amax(0, keepdim=True)))

    def state_dict(self, first: int, end: int) -> dict[str, Array]:
        places = torch.arange(first, end, device=self.largest.device) % self.capacity
        return {"priorities": to_numpy(self.tree.leaves[places]), "largest": to_numpy(self.largest).copy()}

    def load_state_dict(self, state: Mapping[str, Array], first: int, end: int) -> None:
        places = torch.arange(first, end, device=self.largest.device) % self.capacity
        known = torch.as_tensor(np.array(state["priorities"])).to(self.largest.device)
        leaves = torch.zeros_like(self.tree.leaves)
        leaves[places] = known[len(known) - len(places) :]
        self.tree.fill(0, len(leaves), leaves)
        self.largest.copy_(torch.as_tensor(np.array(state["largest"])))


class Recent(Uniform):
    """Draws the newest row `ratio` times as often as the oldest; the frequency falls exponentially with age.

    Of N rows, the one of age a (0: the newest) is drawn with probability F((a + 1) / N) - F(a / N), where
    F(x) = (1 - ratio ** -x) / (1 - 1 / ratio). There are no weights. The age of a row, unlike its
    error, does not depend on the result of its action, so the expected target of every observation and action stays the
    same. Only the focus of the critics moves to recent rows. That is the purpose, and weights would undo it.
    """

    def __init__(self, ratio: float) -> None:
        self._fall = math.log(ratio)

    def choose(self, count: int, span: Tensor, generator: torch.Generator) -> Choice:
        draw = torch.rand(count, dtype=torch.float64, device=span.device, generator=generator)
        age = torch.log1p(draw * math.expm1(-self._fall)) * (-1 / self._fall)  # as a share of the oldest row's age
        newest = span[1] - 1
        return Choice(span[0] + newest - torch.minimum((age * span[1]).long(), newest))
