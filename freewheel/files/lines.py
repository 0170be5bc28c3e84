"""A file of lines that others read while it grows, whole whatever the disk does."""

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
    """Lines that cannot be written wait in memory and are written, in order, as soon as it is possible.

    Half a line is cut off before anything else is written. If the file was removed, it is made again with all its lines.
    """

    def __init__(self, path: Path, say: Callable[[str], None], noun: str = "lines") -> None:
        """noun: what the lines are, for messages."""
        self._path, self._outage, self._noun = path, Outage(str(path), say), noun
        self._waiting: deque[bytes] = deque()
        self._lost = 0  # that waited in vain
        self._file: BinaryIO | None = None
        self._end = 0  # where the last whole line ends
        self._torn = False  # there may be something after it
        self.catch_up()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def problem(self) -> str:
        """What the file lacks; empty: nothing."""
        missing = [f"{len(self._waiting)} {self._noun} are not written"] if self._waiting else []
        missing += [f"{self._lost} {self._noun} are lost"] if self._lost else []
        return f"{self._path}: {', '.join(missing)} ({self._outage.problem or 'written to again'})" if missing else ""

    def add(self, line: bytes) -> None:
        """To be written by `catch_up`; it ends with a newline."""
        self._waiting.append(line)

    def lose_oldest(self) -> None:
        """Of those that wait."""
        self._waiting.popleft()
        self._lost += 1

    def close(self) -> None:
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
        """The file of this path: the one that is open, or where that was removed a new one with the same lines."""
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
