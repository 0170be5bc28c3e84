"""metrics.jsonl: one row of metrics a line, there to be read while the run goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class JsonlSink:
    """Appends rows, each flushed; notes are not rows and stay out. Implements core.Sink."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def note(self, text: str) -> None:
        """A file of rows has no place for it."""

    def close(self, summary: Mapping[str, Any]) -> None:
        self._file.close()
