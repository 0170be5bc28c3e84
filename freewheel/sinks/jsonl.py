"""metrics.jsonl: one row of metrics per line, readable while the run goes on, and whole whatever the disk does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from freewheel.files.lines import Lines
from freewheel.sinks.sink import SinkEntry

KEPT = 10_000  # rows that wait at most while the disk takes none; then the oldest are lost, and counted


class JsonlSink:
    """Rows that cannot be written wait (files/lines.py). Implements sink.Sink."""

    direct = True  # cheap enough for the thread of the training

    def __init__(self, path: Path, say: Callable[[str], None] = lambda _: None) -> None:
        self._lines = Lines(path, say, "rows")

    @property
    def problem(self) -> str:
        """What the file lacks; empty: nothing."""
        return self._lines.problem

    def write(self, row: Mapping[str, Any]) -> None:
        self._lines.add(json.dumps(row, allow_nan=False).encode() + b"\n")
        if len(self._lines) > KEPT:
            self._lines.lose_oldest()
        self.catch_up()

    def note(self, text: str) -> None:
        """Notes are not rows."""

    def catch_up(self) -> None:
        """Write what waits, as far as possible."""
        self._lines.catch_up()

    def close(self, summary: Mapping[str, Any]) -> None:
        self._lines.close()


SINK = SinkEntry("jsonl", lambda run: JsonlSink(run.path / "metrics.jsonl", run.say), default=True)
