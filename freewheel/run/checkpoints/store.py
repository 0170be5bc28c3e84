"""The checkpoints of a run that is being trained: what each is called, which of them `latest` and `best` are, which may go."""

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
    """A checkpoint that was written, and what its manifest lists."""

    folder: Path
    files: Mapping[str, ManifestEntry]


class Store:
    """The folder of a run's checkpoints. Only one process writes there, with two threads at most: full checkpoints come from one
    in the background, weights from the learner's.

    The newest full ones stay, and those that a link points to; nothing is removed before what replaces it is whole.
    """

    def __init__(self, root: Path, keep: int = KEEP) -> None:
        self.root, self._keep = root, keep
        self._lock = threading.Lock()  # names, links and removals; files are written without it
        self._writing: set[Name] = set()
        self._abandoned: set[Name] = set()
        self._newest: Name | None = None  # of this session
        self._last = SaveOrder()  # of the saves that this session has begun
        self._before: int | None = None  # the last step that a session before it may have saved
        self._steps: set[int] = set()  # that this one has saved

    def go_back_to(self, folder: Path | None) -> None:
        """The run goes on from this checkpoint, or begins again: full ones that were saved after it belong to another course, and
        go with the next save."""
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
        """Write a checkpoint and point `latest` (and `best`, if it is) at it. `state`: the other files of a full one. Weights
        alone become the latest only where there is no full one, and are not written again if this step has them. `waiting`: see
        checkpoint.write."""
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
        """A name that no checkpoint of the run has had, and its place in the order of saves."""
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
        """A checkpoint of this step that has these weights already, undamaged."""
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
        """Remove old checkpoints: each is renamed before it is emptied, so that no reader finds half of one."""
        links = {checkpoint.target(self.root, link) for link in ("latest", "best")}
        known = checkpoint.names(self.root)
        full = [name for name in known if checkpoint.is_full(self.root / str(name))]
        if new in full:  # what is newer than that would be taken for this course of the run
            full, self._abandoned = [name for name in full if name not in self._abandoned], set()
        kept = {new, *links, *self._abandoned, *(full or known)[: self._keep]}
        for name in known:
            if name not in kept:
                disk.rename(self.root / str(name), self.root / f"{PART}{name}")
        busy = {f"{PART}{name}" for name in self._writing - {new}}
        for leftover in self.root.glob(f"{PART}*"):
            if leftover.name not in busy:
                disk.remove(leftover)
