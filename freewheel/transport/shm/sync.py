"""Synchronisation between processes: a lock that is released when its holder dies, and wakeups that are never lost."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import threading
import time
from collections.abc import Iterable
from multiprocessing import reduction
from types import TracebackType
from typing import Any

from freewheel.transport.clock import Limit

FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid


class ProcessLock:
    """A reentrant lock, shared by all processes that it was sent to and by their threads."""

    def __init__(self, *, descriptor: int | None = None) -> None:
        self._descriptor = os.memfd_create("freewheel-lock", os.MFD_CLOEXEC) if descriptor is None else descriptor
        self._here, self._depth = threading.RLock(), 0

    def __enter__(self) -> None:
        self._here.acquire()
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        except BaseException:  # an interrupt ended the wait
            self._here.release()
            raise
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def acquire(self, seconds: float) -> bool:
        """Try for this many seconds, because the holder may be stopped. Return whether it succeeded."""
        limit = Limit(seconds)
        if not self._here.acquire(timeout=seconds):
            return False
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                if not limit.left:
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
        """Return the ID of another process that holds the lock, if any."""
        question = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(FLOCK, fcntl.fcntl(self._descriptor, fcntl.F_GETLK, question))
        return None if kind == fcntl.F_UNLCK else int(pid)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach_lock, (reduction.DupFd(self._descriptor),)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _attach_lock(descriptor: Any) -> ProcessLock:
    return ProcessLock(descriptor=descriptor.detach())


LISTENERS = 64  # the most wakeups; more listeners share them


class Wakeup:
    """A counter in the kernel, which keeps notifications that come before a wait. A wait consumes all of them; with
    `each`, it consumes one."""

    def __init__(self, *, each: bool = False, descriptor: int | None = None) -> None:
        flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC | (os.EFD_SEMAPHORE if each else 0)
        self._descriptor = os.eventfd(0, flags) if descriptor is None else descriptor
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)

    def notify(self, times: int = 1) -> None:
        try:
            os.eventfd_write(self._descriptor, times)
        except BlockingIOError:  # the counter is full, so a wait ends anyway
            return

    def wait(self, seconds: float) -> bool:
        """Return whether a notification came within this time, and consume it."""
        if not self._poll.poll(max(0.0, seconds) * 1000):
            return False
        try:
            os.eventfd_read(self._descriptor)
        except BlockingIOError:  # another listener consumed it
            return False
        return True

    def fileno(self) -> int:
        return self._descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach_wakeup, (reduction.DupFd(self._descriptor),)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Wakeups:
    """A wakeup for every listener. A process can receive a limited number of descriptors, so more than LISTENERS
    listeners share wakeups. One notification then ends one wait."""

    def __init__(self, listeners: int) -> None:
        self._wakeups = [Wakeup(each=listeners > LISTENERS) for _ in range(min(listeners, LISTENERS))]
        self._listeners = listeners

    def __getitem__(self, listener: int) -> Wakeup:
        return self._wakeups[listener % LISTENERS]

    def notify(self, listeners: Iterable[int]) -> None:
        """Wake these listeners and all that share their wakeups: otherwise only the wrong one might wake up."""
        for first in {listener % LISTENERS for listener in listeners}:
            self[first].notify(len(range(first, self._listeners, LISTENERS)))

    def close(self) -> None:
        for wakeup in self._wakeups:
            wakeup.close()


def _attach_wakeup(descriptor: Any) -> Wakeup:
    return Wakeup(descriptor=descriptor.detach())
