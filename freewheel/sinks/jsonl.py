"""metrics.jsonl: one row of metrics per line, readable while the run goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freewheel.sinks.sink import SinkEntry


class JsonlSink:
    """Appends rows and flushes each. Implements core.Sink."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def note(self, text: str) -> None:
        """Notes are not rows."""

    def close(self, summary: Mapping[str, Any]) -> None:
        self._file.close()


SINK = SinkEntry("jsonl", lambda run: JsonlSink(run.path / "metrics.jsonl"), default=True)
