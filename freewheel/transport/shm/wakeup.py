"""Wakeup: wakes whoever waits in another process; rung without waiting, never lost, harmless when nobody listens."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from multiprocessing import reduction
from typing import Any

CROWD = 64  # listeners that can have a wakeup each


class Wakeup:
    """A counter in the kernel: rings before a wait count. One listener hears all rings at once; with `each`, every ring wakes
    one listener."""

    def __init__(self, *, each: bool = False, descriptor: int | None = None) -> None:
        flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC | (os.EFD_SEMAPHORE if each else 0)
        self._descriptor = os.eventfd(0, flags) if descriptor is None else descriptor
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)

    def notify(self, times: int = 1) -> None:
        try:
            os.eventfd_write(self._descriptor, times)
        except BlockingIOError:  # rung 2^64 times unheard: it rings already
            return

    def wait(self, seconds: float) -> bool:
        """Whether it rang within this time; hearing it silences it."""
        if not self._poll.poll(max(0.0, seconds) * 1000):
            return False
        try:
            os.eventfd_read(self._descriptor)
        except BlockingIOError:  # somebody else heard it
            return False
        return True

    def fileno(self) -> int:
        return self._descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (reduction.DupFd(self._descriptor),)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Wakeups:
    """A wakeup for every listener. Where one listener's ring could wake another, that one would go on sleeping; only in a crowd,
    since a process can be sent so many descriptors and no more, do some share a wakeup."""

    def __init__(self, listeners: int) -> None:
        self._wakeups = [Wakeup(each=listeners > CROWD) for _ in range(min(listeners, CROWD))]

    def __getitem__(self, listener: int) -> Wakeup:
        return self._wakeups[listener % CROWD]

    def notify(self, listeners: Iterable[int]) -> None:
        for listener in listeners:
            self[listener].notify()

    def close(self) -> None:
        for wakeup in self._wakeups:
            wakeup.close()


def _attach(descriptor: Any) -> Wakeup:
    return Wakeup(descriptor=descriptor.detach())
