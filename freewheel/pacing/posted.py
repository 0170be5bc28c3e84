"""The latest posted weights: a resumed run acts with these, although its learner may already have newer ones."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from freewheel.core import Array, Snapshot

PREFIX = "posted."
KEPT = 2  # versions: batch k is collected with version k - 1


class Posted:
    """The newest snapshots, as they were posted."""

    def __init__(self) -> None:
        self._known: list[Snapshot] = []  # oldest first
        self._restored: list[Snapshot] = []

    def post(self, snapshot: Snapshot) -> list[Snapshot]:
        """Return the snapshots to post, oldest first. That is this snapshot, except for the first of a resumed run: if
        its version was the last one posted before, the restored snapshots take its place."""
        before, self._restored = self._restored, []
        if before and before[-1].version == snapshot.version:
            self._known = before
            return before
        self._known = [*self._known[1 - KEPT :], snapshot]
        return [snapshot]

    def state(self) -> dict[str, Array]:
        """Return copies. Weights of a simulator on a device are left out: a resumed run starts the simulator afresh."""
        state: dict[str, Array] = {}
        for snapshot in self._known or self._restored:
            if all(isinstance(value, np.ndarray) for value in snapshot.params.values()):
                own = f"{PREFIX}{snapshot.version}."
                state |= {f"{own}params.{name}": np.array(value) for name, value in snapshot.params.items()}
                state[f"{own}context"] = np.array(snapshot.context)
        return state

    def restore(self, state: Mapping[str, Array]) -> None:
        found: dict[int, dict[str, Array]] = {}
        for name, value in state.items():
            if name.startswith(PREFIX):
                version, _, own = name.removeprefix(PREFIX).partition(".")
                found.setdefault(int(version), {})[own] = value
        self._restored = [
            Snapshot(
                version,
                {name.removeprefix("params."): value for name, value in own.items() if name != "context"},
                np.asarray(own["context"]),
            )
            for version, own in sorted(found.items())
        ]
