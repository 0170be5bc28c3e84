"""Shared memory without a name, sent to processes as a descriptor and freed with its last user, and a mailbox in it."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Mapping
from multiprocessing import reduction
from typing import Any

import numpy as np

from freewheel.core import MOST_CONTEXTS, NDArray, Snapshot, to_numpy
from freewheel.errors import SetupError
from freewheel.files.memory import free_memory

LINE = 64  # bytes of a cache line; arrays written by different processes must not share one
Fields = Mapping[str, tuple[tuple[int, ...], str]]  # name -> (shape, dtype)


def bytes_of(fields: Fields) -> int:
    """Return the size of these arrays, each on separate cache lines."""
    return max(LINE, sum(_lines(shape, dtype) for shape, dtype in fields.values()))


class SharedArrays:
    """Named arrays in one anonymous block, which can be sent to child processes."""

    def __init__(self, fields: Fields, *, descriptor: int | None = None) -> None:
        self.fields = dict(fields)
        self.size = bytes_of(fields)
        self._descriptor = _anonymous(self.size) if descriptor is None else descriptor
        block = mmap.mmap(self._descriptor, self.size)
        self._arrays: dict[str, NDArray] = {}
        # The int64 arrays, flat: access to an element is several times faster here than in a NumPy array.
        self.numbers: dict[str, memoryview] = {}
        offset = 0
        for name, (shape, dtype) in self.fields.items():
            self._arrays[name] = np.frombuffer(block, dtype, math.prod(shape), offset).reshape(shape)
            if dtype == "i8" and self._arrays[name].size:
                self.numbers[name] = self._arrays[name].data.cast("B").cast("q")
            offset += _lines(shape, dtype)

    def __getitem__(self, name: str) -> NDArray:
        return self._arrays[name]

    def cells(self, name: str, worker: int) -> memoryview:
        """Return one worker's part of the `numbers` of an array [W] or [W, K]."""
        each = math.prod(self.fields[name][0][1:])
        return self.numbers[name][worker * each : (worker + 1) * each]

    @property
    def path(self) -> str:
        """The path by which a running child process can open the memory, while this process holds it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @classmethod
    def opened(cls, fields: Fields, path: str) -> SharedArrays:
        """Open the arrays of another process by its fields and path."""
        return cls(fields, descriptor=os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self.fields, reduction.DupFd(self._descriptor))

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the last array that uses it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._arrays, self.numbers = {}, {}


def require_memory(size: int, what: str) -> None:
    """Raise SetupError if there is not enough free memory."""
    available = free_memory()
    if size > 0.8 * available:
        raise SetupError(
            f"{what} needs {size / 2**30:.1f} GB of memory but {available / 2**30:.1f} GB are free; "
            "use a smaller --max-queue-size, --collection-batch-size or fewer envs"
        )


def _lines(shape: tuple[int, ...], dtype: str) -> int:
    """Return the bytes of an array, in whole cache lines."""
    return -(-math.prod(shape) * np.dtype(dtype).itemsize // LINE) * LINE


def _attach(fields: Fields, descriptor: Any) -> SharedArrays:
    return SharedArrays(fields, descriptor=descriptor.detach())


def _anonymous(size: int) -> int:
    """Return a descriptor of zeroed memory without a name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("freewheel", os.MFD_CLOEXEC)
    else:
        descriptor, path = tempfile.mkstemp(prefix="freewheel-")
        os.unlink(path)
    os.ftruncate(descriptor, size)
    return descriptor


NEVER = -1


def most_contexts(first: NDArray) -> tuple[int, int]:
    """Return the most rows that tables of contexts may have in a run that begins with `first`, and their columns."""
    rows, columns = first.shape
    return max(rows, MOST_CONTEXTS) if rows else 0, columns


class Mailbox:
    """Two slots: version v is in slot v mod 2, so v - 1 stays readable until v + 1 is posted. `context`: the most rows
    that a table of contexts may have, and its columns."""

    def __init__(self, layout: Mapping[str, tuple[int, ...]], context: tuple[int, int] = (0, 0)) -> None:
        self.layout, self.context = dict(layout), context
        self._weights = sum(map(math.prod, layout.values()))
        content = ((2, self._weights + math.prod(context)), "f4")
        numbers = {"latest": ((1,), "i8"), "version": ((2,), "i8"), "contexts": ((2,), "i8")}
        self._memory = SharedArrays({**numbers, "content": content})
        self._memory["latest"][:] = self._memory["version"][:] = NEVER

    @property
    def version(self) -> int:
        """The version of the newest weights; -1 before the first."""
        return self._memory.numbers["latest"][0]

    def post(self, snapshot: Snapshot) -> None:
        """Write new weights. Only one process may post. Names outside the layout (a critic's) are not written."""
        most, columns = self.context
        rows = len(snapshot.context)
        if not bool(most) <= rows <= most or snapshot.context.shape[1] != columns:
            raise ValueError(
                f"contexts must have {columns} columns and at most {most} rows, not {snapshot.context.shape}"
            )
        slot = snapshot.version % 2
        self._memory["version"][slot] = NEVER
        params, context = self._views(self._memory["content"][slot], rows)
        for name, weights in params.items():
            weights[...] = to_numpy(snapshot.params[name]).reshape(weights.shape)
        context[...] = snapshot.context
        self._memory["contexts"][slot] = rows
        self._memory["version"][slot] = snapshot.version
        self._memory["latest"][0] = snapshot.version

    def buffer(self) -> NDArray:
        """Return memory that `read` can fill repeatedly, because allocating it every time is expensive."""
        return np.empty_like(self._memory["content"][0])

    def read(self, version: int | None = None, buffer: NDArray | None = None) -> Snapshot:
        """Return the newest weights, or exactly this version; LookupError if it is not available."""
        flat = self.buffer() if buffer is None else buffer
        while True:
            wanted = self.version if version is None else version
            slot = wanted % 2
            if self._memory["version"][slot] == wanted and wanted != NEVER:
                rows = self._memory.numbers["contexts"][slot]
                used = self._weights + rows * self.context[1]
                np.copyto(flat[:used], self._memory["content"][slot, :used])
                if self._memory["version"][slot] == wanted:
                    params, context = self._views(flat, rows)
                    return Snapshot(wanted, params, context.copy())  # a copy: episodes keep it after the next read
            if version is not None or wanted == NEVER:
                raise LookupError(f"version {wanted} is not in the mailbox")

    def _views(self, flat: NDArray, rows: int) -> tuple[dict[str, NDArray], NDArray]:
        """Return the weights by name, and this many rows of contexts [K, C]."""
        views, start = {}, 0
        for name, shape in self.layout.items():
            size = math.prod(shape)
            views[name] = flat[start : start + size].reshape(shape)
            start += size
        columns = self.context[1]
        return views, flat[start : start + rows * columns].reshape(rows, columns)

    def close(self) -> None:
        self._memory.close()
