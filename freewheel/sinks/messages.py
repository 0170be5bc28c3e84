"""messages.jsonl: what a run has told its user, one message per line; there is no such file where it has told nothing."""

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
MOST = 10_000  # messages of one session: an environment that fails again and again must not fill the disk
LONGEST = 4_000  # characters


class MessagesSink:
    """A message that the disk does not take is lost here: it was on the screen. Implements sink.Sink."""

    direct = True  # messages are rare

    def __init__(self, path: Path) -> None:
        self._path, self._told, self._wall_s = path, 0, 0.0

    def write(self, row: Mapping[str, Any]) -> None:
        """A message has the time of the newest row."""
        self._wall_s = row.get("wall_s") or 0.0

    def note(self, text: str) -> None:
        self._told += 1
        if self._told > MOST:
            return
        message = {"time": round(time.time(), 3), "wall_s": round(self._wall_s, 3), "text": text[:LONGEST]}
        with suppress(OSError), disk.open_end(self._path) as file:
            disk.append(file, json.dumps(message).encode() + b"\n")

    def close(self, summary: Mapping[str, Any]) -> None:
        """Nothing is open."""


SINK = SinkEntry("messages", lambda run: MessagesSink(run.path / FILE), default=True)
