"""Mailbox: the newest weights, for any number of readers that never wait and never see half of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from freewheel.core import NDArray, Snapshot, host
from freewheel.transport.memory import SharedArrays

NEVER = -1


class Mailbox:
    """Two slots by turns. Version v lies in slot v mod 2, so v - 1 stays readable until v + 1 is posted."""

    def __init__(self, layout: Mapping[str, tuple[int, ...]]) -> None:
        total = sum(math.prod(shape) for shape in layout.values())
        self.layout = dict(layout)
        self._memory = SharedArrays({"latest": ((1,), "i8"), "version": ((2,), "i8"), "weights": ((2, total), "f4")})
        self._memory["latest"][:] = self._memory["version"][:] = NEVER

    @property
    def version(self) -> int:
        """Of the newest weights; -1 before the first."""
        return self._memory.numbers["latest"][0]

    def post(self, snapshot: Snapshot) -> None:
        """One writer. Names that are not in the layout (a critic's) stay here."""
        slot = snapshot.version % 2
        self._memory["version"][slot] = NEVER
        for name, weights in self._views(self._memory["weights"][slot]).items():
            weights[...] = host(snapshot.params[name]).reshape(weights.shape)
        self._memory["version"][slot] = snapshot.version
        self._memory["latest"][0] = snapshot.version

    def room(self) -> NDArray:
        """For `read` to put weights into, time and again: fresh memory is dear."""
        return np.empty_like(self._memory["weights"][0])

    def read(self, version: int | None = None, room: NDArray | None = None) -> Snapshot:
        """The newest weights, or exactly these while they are still here; LookupError if they are not."""
        flat = self.room() if room is None else room
        while True:
            wanted = self.version if version is None else version
            slot = wanted % 2
            if self._memory["version"][slot] == wanted and wanted != NEVER:
                np.copyto(flat, self._memory["weights"][slot])
                if self._memory["version"][slot] == wanted:
                    return Snapshot(wanted, self._views(flat))
            if version is not None or wanted == NEVER:
                raise LookupError(f"version {wanted} is not in the mailbox")

    def _views(self, flat: NDArray) -> dict[str, NDArray]:
        views, start = {}, 0
        for name, shape in self.layout.items():
            size = math.prod(shape)
            views[name] = flat[start : start + size].reshape(shape)
            start += size
        return views

    def close(self) -> None:
        self._memory.close()
