"""RolloutBuffer: chunks that wait for an on-policy update, and the batch of exactly S rows that is sealed from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from freewheel.core import Chunk, NDArray, Transitions


@dataclass(frozen=True)
class RolloutBatch:
    """Joined rows [T, L, ...]: a column is one lane's consecutive rows, across chunks and versions; gaps are not valid."""

    data: Transitions
    version: NDArray  # [T, L] int64, of the policy that chose the action

    def flatten(self, values: NDArray) -> NDArray:
        """[T, L, ...] -> [N, ...]: the valid rows, without a copy where all are."""
        return values.reshape(-1, *values.shape[2:]) if self._whole else values[self.data.valid]

    def spread(self, values: NDArray) -> NDArray:
        """[N] -> [T, L], zero in the gaps."""
        if self._whole:
            return values.reshape(self.data.valid.shape)
        grid = np.zeros(self.data.valid.shape, values.dtype)
        grid[self.data.valid] = values
        return grid

    @cached_property
    def _whole(self) -> bool:
        return bool(self.data.valid.all())


class RolloutBuffer:
    """Oldest version first, in order of arrival within a version."""

    def __init__(self) -> None:
        self.rows = 0
        self._chunks: list[Chunk] = []

    def add(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self.rows += chunk.rows

    def seal(self, rows: int) -> RolloutBatch:
        """Take exactly this many rows; what is left of a cut chunk stays held."""
        taken: list[Chunk] = []
        left = sorted(self._chunks, key=lambda chunk: chunk.version)
        missing = rows
        while missing:
            chunk = left.pop(0)
            if chunk.rows > missing:
                chunk, rest = cut(chunk, missing)
                left.insert(0, rest)
            taken.append(chunk)
            missing -= chunk.rows
        self._chunks = left
        self.rows -= rows
        return join(taken)

    @property
    def chunks(self) -> int:
        return len(self._chunks)

    def seal_chunks(self, count: int) -> RolloutBatch:
        """Take this many whole chunks."""
        self._chunks.sort(key=lambda chunk: chunk.version)
        return self.seal(sum(chunk.rows for chunk in self._chunks[:count]))

    def expire(self, oldest: int) -> int:
        """Give up what was chosen by a version older than this; how many rows that is."""
        if all(chunk.version >= oldest for chunk in self._chunks):
            return 0
        before = self.rows
        self._chunks = [chunk for chunk in self._chunks if chunk.version >= oldest]
        self.rows = sum(chunk.rows for chunk in self._chunks)
        return before - self.rows


def cut(chunk: Chunk, rows: int) -> tuple[Chunk, Chunk]:
    """Its first `rows` valid rows in order of time, and the rest. The step that the cut goes through is in both, each
    keeping its own lanes valid."""
    valid = chunk.data.valid
    first = (np.cumsum(valid).reshape(valid.shape) <= rows) & valid
    last_step = int(np.flatnonzero(first.any(axis=1))[-1])
    rest = valid & ~first
    begin = int(np.flatnonzero(rest.any(axis=1))[0])

    def part(steps: slice, mask: NDArray, count: int) -> Chunk:
        data = _map(chunk.data, steps)
        return replace(chunk, data=replace(data, valid=mask[steps]), rows=count)

    return part(slice(0, last_step + 1), first, rows), part(slice(begin, None), rest, chunk.rows - rows)


def join(chunks: Sequence[Chunk]) -> RolloutBatch:
    """Consecutive chunks of one author follow each other in the same columns; authors stand side by side."""
    if len(chunks) == 1:
        data = chunks[0].data
        return RolloutBatch(data, np.full(data.valid.shape, chunks[0].version))
    threads: list[list[Chunk]] = []
    open_at: dict[tuple[int, int, int], int] = {}  # (worker, incarnation, lane0) -> its latest thread
    for chunk in sorted(
        chunks, key=lambda chunk: (chunk.origin.worker, chunk.origin.incarnation, chunk.origin.sequence)
    ):
        author = (chunk.origin.worker, chunk.origin.incarnation, chunk.origin.lane0)
        at = open_at.get(author)
        if at is not None and chunk.origin.sequence - threads[at][-1].origin.sequence == 1:
            threads[at].append(chunk)
        else:
            open_at[author] = len(threads)
            threads.append([chunk])
    return _side_by_side(threads)


def _side_by_side(threads: Sequence[Sequence[Chunk]]) -> RolloutBatch:
    steps = max(sum(len(chunk.data.valid) for chunk in thread) for thread in threads)
    lanes = sum(thread[0].data.valid.shape[1] for thread in threads)
    model = threads[0][0].data
    data = Transitions(
        **{
            field.name: np.zeros(
                (steps, lanes, *getattr(model, field.name).shape[2:]), getattr(model, field.name).dtype
            )
            for field in fields(Transitions)
        }
    )
    version = np.zeros((steps, lanes), np.int64)
    lane = 0
    for thread in threads:
        begin, width = 0, thread[0].data.valid.shape[1]
        for chunk in thread:
            end = begin + len(chunk.data.valid)
            for field in fields(Transitions):
                getattr(data, field.name)[begin:end, lane : lane + width] = getattr(chunk.data, field.name)
            version[begin:end, lane : lane + width] = chunk.version
            begin = end
        lane += width
    return RolloutBatch(data, version)


def _map(data: Transitions, steps: slice) -> Transitions:
    return Transitions(**{field.name: getattr(data, field.name)[steps] for field in fields(Transitions)})
