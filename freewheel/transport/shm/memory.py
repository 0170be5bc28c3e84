"""Shared memory without a name: sent to processes as a descriptor and freed by the kernel with its last user."""

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

LINE = 64  # bytes of a cache line; arrays written by different processes must not share one
Fields = Mapping[str, tuple[tuple[int, ...], str]]  # name -> (shape, dtype)


def bytes_of(fields: Fields) -> int:
    """The size of these arrays, each on separate cache lines."""
    return max(LINE, sum(_lines(shape, dtype) for shape, dtype in fields.values()))


class SharedArrays:
    """Named arrays in one anonymous block, which can be sent to child processes."""

    def __init__(self, fields: Fields, *, descriptor: int | None = None) -> None:
        self.fields = dict(fields)
        self.size = bytes_of(fields)
        self._descriptor = _anonymous(self.size) if descriptor is None else descriptor
        block = mmap.mmap(self._descriptor, self.size)
        self._arrays: dict[str, NDArray] = {}
        # The int64 arrays, flat: reading or writing an element is several times faster than in an array.
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
        """One worker's part of the `numbers` of an array [W] or [W, K]."""
        each = math.prod(self.fields[name][0][1:])
        return self.numbers[name][worker * each : (worker + 1) * each]

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self.fields, reduction.DupFd(self._descriptor))

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the last array that uses it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._arrays, self.numbers = {}, {}


def require_memory(size: int, what: str) -> None:
    """SetupError if there is not enough free memory."""
    available = psutil.virtual_memory().available
    if size > 0.8 * available:
        raise SetupError(
            f"{what} needs {size / 2**30:.1f} GB of memory but {available / 2**30:.1f} GB are free; "
            "use a smaller --max-queue-size, --collection-batch-size or fewer envs"
        )


def _lines(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of an array, in whole cache lines."""
    return -(-math.prod(shape) * np.dtype(dtype).itemsize // LINE) * LINE


def _attach(fields: Fields, descriptor: Any) -> SharedArrays:
    return SharedArrays(fields, descriptor=descriptor.detach())


def _anonymous(size: int) -> int:
    """A descriptor of zeroed memory without a name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("freewheel", os.MFD_CLOEXEC)
    else:
        descriptor, path = tempfile.mkstemp(prefix="freewheel-")
        os.unlink(path)
    os.ftruncate(descriptor, size)
    return descriptor
