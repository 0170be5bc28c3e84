"""Saves a run: regularly in the background, and at its end. A disk that fails does not end the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, perf_counter_ns
from typing import Any, NamedTuple, Protocol

import numpy as np

from freewheel.core import Array, Collector, Learner, NDArray, Snapshot, to_numpy
from freewheel.errors import FreewheelError
from freewheel.files.outage import Outage
from freewheel.run.checkpoints import checkpoint
from freewheel.run.checkpoints.checkpoint import BEST, COLLECTOR, LEARNER, PROGRESS, Content
from freewheel.run.checkpoints.run_progress import Earlier, RunProgress
from freewheel.run.checkpoints.segments import RowsCut, Segments, restore
from freewheel.run.checkpoints.store import Store, WrittenCheckpoint
from freewheel.run.naming import CHECKPOINTS
from freewheel.timeline.track import Track
from freewheel.transport.executors import ThreadExecutor

FIRST = 30.0  # seconds until the first save, and from a failed save to the next, at most
LOOK = 0.1  # seconds between two polls of a save while the caller waits for it


class _Cut(NamedTuple):
    """The state of a run between two turns of its loop, which later turns do not change."""

    step: int
    params: dict[str, NDArray]
    about: Mapping[str, Any]
    files: dict[str, Content]
    rows: Mapping[str, RowsCut]  # of the learner's buffers


@dataclass
class Counts:
    """The numbers of saves that were due, by outcome."""

    saved: int = 0
    skipped: int = 0  # because the previous save was still being written
    failed: int = 0
    longest_stall_s: float = 0.0  # the longest time that the learner waited for a save


class Directory(Protocol):
    """The part of a run directory that a Saver writes to."""

    store: Store

    @property
    def about(self) -> Mapping[str, Any]: ...  # the policy, for policy.json
    @property
    def outages(self) -> Mapping[str, Outage]: ...
    def keep(self) -> None: ...
    def save(self, step: int, snapshot: Snapshot, *, best: bool = False) -> Path | None: ...


class Saver:
    """Writes the full checkpoints of a run, one at a time, in a thread. If the disk fails, the old ones stay, the user
    gets one message, and the save is retried."""

    def __init__(self, directory: Directory, learner: Learner, *, every_s: float = 0.0) -> None:
        """every_s: seconds between two saves in the background; 0: no such saves."""
        self._directory, self.learner, self._every = directory, learner, every_s
        self.collector: Collector | None = None  # set when the collector is open
        self.progress: Callable[[str], RunProgress] = _unknown  # the argument: why the run has ended
        self.earlier: Earlier | None = None  # the session that this one continues
        self.counts = Counts()
        self.track: Track | None = None  # of the timeline
        self._due = self._usual = perf_counter() + min(FIRST, every_s) if every_s else math.inf
        self.early = bool(every_s)  # no checkpoint to resume from exists, and nothing was learned yet
        self._segments = {name: Segments(name, buffer) for name, buffer in learner.buffers().items()}
        self._thread: ThreadExecutor | None = None
        self._writing: _Cut | None = None
        self._began = 0.0
        self._last: Path | None = None

    def go_on_from(self, earlier: Earlier) -> None:
        """Restore the learner from a checkpoint; later checkpoints link its segments."""
        self.earlier = earlier
        self.learner.load_state_dict(earlier.state.learner)
        for name, buffer in self.learner.buffers().items():
            files = earlier.state.segments.get(name, [])
            restore(name, buffer, files)
            self._segments[name].found(files, buffer.added)
        self._directory.store.go_back_to(earlier.saved.path)
        self.early = False

    def learned(self) -> None:
        """Make the first save due: from now on the run is worth resuming."""
        self.early, self._due = False, 0.0

    def before_weights(self) -> Path | None:
        """Write the first full checkpoint before weights alone are saved: a killed run cannot be resumed from weights.
        Return its folder; None: it was not needed, or the save has failed."""
        if not self._every or self.earlier is not None or self.counts.saved or self.counts.failed:
            return None
        if self._writing is None:
            self.begin()
        return self._wait()

    @property
    def due(self) -> bool:
        """Return whether to call `begin`."""
        return perf_counter() >= self._due

    def begin(self) -> None:
        """Save the run in the background, unless the previous save is still being written. Call it between two turns of
        the loop, when the collector is open."""
        assert self.collector is not None, "begin() needs an open collector"
        began = perf_counter()
        self._due = self._usual if began < self._usual else began + self._every
        self._began = began if self._writing is None else self._began
        if self._writing is not None:
            self.counts.skipped += 1
            return
        self._writing = cut = self._cut(self.collector)
        if self._thread is None:
            self._thread = ThreadExecutor(lambda: self._write, "save", "cpu")
        self._thread.submit(cut)
        self.counts.longest_stall_s = max(self.counts.longest_stall_s, perf_counter() - began)

    @property
    def under_way(self) -> tuple[int, float] | None:
        """Return (step, seconds since its begin) of the save in the background. Any thread may call this."""
        return None if (cut := self._writing) is None else (cut.step, perf_counter() - self._began)

    def look(self, wait: float = 0.0) -> Path | None:
        """Return the folder of a save that has ended since the last call."""
        if self._writing is None or self._thread is None:
            return None
        result = self._thread.result(wait)
        return None if result is None else self._done(self._writing, result)

    def now(self, ended: str = "", *, whole: bool = True, waiting: Callable[[], None] = lambda: None) -> Path | None:
        """Save the run before this returns: all of it, or the weights alone if there is no collector, if the learner is
        not `whole`, or if full saves fail. None: the disk failed each time. `waiting` is called repeatedly."""
        if self._last is not None:
            return self._last
        for _ in range(2 if whole and self.collector is not None else 0):
            self._wait(waiting)
            assert self.collector is not None, "checked above"
            cut = self._cut(self.collector, ended, still=True)
            if (folder := self._done(cut, self._write(cut, waiting))) is not None:
                return folder
        return self._directory.save(self.progress(ended).env_steps, self.learner.snapshot())

    def last(self, ended: str, *, whole: bool, waiting: Callable[[], None] = lambda: None) -> Path | None:
        """Save the run at its end, as `now` does; later calls of both return this save."""
        self._directory.keep()
        self._last = self.now(ended, whole=whole, waiting=waiting)
        return self._last

    def close(self) -> None:
        """Wait for a running save and end the thread."""
        self._wait()
        if self._thread is not None:
            self._thread.close()

    def _wait(self, waiting: Callable[[], None] = lambda: None) -> Path | None:
        """Wait until the running save has ended; return its folder."""
        folder = None
        while self._writing is not None:
            folder = self.look(LOOK)
            waiting()
        return folder

    def _cut(self, collector: Collector, ended: str = "", *, still: bool = False) -> _Cut:
        """still: the learner waits until the state is written."""
        learner = _arrays(self.learner.state_dict())  # waits for a GPU, so that the values read after this are complete
        snapshot, progress = self.learner.snapshot(), self.progress(ended)
        checkpoint.require_finite(progress.env_steps, params := _arrays(snapshot.params))
        lanes = _arrays(collector.state_dict())
        rows = {name: one.cut(still=still) for name, one in self._segments.items()}
        files: dict[str, Content] = {
            LEARNER: partial(checkpoint.encode_arrays, learner),
            COLLECTOR: partial(checkpoint.encode_arrays, lanes),
            PROGRESS: checkpoint.encode_json(progress.about),
        }
        if progress.best is not None:
            files[BEST] = partial(checkpoint.encode_arrays, _arrays(progress.best.params))
        files |= {name: content for cut in rows.values() for name, content in cut.files.items()}
        about = {**self._directory.about, "version": snapshot.version}
        return _Cut(progress.env_steps, params, about, files, rows)

    def _write(self, cut: _Cut, waiting: Callable[[], None] | None = None) -> WrittenCheckpoint | OSError:
        began = perf_counter_ns()
        try:
            return self._directory.store.save(cut.step, cut.params, cut.about, cut.files, waiting=waiting)
        except OSError as error:
            return error
        finally:
            for rows in cut.rows.values():
                rows.close()
            cut.params.clear()  # the thread keeps a reference to its last argument
            cut.files.clear()
            if self.track is not None:
                self.track.add("save", began, perf_counter_ns())
                self.track.flush()

    def _done(self, cut: _Cut, result: WrittenCheckpoint | OSError | FreewheelError) -> Path | None:
        self._writing, outage = None, self._directory.outages[CHECKPOINTS]
        if isinstance(result, FreewheelError):
            raise result
        if isinstance(result, OSError):
            self.counts.failed += 1
            self._due = min(self._due, perf_counter() + FIRST) if self._every else math.inf
            outage.begins(result, "the save is retried")
            return None
        for name, rows in cut.rows.items():
            self._segments[name].saved(rows.end, result.folder, result.files)
        self.counts.saved += 1
        outage.ends()
        return result.folder


def _arrays(values: Mapping[str, Array]) -> dict[str, NDArray]:
    """Return copies on the CPU, because training may change the originals."""
    return {name: np.array(to_numpy(value)) for name, value in values.items()}


def _unknown(_: str) -> RunProgress:
    raise AssertionError("set Saver.progress before a save")
