"""Writes timeline.json during a run with --trace, and trace.json at its end."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from time import monotonic, thread_time
from typing import Any

from freewheel.timeline.model import Timeline
from freewheel.timeline.recording import SpanRecording
from freewheel.transport.background import RepeatedCall

EVERY = 2.0  # seconds between two calls, which write timeline.json or only drain the rings
SHARE = 0.003  # largest share of time for writes: the next one waits for the CPU time of this one / SHARE, ...
LATEST = 3.0  # ... but not longer than these seconds
PATIENCE = 5.0  # seconds to wait for the last call


class TimelineSink:
    """Writes the timeline of a run. Implements sink.Sink."""

    def __init__(self, recording: SpanRecording) -> None:
        self._recording = recording
        self._thread: RepeatedCall | None = None
        self._due = 0.0  # by time.monotonic
        self.timeline: Timeline | None = None  # set when the run has ended

    def write(self, row: Mapping[str, Any]) -> None:
        self._begin()

    def note(self, text: str) -> None:
        self._begin()

    def close(self, summary: Mapping[str, Any]) -> None:
        if self._thread is not None:
            self._thread.close(PATIENCE)
        self.timeline = self._recording.finished()
        self._recording.write(self.timeline)

    def _begin(self) -> None:
        """Start the thread at the first row or note. It continues to write even if the training is stuck."""
        if self._thread is None:
            self._thread = RepeatedCall("timeline", self._recent, EVERY)

    def _recent(self) -> None:
        if monotonic() < self._due:
            self._recording.drain()  # rings hold only some seconds
            return
        began = thread_time()
        with suppress(OSError):  # sinks that lose rows report a full disk
            self._recording.write_recent()
        self._due = monotonic() + min((thread_time() - began) / SHARE, LATEST)
