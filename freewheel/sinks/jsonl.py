"""metrics.jsonl: one row of metrics per line, readable while the run goes on, and whole whatever the disk does."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from freewheel.files import disk
from freewheel.files.outage import Outage, twice
from freewheel.sinks.sink import SinkEntry

KEPT = 10_000  # rows that wait at most while the disk takes none; then the oldest are lost, and counted
BLOCK = 1 << 20  # bytes read at a time


class JsonlSink:
    """Rows that cannot be written wait in memory and are written, in order, as soon as it is possible. Implements core.Sink.

    Half a line is cut off before anything else is written. If the file was removed, it is made again with all its rows.
    """

    direct = True  # cheap enough for the thread of the training

    def __init__(self, path: Path, say: Callable[[str], None] = lambda _: None) -> None:
        self._path, self._outage = path, Outage(str(path), say)
        self._waiting: deque[bytes] = deque()
        self._lost = 0  # rows that waited in vain
        self._file: BinaryIO | None = None
        self._end = 0  # where the last whole line ends
        self._torn = False  # there may be something after it
        self.catch_up()

    @property
    def problem(self) -> str:
        """What the file lacks; empty: nothing."""
        missing = [f"{len(self._waiting)} rows are not written"] if self._waiting else []
        missing += [f"{self._lost} rows are lost"] if self._lost else []
        return f"{self._path}: {', '.join(missing)} ({self._outage.problem or 'written to again'})" if missing else ""

    def write(self, row: Mapping[str, Any]) -> None:
        self._waiting.append(json.dumps(row, allow_nan=False).encode() + b"\n")
        if len(self._waiting) > KEPT:
            self._waiting.popleft()
            self._lost += 1
        self.catch_up()

    def note(self, text: str) -> None:
        """Notes are not rows."""

    def close(self, summary: Mapping[str, Any]) -> None:
        self.catch_up()
        if self._file is not None:
            with suppress(OSError):
                self._file.close()

    def catch_up(self) -> None:
        """Write what waits, as far as possible."""
        waited = len(self._waiting)
        try:
            twice(self._drain)
        except OSError as error:
            self._outage.begins(error, f"{len(self._waiting)} rows wait")
        else:
            self._outage.ends(f"{waited} rows that waited are written" if waited else "")

    def _drain(self) -> None:
        file = self._opened()
        if self._torn:
            disk.cut(file, self._end)
            self._torn = False
        while self._waiting:
            self._torn = True
            disk.append(file, self._waiting[0])
            self._torn = False
            self._end += len(self._waiting.popleft())

    def _opened(self) -> BinaryIO:
        """The file of this path: the one that is open, or where that was removed a new one with the same lines."""
        before = self._file
        if before is not None:
            try:
                if os.path.samestat(os.fstat(before.fileno()), os.stat(self._path)):
                    return before
            except FileNotFoundError:
                pass
        removed = before is not None and not self._path.exists()
        file = disk.open_end(self._path)
        try:
            if removed and before is not None:
                self._copy(before, file)
            end = _whole(file)
        except OSError:
            file.close()
            if removed:
                disk.remove(self._path)  # or the lines that it lacks would not be looked for again
            raise
        if before is not None:
            before.close()
        self._file, self._end, self._torn = file, end, end < file.seek(0, os.SEEK_END)
        return file

    def _copy(self, before: BinaryIO, file: BinaryIO) -> None:
        """The whole lines of a file that has lost its name."""
        at = 0
        while at < self._end:
            try:
                data = os.pread(before.fileno(), min(BLOCK, self._end - at), at)
            except OSError:  # its disk is gone as well
                data = b""
            if not data:
                return
            disk.append(file, data)
            at += len(data)


def _whole(file: BinaryIO) -> int:
    """Where the last whole line ends."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - BLOCK)
        file.seek(start)
        if (newline := file.read(end - start).rfind(b"\n")) >= 0:
            return start + newline + 1
        end = start
    return 0


SINK = SinkEntry("jsonl", lambda run: JsonlSink(run.path / "metrics.jsonl", run.say), default=True)
