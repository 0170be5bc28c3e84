"""Following a run from outside: reads what is new in its directory, whatever happens to its trainer.

follower = Follower(Path("runs/first"))
rows = []
while True:
    news = follower.poll()
    del rows[news.kept:]      # a resume has removed these
    rows += news.rows
    ... follower.config, follower.status, follower.summary, follower.state
    time.sleep(0.5)
"""

from __future__ import annotations

import json
import os
import zlib
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from freewheel.errors import FileError
from freewheel.files import read
from freewheel.files.lock import FileLock
from freewheel.run.live.status import STATUS, Status, read_status
from freewheel.run.naming import CONFIG, LOCK, METRICS, SUMMARY

Row = Mapping[str, Any]

MOST = 8 << 20  # bytes of metrics.jsonl that one poll reads, so that a viewer can show its first rows soon
MOST_ROWS = 20_000  # ... and rows
ALL_ROWS = 4_000_000  # rows of a run that are read at most
LONGEST = 1 << 20  # bytes of a row; a longer one is damaged
STATES = ("starting", "running", "ended", "failed", "interrupted", "gone")


class News(NamedTuple):
    """The result of a poll."""

    kept: int  # earlier rows that are still valid; the rows after them belong to work that is repeated
    rows: Sequence[Row]  # new rows, which follow the kept ones
    more: bool  # more rows can be read at once
    changed: frozenset[str]  # which of config, status, summary and state


def state_of(path: Path, summary: Mapping[str, Any] | None) -> str:
    """Return one of STATES. A run is running while its lock is held; `gone`: it ended without a summary."""
    if FileLock.holder(path / LOCK) is not None:
        return "running"
    if summary is None:
        return "gone" if (path / CONFIG).exists() else "starting"
    ended, code = str(summary.get("ended")), summary.get("exit_code")
    if ended.startswith("interrupted"):
        return "interrupted"
    return "ended" if code in (0, 3) else "failed"


class Follower:
    """Reads a run directory, which need not exist yet, without locks or changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: Mapping[str, Any] | None = None
        self.status: Status | None = None
        self.summary: Mapping[str, Any] | None = None
        self.state = "starting"
        self.problems: dict[str, str] = {}  # by file: why it cannot be read in full
        self._seen: dict[str, tuple[int, ...]] = {}  # by file: device, inode, size and mtime when it was read
        self._rows = _MetricRows(path / METRICS)

    def poll(self) -> News:
        """Read what is new since the last call."""
        changed = set()
        kept, rows, more = self._rows.read()
        if self._rows.problem:
            self.problems[METRICS] = self._rows.problem
        for name in (CONFIG, STATUS, SUMMARY):
            field = name.removesuffix(".json")
            if self._is_new(name):
                changed.add(field)
                setattr(self, field, self._read(name))
        if (state := state_of(self.path, self.summary)) != self.state:
            changed.add("state")
            self.state = state
        return News(kept, rows, more, frozenset(changed))

    def _is_new(self, name: str) -> bool:
        """Return whether a file was written, replaced or removed since it was read."""
        known: tuple[int, ...] = ()
        with suppress(OSError):
            found = os.stat(self.path / name)
            known = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        changed = known != self._seen.get(name, ())
        self._seen[name] = known
        return changed

    def _read(self, name: str) -> Any:
        """Return the content of a file; None if it is missing, the earlier content if it cannot be parsed."""
        self.problems.pop(name, None)
        if not self._seen[name]:
            return None
        try:
            return read_status(self.path) if name == STATUS else read.json_object(self.path / name)
        except FileError as error:
            self.problems[name] = str(error)
            return getattr(self, name.removesuffix(".json"))


class _MetricRows:
    """Reads each row of metrics.jsonl once. The file only grows, except that a resume cuts it back to a checkpoint.
    The end and the checksum of each line show which lines are still valid."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ends, self._sums = array("q"), array("L")  # end offset and checksum of each line
        self._given = array("q")  # rows up to and with each line; a damaged line is not a row
        self.problem = ""

    def read(self) -> tuple[int, list[Row], bool]:
        """Return the number of earlier rows that are still valid, the new rows, and whether there are more."""
        try:
            with read.regular(self._path) as file:
                self._cut(self._holding(file))
                return self._count(), *self._new(file)
        except (FileError, OSError):
            self._cut(0)  # it was removed, or does not exist yet
            return 0, [], False

    def _count(self) -> int:
        return self._given[-1] if self._given else 0

    def _cut(self, lines: int) -> None:
        del self._ends[lines:], self._sums[lines:], self._given[lines:]

    def _holding(self, file: BinaryIO) -> int:
        """Return how many of the first lines are still as they were read."""
        low, high = 0, len(self._ends)
        if high and self._holds(file, high - 1):
            return high
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._holds(file, middle) else (low, middle)
        return low

    def _holds(self, file: BinaryIO, line: int) -> bool:
        begin = self._ends[line - 1] if line else 0
        data = os.pread(file.fileno(), self._ends[line] - begin, begin)
        return len(data) == self._ends[line] - begin and zlib.crc32(data) == self._sums[line]

    def _new(self, file: BinaryIO) -> tuple[list[Row], bool]:
        end, rows = self._ends[-1] if self._ends else 0, list[Row]()
        if len(self._ends) >= ALL_ROWS:
            self.problem = f"{self._path} has more than {ALL_ROWS:,} rows; the rest are not read"
            return rows, False
        data = os.pread(file.fileno(), MOST, end)
        more = len(data) == MOST
        whole = data.rfind(b"\n") + 1  # the last line may be incomplete
        if not whole and len(data) > LONGEST:
            whole = len(data)  # the line is longer than any row: skip it up to here
        *lines, rest = data[:whole].split(b"\n", MOST_ROWS)
        for line in [line + b"\n" for line in lines] or [rest][: len(rest)]:
            end += len(line)
            row = self._parsed(line)
            rows += [] if row is None else [row]
            self._ends.append(end)
            self._sums.append(zlib.crc32(line))
            self._given.append(self._count() + (row is not None))
        return rows, more or len(lines) == MOST_ROWS

    def _parsed(self, line: bytes) -> Row | None:
        try:
            row = json.loads(line, parse_constant=lambda _: None) if len(line) <= LONGEST else None
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            self.problem = f"{self._path} has lines that are not rows; they are skipped"
            return None
        return row
