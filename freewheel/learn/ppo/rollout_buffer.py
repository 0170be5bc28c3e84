"""The buffer of chunks that wait for an on-policy update, and the batches of rows that updates take from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

import numpy as np

from freewheel.core import TRANSITION_FIELDS, A, Array, Chunk, NDArray, Transitions
from freewheel.learn.chunks import from_arrays, to_arrays
from freewheel.policies.spec import namespace


@dataclass(frozen=True)
class RolloutBatch(Generic[A]):
    """Joined rows [T, L, ...]. A column is one lane's consecutive rows, over chunks and versions. Gaps are invalid."""

    data: Transitions[A]
    version: NDArray  # [T, L] int64, version of the policy that chose the action
    rows: int  # number of valid rows

    @property
    def whole(self) -> bool:
        """Whether there are no gaps. The answer does not wait for the device."""
        return self.rows == self.version.size

    def flatten(self, values: Any) -> Any:
        """[T, L, ...] -> [N, ...]: the valid rows, without a copy if all are valid."""
        return values.reshape(-1, *values.shape[2:]) if self.whole else values[self.data.valid]

    def spread(self, values: Any) -> Any:
        """[N] -> [T, L], zero in the gaps."""
        if self.whole:
            return values.reshape(self.version.shape)
        grid = _zeros(values, self.version.shape)
        grid[self.data.valid] = values
        return grid


class RolloutBuffer(Generic[A]):
    """Chunks that wait for an update. `take` starts with the oldest version, and with the first arrival within it.

    The `lanes` of a batched simulator stay side by side: a chunk with a part of them waits for the other parts.
    """

    def __init__(self, lanes: int | None = None) -> None:
        self._lanes = lanes
        self.rows = self.available = 0  # all rows here; rows that can be taken
        self._chunks, self._parts = list[Chunk[A]](), list[Chunk[A]]()

    def add(self, chunk: Chunk[A]) -> None:
        self.rows += chunk.rows
        if self._lanes is not None and chunk.data.valid.shape[1] < self._lanes:
            self._parts.append(chunk)
            if sum(part.data.valid.shape[1] for part in self._parts) < self._lanes:
                return
            parts, self._parts = self._parts, []
            xp = namespace(chunk.data.obs)
            data: Transitions[A] = _map(lambda name: xp.concatenate([getattr(part.data, name) for part in parts], 1))
            chunk = replace(parts[0], data=data, rows=sum(part.rows for part in parts))
        self._chunks.append(chunk)
        self.available += chunk.rows

    def take(self, rows: int) -> RolloutBatch[A]:
        """Remove and return exactly `rows` rows. The rest of a cut chunk stays."""
        taken, missing = list[Chunk[A]](), rows
        left = sorted(self._chunks, key=lambda chunk: chunk.version)
        while missing:
            chunk = left.pop(0)
            if chunk.rows > missing:
                chunk, rest = cut(chunk, missing)
                left.insert(0, rest)
            taken.append(chunk)
            missing -= chunk.rows
        self._chunks = left
        self.rows -= rows
        self.available -= rows
        return join(taken)

    @property
    def episodes(self) -> int:
        """The number of episodes, if every chunk holds a whole episode in every lane."""
        return sum(chunk.data.valid.shape[1] for chunk in self._chunks)

    def take_episodes(self, count: int) -> RolloutBatch[A]:
        """Remove and return whole episodes, one in every lane of a chunk. The other lanes of the last chunk stay."""
        self._chunks.sort(key=lambda chunk: chunk.version)
        taken, missing = list[Chunk[A]](), count
        while missing:
            chunk = self._chunks.pop(0)
            if chunk.data.valid.shape[1] > missing:
                chunk, rest = first_lanes(chunk, missing)
                self._chunks.insert(0, rest)
            taken.append(chunk)
            missing -= chunk.data.valid.shape[1]
        rows = sum(chunk.rows for chunk in taken)
        self.rows -= rows
        self.available -= rows
        return join(taken)

    def state(self) -> dict[str, Array]:
        """Return the waiting chunks as arrays, in order."""
        parts = to_arrays(self._parts)
        return to_arrays(self._chunks) | {f"part.{name}": value for name, value in parts.items()}

    def restore(self, state: Mapping[str, Array], device: str | None) -> None:
        """Replace the chunks by those of a saved state: as tensors on `device`, or as numpy arrays if it is None."""
        parts = {name.removeprefix("part."): value for name, value in state.items() if name.startswith("part.")}
        self._chunks, self._parts = from_arrays(state, device), from_arrays(parts, device)
        self.available = sum(chunk.rows for chunk in self._chunks)
        self.rows = self.available + sum(chunk.rows for chunk in self._parts)

    def expire(self, oldest: int) -> int:
        """Remove the rows of versions before `oldest`, and return their number."""
        kept = [chunk for chunk in self._chunks if chunk.version >= oldest]
        expired = self.available - sum(chunk.rows for chunk in kept)
        self._chunks = kept
        self.rows -= expired
        self.available -= expired
        return expired


def cut(chunk: Chunk[A], rows: int) -> tuple[Chunk[A], Chunk[A]]:
    """Split a chunk into its first `rows` valid rows, in order of time, and the rest.

    Both parts contain the step at the cut, each with different lanes valid.
    """
    valid: Any = chunk.data.valid
    steps, lanes = valid.shape
    if chunk.rows == steps * lanes and rows % lanes == 0:  # a cut between two steps, for arrays and tensors
        first, rest, end, begin = valid, valid, rows // lanes, rows // lanes
    else:
        first = (np.cumsum(valid).reshape(valid.shape) <= rows) & valid
        rest = valid & ~first
        end = int(np.flatnonzero(first.any(axis=1))[-1]) + 1
        begin = int(np.flatnonzero(rest.any(axis=1))[0])

    def part(steps: slice, mask: Any, count: int) -> Chunk[A]:
        data: Transitions[A] = _map(lambda name: getattr(chunk.data, name)[steps])
        return replace(chunk, data=replace(data, valid=mask[steps]), rows=count)

    return part(slice(0, end), first, rows), part(slice(begin, None), rest, chunk.rows - rows)


def first_lanes(chunk: Chunk[A], lanes: int) -> tuple[Chunk[A], Chunk[A]]:
    """Split a chunk into its first lanes and the other lanes."""

    def part(columns: slice) -> Chunk[A]:
        data: Transitions[A] = _map(lambda name: getattr(chunk.data, name)[:, columns])
        origin = replace(chunk.origin, lane0=chunk.origin.lane0 + (columns.start or 0))
        state: Any = chunk.state[columns]
        return replace(chunk, data=data, origin=origin, state=state, rows=int(data.valid.sum()))

    return part(slice(0, lanes)), part(slice(lanes, None))


def join(chunks: Sequence[Chunk[A]]) -> RolloutBatch[A]:
    """Join chunks. Consecutive chunks of one author follow each other in the same columns; authors are side by side."""
    if len(chunks) == 1:
        data = chunks[0].data
        return RolloutBatch(data, np.full(tuple(data.valid.shape), chunks[0].version), chunks[0].rows)
    threads: list[list[Chunk[A]]] = []
    latest: dict[tuple[int, ...], int] = {}  # (worker, incarnation, lane0, lanes) -> its latest thread
    for chunk in sorted(chunks, key=lambda one: (one.origin.worker, one.origin.incarnation, one.origin.sequence)):
        author = (chunk.origin.worker, chunk.origin.incarnation, chunk.origin.lane0, chunk.data.valid.shape[1])
        at = latest.get(author)
        if at is not None and chunk.origin.sequence - threads[at][-1].origin.sequence == 1:
            threads[at].append(chunk)
        else:
            latest[author] = len(threads)
            threads.append([chunk])
    return _side_by_side(threads)


def _side_by_side(threads: Sequence[Sequence[Chunk[A]]]) -> RolloutBatch[A]:
    steps = max(sum(len(chunk.data.valid) for chunk in thread) for thread in threads)
    lanes = sum(thread[0].data.valid.shape[1] for thread in threads)
    model = threads[0][0].data
    data: Transitions[A] = _map(lambda name: _zeros(getattr(model, name), (steps, lanes)))
    version = np.zeros((steps, lanes), np.int64)
    lane = rows = 0
    for thread in threads:
        begin, width = 0, thread[0].data.valid.shape[1]
        for chunk in thread:
            end = begin + len(chunk.data.valid)
            for name in TRANSITION_FIELDS:
                getattr(data, name)[begin:end, lane : lane + width] = getattr(chunk.data, name)
            version[begin:end, lane : lane + width] = chunk.version
            begin, rows = end, rows + chunk.rows
        lane += width
    return RolloutBatch(data, version, rows)


def _zeros(like: Any, shape: tuple[int, ...]) -> Any:
    """Return zeros [*shape, ...] of the kind of `like`, which is [T, L, ...] or [N]."""
    shape = (*shape, *like.shape[2:])
    return np.zeros(shape, like.dtype) if isinstance(like, np.ndarray) else like.new_zeros(shape)


def _map(make: Callable[[str], Any]) -> Transitions[A]:
    return Transitions(**{name: make(name) for name in TRANSITION_FIELDS})
