"""timeline.json while a run with --trace goes on, and its trace.json at the end."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from freewheel.timeline.recording import Recording
from freewheel.transport.background import RepeatedCall

EVERY = 2.0  # seconds between two writes of timeline.json
PATIENCE = 5.0  # seconds for the last one


class TimelineSink:
    """Implements core.Sink."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._thread: RepeatedCall | None = None

    def write(self, row: Mapping[str, Any]) -> None:
        self._begin()

    def note(self, text: str) -> None:
        self._begin()

    def close(self, summary: Mapping[str, Any]) -> None:
        if self._thread is not None:
            self._thread.close(PATIENCE)
        self._recording.write()

    def _begin(self) -> None:
        """With the first sign of life of the run. A thread writes on while the training is stuck."""
        if self._thread is None:
            self._thread = RepeatedCall("timeline", self._recent, EVERY)

    def _recent(self) -> None:
        with suppress(OSError):  # a full disk is told of by those who lose something
            self._recording.write_recent()
