"""Mailbox: the newest weights and contexts; readers never wait and never see a mixture of two versions."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from freewheel.core import NDArray, Snapshot, to_numpy
from freewheel.transport.shm.memory import SharedArrays

NEVER = -1


class Mailbox:
    """Two slots: version v is in slot v mod 2, so v - 1 stays readable until v + 1 is posted."""

    def __init__(self, layout: Mapping[str, tuple[int, ...]], context: tuple[int, ...] = (0, 0)) -> None:
        self.layout, self.context = dict(layout), context
        total = sum(map(math.prod, (*layout.values(), context)))
        self._memory = SharedArrays({"latest": ((1,), "i8"), "version": ((2,), "i8"), "content": ((2, total), "f4")})
        self._memory["latest"][:] = self._memory["version"][:] = NEVER

    @property
    def version(self) -> int:
        """The version of the newest weights; -1 before the first."""
        return self._memory.numbers["latest"][0]

    def post(self, snapshot: Snapshot) -> None:
        """Write new weights. Only one process may post. Names outside the layout (a critic's) are not written."""
        if snapshot.context.shape != self.context:
            raise ValueError(f"contexts must have the shape {self.context}, not {snapshot.context.shape}")
        slot = snapshot.version % 2
        self._memory["version"][slot] = NEVER
        params, context = self._views(self._memory["content"][slot])
        for name, weights in params.items():
            weights[...] = to_numpy(snapshot.params[name]).reshape(weights.shape)
        context[...] = snapshot.context
        self._memory["version"][slot] = snapshot.version
        self._memory["latest"][0] = snapshot.version

    def buffer(self) -> NDArray:
        """Memory that `read` can fill repeatedly, because allocating it every time is expensive."""
        return np.empty_like(self._memory["content"][0])

    def read(self, version: int | None = None, buffer: NDArray | None = None) -> Snapshot:
        """The newest weights, or exactly this version; LookupError if it is not available."""
        flat = self.buffer() if buffer is None else buffer
        while True:
            wanted = self.version if version is None else version
            slot = wanted % 2
            if self._memory["version"][slot] == wanted and wanted != NEVER:
                np.copyto(flat, self._memory["content"][slot])
                if self._memory["version"][slot] == wanted:
                    params, context = self._views(flat)
                    return Snapshot(wanted, params, context.copy())  # a copy: episodes keep it after the next read
            if version is not None or wanted == NEVER:
                raise LookupError(f"version {wanted} is not in the mailbox")

    def _views(self, flat: NDArray) -> tuple[dict[str, NDArray], NDArray]:
        """The weights by name, and the contexts [K, C]."""
        views, start = {}, 0
        for name, shape in self.layout.items():
            size = math.prod(shape)
            views[name] = flat[start : start + size].reshape(shape)
            start += size
        return views, flat[start:].reshape(self.context)

    def close(self) -> None:
        self._memory.close()
