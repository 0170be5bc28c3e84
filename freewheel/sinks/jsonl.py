"""metrics.jsonl: one row of metrics per line, readable during the run; disk errors do not corrupt it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from freewheel.files.lines import Lines
from freewheel.sinks.sink import SinkEntry

KEPT = 10_000  # rows that wait at most during a disk error; beyond that the oldest are lost and counted


class JsonlSink:
    """Appends rows; rows that cannot be written wait in memory (files/lines.py). Implements sink.Sink."""

    direct = True  # cheap enough for the training thread

    def __init__(self, path: Path, say: Callable[[str], None] = lambda _: None) -> None:
        self._lines = Lines(path, say, "rows")

    @property
    def problem(self) -> str:
        """Describes the rows that are missing from the file; empty if there are none."""
        return self._lines.problem

    def write(self, row: Mapping[str, Any]) -> None:
        self._lines.add(json.dumps(row, allow_nan=False).encode() + b"\n")
        if len(self._lines) > KEPT:
            self._lines.lose_oldest()
        self.catch_up()

    def note(self, text: str) -> None:
        """Ignore notes: they are not rows."""

    def catch_up(self) -> None:
        """Write the rows that wait, as far as possible."""
        self._lines.catch_up()

    def close(self, summary: Mapping[str, Any]) -> None:
        self._lines.close()


SINK = SinkEntry("jsonl", lambda run: JsonlSink(run.path / "metrics.jsonl", run.say), default=True)
