"""A file of lines that others read while it grows; it keeps only whole lines, even if the disk fails."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from freewheel.files import disk
from freewheel.files.outage import Outage, twice

BLOCK = 1 << 20  # bytes read at a time


class Lines:
    """Appends lines to a file. Lines that cannot be written wait in memory, and are written in order when possible.

    A partial line is cut off before the next write. If the file was removed, it is made again with all its lines.
    """

    def __init__(self, path: Path, say: Callable[[str], None], noun: str = "lines") -> None:
        """`noun` names the lines in messages."""
        self._path, self._outage, self._noun = path, Outage(str(path), say), noun
        self._waiting: deque[bytes] = deque()
        self._lost = 0  # lines that were dropped while they waited
        self._file: BinaryIO | None = None
        self._end = 0  # where the last whole line ends
        self._torn = False  # whether a partial line may follow
        self.catch_up()

    def __len__(self) -> int:
        """Return the number of lines that wait."""
        return len(self._waiting)

    @property
    def problem(self) -> str:
        """The lines that the file lacks, for people; empty: none."""
        missing = [f"{len(self._waiting)} {self._noun} are not written"] if self._waiting else []
        missing += [f"{self._lost} {self._noun} are lost"] if self._lost else []
        return f"{self._path}: {', '.join(missing)} ({self._outage.problem or 'written to again'})" if missing else ""

    def add(self, line: bytes) -> None:
        """Queue a line, which ends with a newline; `catch_up` writes it."""
        self._waiting.append(line)

    def lose_oldest(self) -> None:
        """Drop the oldest line that waits."""
        self._waiting.popleft()
        self._lost += 1

    def close(self) -> None:
        self.catch_up()
        if self._file is not None:
            with suppress(OSError):
                self._file.close()

    def catch_up(self) -> None:
        """Write the lines that wait, as far as possible."""
        waited = len(self._waiting)
        try:
            twice(self._drain)
        except OSError as error:
            self._outage.begins(error, f"{len(self._waiting)} {self._noun} wait")
        else:
            self._outage.ends(f"{waited} {self._noun} that waited are written" if waited else "")

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
        """Return the file at this path: the open one, or a new one with the same lines if that was removed."""
        before = self._file
        if before is not None:
            try:
                if os.path.samestat(os.fstat(before.fileno()), os.lstat(self._path)):
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
                disk.remove(self._path)  # else the next attempt would not copy the lines that it lacks
            raise
        if before is not None:
            before.close()
        self._file, self._end, self._torn = file, end, end < file.seek(0, os.SEEK_END)
        return file

    def _copy(self, before: BinaryIO, file: BinaryIO) -> None:
        """Copy the whole lines of a file that was removed."""
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
    """Return the position at which the last whole line ends."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - BLOCK)
        file.seek(start)
        if (newline := file.read(end - start).rfind(b"\n")) >= 0:
            return start + newline + 1
        end = start
    return 0
