"""A lock on a file: one process at a time holds it, and the kernel releases it when that process ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from freewheel.files.reach import opened

FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid


class HeldError(Exception):
    """The lock is held by another process, or by this one already; `pid` is the holder's id, 0 if it is unknown."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self.pid = pid


class FileLock:
    """A POSIX record lock. Children do not inherit it, so a process that an environment forks cannot keep it."""

    #: Locked files by device and inode, because the kernel grants a process a lock that it holds already.
    _held: ClassVar[set[tuple[int, int]]] = set()

    def __init__(self, path: Path) -> None:
        """Take the lock; raise HeldError if it is held, OSError if the file cannot be opened or locked."""
        with suppress(FileNotFoundError):  # before the file is opened, because closing it again would release the lock
            if _identity(path.lstat()) in self._held:
                raise HeldError(os.getpid())
        self._descriptor = opened(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            pid = _holder(self._descriptor) or 0
            os.close(self._descriptor)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            raise HeldError(pid) from None
        self._file = _identity(os.fstat(self._descriptor))
        self._held.add(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._held.discard(self._file)
        os.close(self._descriptor)

    @classmethod
    def holder(cls, path: Path) -> int | None:
        """Return the id of the process that holds the lock; 0: it cannot be seen from here; None: the lock is free."""
        with suppress(OSError):
            if _identity(path.lstat()) in cls._held:  # not opened, because closing it again would release the lock
                return os.getpid()
            descriptor = opened(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                return _holder(descriptor)
            finally:
                os.close(descriptor)
        return None


def _holder(descriptor: int) -> int | None:
    question = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = struct.unpack(FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, question))
    return None if kind == fcntl.F_UNLCK else int(pid)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
