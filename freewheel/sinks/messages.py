"""messages.jsonl: the messages of a run to its user, one per line. The file exists only if there was a message."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from freewheel.files import disk
from freewheel.sinks.sink import SinkEntry

FILE = "messages.jsonl"
MOST = 10_000  # messages per session: an environment that fails repeatedly must not fill the disk
LONGEST = 4_000  # characters


class MessagesSink:
    """Appends messages to the file; the screen also shows them, so a failed write is ignored. Implements sink.Sink."""

    direct = True  # messages are rare

    def __init__(self, path: Path) -> None:
        self._path, self._told, self._wall_s = path, 0, 0.0

    def write(self, row: Mapping[str, Any]) -> None:
        """Remember the time of the row for the next messages."""
        self._wall_s = row.get("wall_s") or 0.0

    def note(self, text: str) -> None:
        self._told += 1
        if self._told > MOST:
            return
        message = {"time": round(time.time(), 3), "wall_s": round(self._wall_s, 3), "text": text[:LONGEST]}
        with suppress(OSError), disk.open_end(self._path) as file:
            disk.append(file, json.dumps(message).encode() + b"\n")

    def close(self, summary: Mapping[str, Any]) -> None:
        """Do nothing: no file is open."""


SINK = SinkEntry("messages", lambda run: MessagesSink(run.path / FILE), default=True)
