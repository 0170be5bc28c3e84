"""timeline.json while a run with --trace goes on, and its trace.json at the end."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from time import monotonic, thread_time
from typing import Any

from freewheel.timeline.model import Timeline
from freewheel.timeline.recording import SpanRecording
from freewheel.transport.background import RepeatedCall

EVERY = 2.0  # seconds between two writes of timeline.json, ...
SHARE = 0.003  # ... and more where it would take a larger part of the trainer's time, ...
LATEST = 3.0  # ... up to this
PATIENCE = 5.0  # seconds for the last one


class TimelineSink:
    """Implements sink.Sink."""

    def __init__(self, recording: SpanRecording) -> None:
        self._recording = recording
        self._thread: RepeatedCall | None = None
        self._due = 0.0  # by time.monotonic
        self.timeline: Timeline | None = None  # when the run has ended

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
        """With the first sign of life of the run. A thread writes on while the training is stuck."""
        if self._thread is None:
            self._thread = RepeatedCall("timeline", self._recent, EVERY)

    def _recent(self) -> None:
        if monotonic() < self._due:
            self._recording.drain()  # rings hold some seconds
            return
        began = thread_time()
        with suppress(OSError):  # a full disk is told of by those who lose something
            self._recording.write_recent()
        self._due = monotonic() + min((thread_time() - began) / SHARE, LATEST)
