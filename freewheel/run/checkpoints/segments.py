"""Stores the rows of a buffer on disk in segments. A closed segment is written once; later checkpoints only link it.

Rows are numbered as they are added. Segment j has the rows from j × n to (j + 1) × n that the buffer still held when it
was written. The last segment, which is open, is copied while the learner waits. Closed segments that are not on disk
yet are read from a shared buffer while training continues, and copied before their rows are overwritten; a buffer that
is not shared is copied at once. If the learner waits until all is written, nothing is copied in advance.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np

from freewheel.core import NDArray, RowBuffer
from freewheel.errors import CheckpointError
from freewheel.run.checkpoints import checkpoint
from freewheel.run.checkpoints.checkpoint import SEGMENT, Content, Linked, ManifestEntry

SEGMENT_BYTES = 8 << 20  # of a closed segment, at most, so that a copy takes a few milliseconds


def segment_rows(row_bytes: int) -> int:
    """Return the rows of a segment, a power of two."""
    return 1 << max(0, (SEGMENT_BYTES // max(1, row_bytes)).bit_length() - 1)


class Segments:
    """The segments of one buffer that are on disk. Only one cut is written at a time."""

    def __init__(self, name: str, buffer: RowBuffer) -> None:
        self._name, self._buffer = name, buffer
        self._rows = segment_rows(buffer.row_bytes)
        self._closed: dict[str, Linked] = {}  # by file name

    def cut(self, *, still: bool = False) -> RowsCut:
        """Return the present rows as files; `close` them after the save. The learner continues when this returns or, if
        `still`, only after `close`."""
        buffer, size = self._buffer, self._rows
        first, end = buffer.added - buffer.count, buffer.added
        if any(not linked.path.is_file() for linked in list(self._closed.values())[:1]):
            self._closed = {}  # somebody has removed the files
        files: dict[str, Content] = {}
        pending: dict[int, tuple[int, int]] = {}
        cut = RowsCut(buffer, files, pending, still=still)
        for j in range(first // size, -(-end // size)) if end > first else ():
            name = f"{self._name}-{j}.safetensors"
            rows = max(first, j * size), min(end, (j + 1) * size)
            if name in self._closed:
                files[name] = self._closed[name]
            elif still or (buffer.shared and rows[1] == (j + 1) * size):
                pending[j] = rows
                files[name] = partial(cut.take, j)
            else:
                files[name] = partial(encode, rows[0], buffer.read(*rows))
        buffer.before_overwriting = cut.rescue if pending and not still else None
        return cut

    def saved(self, end: int, folder: Path, listed: Mapping[str, ManifestEntry]) -> None:
        """Record that all rows below `end` were written into this folder, which has the listed files."""
        own = [name for name in listed if (found := SEGMENT.fullmatch(name)) and found[1] == self._name]
        self.found([Linked(folder / name, listed[name]) for name in own], end)

    def found(self, files: Sequence[Linked], end: int) -> None:
        """Record segments that are on disk; closed ones need not be written again."""
        numbers = ((int(file.path.stem.rpartition("-")[2]), file) for file in files)
        self._closed = {file.path.name: file for j, file in numbers if (j + 1) * self._rows <= end}


class RowsCut:
    """The rows of a buffer at one moment, which another thread may write to disk."""

    def __init__(
        self, buffer: RowBuffer, files: dict[str, Content], pending: dict[int, tuple[int, int]], *, still: bool = False
    ) -> None:
        self.files, self.end, self._still = files, buffer.added, still
        self._buffer, self._pending = buffer, pending
        self._lock = threading.Lock()
        self._copies: dict[int, NDArray] = {}

    def take(self, j: int) -> bytes:
        """Return the file of a segment."""
        with nullcontext() if self._still else self._lock:
            first, end = self._pending.pop(j)
            rows = self._copies.pop(j) if j in self._copies else self._buffer.read(first, end)
        return encode(first, rows)

    def rescue(self, below: int) -> None:
        """Copy the pending segments with rows below this number, which are about to be overwritten."""
        with self._lock:
            for j, (first, end) in self._pending.items():
                if first < below and j not in self._copies:
                    self._copies[j] = self._buffer.read(first, end)

    def close(self) -> None:
        """Stop reading from the buffer and release all copies."""
        self._buffer.before_overwriting = None
        self.files.clear()
        self._copies.clear()


def encode(first: int, rows: NDArray) -> bytes:
    """Return the file of rows that are numbered from `first` on."""
    return checkpoint.encode_arrays({"first": np.array(first, np.int64), "rows": rows})


def restore(name: str, buffer: RowBuffer, files: Sequence[Linked]) -> None:
    """Write the rows back into a buffer whose counts have been restored. CheckpointError: a row is missing."""
    wanted, end = buffer.added - buffer.count, buffer.added
    for file in files:
        arrays = checkpoint.read_arrays(file)
        if arrays.keys() != {"first", "rows"} or arrays["rows"].ndim != 2 or arrays["first"].shape:
            raise CheckpointError(f"{file.path} is not a segment of rows")
        first, rows = int(arrays["first"]), arrays["rows"]
        rows = rows[max(0, wanted - first) : max(0, end - first)]
        if not len(rows):
            continue
        if first > wanted or rows.shape[1] * rows.itemsize != buffer.row_bytes:
            break
        buffer.write(wanted, rows)
        wanted += len(rows)
    if wanted < end:
        raise CheckpointError(
            f"rows {wanted:,} to {end:,} of '{name}' are missing in {files[0].path.parent if files else name}"
        )
