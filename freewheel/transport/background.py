"""Calls in a separate thread, for code that may be slow or never return: the caller does not wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic


class BackgroundCalls:
    """Makes calls one after the other. At most `limit` calls wait; further ones are refused."""

    def __init__(self, name: str, limit: int) -> None:
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue(limit)
        self._abandoned = False
        self._thread = threading.Thread(target=self._serve, name=f"freewheel-{name}", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], object]) -> bool:
        """Queue a call, which must not raise. Return whether there was room for it."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            return False
        return True

    def close(self, last: Callable[[], object], patience: float) -> bool:
        """Make this the last call. Return whether all calls end within `patience` seconds. Otherwise the thread is left
        behind and ends when its present call returns."""
        until = monotonic() + patience
        with suppress(queue.Full):
            for call in (last, None):
                self._calls.put(call, timeout=max(0.0, until - monotonic()))
            self._thread.join(max(0.0, until - monotonic()))
        self._abandoned = self._thread.is_alive()
        return not self._abandoned

    def _serve(self) -> None:
        while not self._abandoned and (call := self._calls.get()) is not None:
            call()


class RepeatedCall:
    """Repeats a call, which must not raise, with pauses of `every` seconds until it is closed."""

    def __init__(self, name: str, call: Callable[[], object], every: float) -> None:
        self._call, self._every, self._over = call, every, threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"freewheel-{name}", daemon=True)
        self._thread.start()

    def close(self, patience: float) -> bool:
        """Return whether the last call ends within `patience` seconds. Otherwise the thread is left to end with it."""
        self._over.set()
        self._thread.join(patience)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while not self._over.is_set():
            self._call()
            self._over.wait(self._every)
