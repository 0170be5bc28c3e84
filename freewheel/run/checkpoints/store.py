"""The checkpoints of a running training: their names, the links `latest` and `best`, and the removal of old ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from freewheel.core import NDArray
from freewheel.errors import FileError
from freewheel.files import disk
from freewheel.run.checkpoints import checkpoint
from freewheel.run.checkpoints.checkpoint import PART, POLICY, WEIGHTS, Content, ManifestEntry, Name
from freewheel.run.checkpoints.order import SaveOrder

KEEP = 2  # full checkpoints


class WrittenCheckpoint(NamedTuple):
    """A checkpoint that was written, and the files in its manifest."""

    folder: Path
    files: Mapping[str, ManifestEntry]


class Store:
    """The folder of a run's checkpoints. Only one process writes there, with at most two threads at a time: one in the
    background writes full checkpoints, the learner's thread writes weights.

    The newest full checkpoints and the targets of links stay. Nothing is removed before its replacement is complete.
    """

    def __init__(self, root: Path, keep: int = KEEP) -> None:
        self.root, self._keep = root, keep
        self._lock = threading.Lock()  # guards names, links and removals; files are written without it
        self._writing: set[Name] = set()
        self._abandoned: set[Name] = set()
        self._newest: Name | None = None  # the newest checkpoint of this session
        self._last = SaveOrder()  # the last save that this session has begun
        self._before: int | None = None  # the highest step that an earlier session may have saved
        self._steps: set[int] = set()  # the steps that this session has saved

    def go_back_to(self, folder: Path | None) -> None:
        """Continue from this checkpoint, or begin again (None). Full checkpoints saved after it belong to an abandoned
        course of the run; the next full save removes them."""
        known, name = checkpoint.names(self.root), None if folder is None else Name.parse(folder.name)
        newer = known[: known.index(name)] if name in known else known
        self._abandoned = {one for one in newer if checkpoint.is_full(self.root / str(one))}

    def save(
        self,
        step: int,
        params: Mapping[str, NDArray],
        about: Mapping[str, Any],
        state: Mapping[str, Content] | None = None,
        *,
        best: bool = False,
        waiting: Callable[[], None] | None = None,
    ) -> WrittenCheckpoint:
        """Write a checkpoint and point `latest` (and `best`, if set) at it. `state`: other files of a full checkpoint.
        Weights alone become the latest only if no full one exists, and are not written again if this step has them.
        `waiting`: see checkpoint.write."""
        files: dict[str, Content] = {
            WEIGHTS: checkpoint.encode_arrays(params),
            POLICY: checkpoint.encode_json(about),
            **(state or {}),
        }
        checkpoint.make_private(self.root)
        name, order = self._claim(step)
        try:
            there = self._same(step, files) if state is None else None
            folder = self.root / str(there or name)
            listed = checkpoint.write(folder, files, order=order, waiting=waiting) if there is None else {}
            with self._lock:
                self._point(there or name, full=state is not None, best=best)
                self._prune(there or name)
        finally:
            self._writing.discard(name)
        return WrittenCheckpoint(folder, listed)

    def _claim(self, step: int) -> tuple[Name, SaveOrder]:
        """Return a name that no checkpoint of the run has had, and its place in the order of saves."""
        with self._lock:
            known = checkpoint.orders(self.root)
            found = [
                self._last,
                *(SaveOrder(max(known[one].number, one.number), one.step) for one in known),
                *known.values(),
            ]
            number, furthest = (max(values) for values in zip(*found, strict=True))
            self._before = furthest if self._before is None else self._before
            name = Name(step) if step > self._before and step not in self._steps else Name(step, number + 1)
            self._last = SaveOrder(number + 1, max(step, furthest))
            self._steps.add(step)
            self._writing.add(name)
            return name, self._last

    def _same(self, step: int, files: Mapping[str, Content]) -> Name | None:
        """Return an undamaged checkpoint of this step that already has these weights."""
        for name in (one for one in checkpoint.names(self.root) if one.step == step):
            with suppress(FileError):
                if checkpoint.holds(self.root / str(name), files):
                    return name
        return None

    def _point(self, name: Name, *, full: bool, best: bool) -> None:
        latest = checkpoint.target(self.root, "latest")
        self._newest = name if full or self._newest is None else max(self._newest, name)
        newest = full or latest is None or not checkpoint.is_full(self.root / str(latest))
        newest = (
            newest and name == self._newest
        )  # the best weights may be those of an earlier step, saved again after an outage
        for link in (*(("latest",) if newest else ()), *(("best",) if best else ())):
            part = self.root / f"{PART}{link}"
            disk.remove(part)
            disk.point(part, str(name))
            disk.rename(part, self.root / link)
            disk.sync(self.root)

    def _prune(self, new: Name) -> None:
        """Remove old checkpoints. Each is renamed before it is emptied, so that no reader finds an incomplete one."""
        links = {checkpoint.target(self.root, link) for link in ("latest", "best")}
        known = checkpoint.names(self.root)
        full = [name for name in known if checkpoint.is_full(self.root / str(name))]
        if new in full:  # otherwise abandoned ones could be taken for newer states of this run
            full, self._abandoned = [name for name in full if name not in self._abandoned], set()
        kept = {new, *links, *self._abandoned, *(full or known)[: self._keep]}
        for name in known:
            if name not in kept:
                disk.rename(self.root / str(name), self.root / f"{PART}{name}")
        busy = {f"{PART}{name}" for name in self._writing - {new}}
        for leftover in self.root.glob(f"{PART}*"):
            if leftover.name not in busy:
                disk.remove(leftover)
