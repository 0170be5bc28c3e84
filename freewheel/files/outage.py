"""A place that cannot be written to for a while: the training continues, and one message reports it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Out = TypeVar("Out")


class Outage:
    """The state of a place to write to. One message says that it cannot be written to, one that it can again."""

    def __init__(self, place: str, say: Callable[[str], None]) -> None:
        self._place, self._say = place, say
        self.error: OSError | None = None  # of the last attempt; None: it succeeded

    @property
    def problem(self) -> str:
        """The problem, in one line; empty: none."""
        return "" if self.error is None else f"cannot write to {self._place}: {reason(self.error)}"

    def begins(self, error: OSError, meanwhile: str = "") -> None:
        """Note that an attempt has failed; `meanwhile`: what happens to the unwritten data."""
        first, self.error = self.error is None, error
        if first:
            self._say("; ".join(filter(None, [self.problem, f"training continues{meanwhile and f', {meanwhile}'}"])))

    def ends(self, after: str = "") -> None:
        """Note that an attempt has succeeded; `after`: what has been written late."""
        if self.error is not None:
            self.error = None
            self._say(f"{self._place} can be written to again{after and f', {after}'}")

    @contextmanager
    def noted(self, meanwhile: str = "") -> Iterator[None]:
        """Note whether the writes in this block fail or succeed."""
        try:
            yield
        except OSError as error:
            self.begins(error, meanwhile)
        else:
            self.ends()


def reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def twice(write: Callable[[], Out]) -> Out:
    """Try a write, and once more if it fails, so that a single fault of a disk costs nothing."""
    try:
        return write()
    except OSError:
        return write()
