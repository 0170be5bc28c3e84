"""Memory that processes share and nobody can leave behind: without a name, sent as a descriptor, gone with its last user."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Mapping
from multiprocessing import reduction
from typing import Any

import numpy as np
import psutil

from freewheel.core import NDArray
from freewheel.errors import SetupError

LINE = 64  # bytes of a cache line: arrays that different processes write must not share one
Fields = Mapping[str, tuple[tuple[int, ...], str]]  # name -> (shape, dtype)


def bytes_of(fields: Fields) -> int:
    """What these arrays take, each on cache lines of its own."""
    return max(LINE, sum(_lines(shape, dtype) for shape, dtype in fields.values()))


class SharedArrays:
    """Named arrays in one anonymous block. Sent to a child process, it is the same memory there."""

    def __init__(self, fields: Fields, *, descriptor: int | None = None) -> None:
        self.fields = dict(fields)
        self.size = bytes_of(fields)
        self._descriptor = _anonymous(self.size) if descriptor is None else descriptor
        block = mmap.mmap(self._descriptor, self.size)
        self._arrays: dict[str, NDArray] = {}
        # int64 arrays, flat: an element of these is read and written several times as fast as an array's
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
        """One worker's `numbers` of an array [W] or [W, K]."""
        each = math.prod(self.fields[name][0][1:])
        return self.numbers[name][worker * each : (worker + 1) * each]

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self.fields, reduction.DupFd(self._descriptor))

    def close(self) -> None:
        """Give the descriptor back; the memory goes when the last array of it does."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._arrays, self.numbers = {}, {}


def require_room(size: int, what: str) -> None:
    """Refuse to start what cannot fit, before anything is started."""
    available = psutil.virtual_memory().available
    if size > 0.8 * available:
        raise SetupError(
            f"{what} takes {size / 2**30:.1f} GB of memory and {available / 2**30:.1f} GB are free; "
            "use a smaller --max-queue-size, --collection-batch-size or fewer envs"
        )


def _lines(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of an array, in whole cache lines."""
    return -(-math.prod(shape) * np.dtype(dtype).itemsize // LINE) * LINE


def _attach(fields: Fields, descriptor: Any) -> SharedArrays:
    return SharedArrays(fields, descriptor=descriptor.detach())


def _anonymous(size: int) -> int:
    """A descriptor of zeroed memory that no name leads to."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("freewheel", os.MFD_CLOEXEC)
    else:
        descriptor, path = tempfile.mkstemp(prefix="freewheel-")
        os.unlink(path)
    os.ftruncate(descriptor, size)
    return descriptor
