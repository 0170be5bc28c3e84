"""A writer that is killed before a chosen store to shared memory."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np

from freewheel.core import Transitions
from freewheel.transport.shm.channel import Port, Writer


class Killed(BaseException):
    """The writer is killed here."""


class Fuse:
    """Allows a number of stores to shared memory; the next one raises Killed."""

    def __init__(self, stores: float = math.inf) -> None:
        self.left = stores

    def count(self) -> None:
        if not self.left:
            raise Killed
        self.left -= 1


class Fused:
    """An array or cells; each store counts against the fuse."""

    def __init__(self, cells: Any, fuse: Fuse) -> None:
        self._cells, self._fuse = cells, fuse

    def __getitem__(self, key: Any) -> Any:
        found = self._cells[key]
        return Fused(found, self._fuse) if isinstance(found, np.ndarray) else found

    def __setitem__(self, key: Any, value: Any) -> None:
        self._fuse.count()
        self._cells[key] = value

    def __iadd__(self, other: Any) -> Self:
        self._fuse.count()
        self._cells += other
        return self

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self._cells)

    @property
    def shape(self) -> Any:
        return self._cells.shape


def fused_writer(port: Port, fuse: Fuse, worker: int = 0, incarnation: int = 0) -> Writer:
    writer = Writer(port, worker, incarnation)
    for name, cells in vars(writer._ring).items():
        if isinstance(cells, memoryview | np.ndarray):
            setattr(writer._ring, name, Fused(cells, fuse))
    columns = ([getattr(data, name) for name in Transitions.__dataclass_fields__] for data in writer._data)
    writer._data = [Transitions(*(Fused(column, fuse) for column in slot)) for slot in columns]
    return writer
