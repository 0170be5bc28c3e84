"""A disk that fails: the calls of freewheel.files.disk, made to raise by number."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import pytest

from freewheel.files import disk

CALLS = ("open_end", "append", "cut", "write", "make_folder", "rename", "link", "copy", "point", "sync", "remove")


class FailingDisk:
    """Counts the calls that change a run directory, and lets those whose numbers are in `failing` raise this error.

    `torn`: a call that fails to append or to write leaves half of its data behind, as a disk that fills up does.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, torn: bool = True) -> None:
        self.calls = 0
        self.failing: Container[int] = ()
        self.error, self._torn = errno.ENOSPC, torn
        self.log: list[str] = []  # what was called, in order
        for name in CALLS:
            if hasattr(disk, name):
                monkeypatch.setattr(disk, name, self._wrapped(name, getattr(disk, name)))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            number, self.calls = self.calls, self.calls + 1
            self.log.append(name)
            if number not in self.failing:
                return real(*args, **kwargs)
            if self._torn and name == "append":
                real(args[0], args[1][: len(args[1]) // 2])
            if self._torn and name == "write" and isinstance(args[1], bytes):
                Path(args[0]).write_bytes(args[1][: len(args[1]) // 2])
            raise OSError(self.error, os.strerror(self.error))

        return call
