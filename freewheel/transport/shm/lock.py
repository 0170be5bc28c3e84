"""A lock that dies with its holder: the kernel gives it back when a process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from multiprocessing import reduction
from types import TracebackType
from typing import Any

FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid


class ProcessLock:
    """One at a time over all processes it was sent to, and over the threads of each; whoever has it may take it again."""

    def __init__(self, *, descriptor: int | None = None) -> None:
        self._descriptor = os.memfd_create("freewheel-lock", os.MFD_CLOEXEC) if descriptor is None else descriptor
        self._here, self._depth = threading.RLock(), 0

    def __enter__(self) -> None:
        self._here.acquire()
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        except BaseException:  # an interrupt came while it waited
            self._here.release()
            raise
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def acquire(self, seconds: float) -> bool:
        """Try for this long: a holder may have been stopped in its tracks."""
        deadline = time.monotonic() + seconds
        if not self._here.acquire(timeout=seconds):
            return False
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                if time.monotonic() > deadline:
                    self._here.release()
                    return False
                time.sleep(50e-6)
            else:
                self._depth += 1
                return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        self._here.release()

    def holder(self) -> int | None:
        """The process that holds it, if another one does."""
        question = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(FLOCK, fcntl.fcntl(self._descriptor, fcntl.F_GETLK, question))
        return None if kind == fcntl.F_UNLCK else int(pid)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (reduction.DupFd(self._descriptor),)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _attach(descriptor: Any) -> ProcessLock:
    return ProcessLock(descriptor=descriptor.detach())
