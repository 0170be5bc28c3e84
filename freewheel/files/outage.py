"""A place that cannot be written to for a while: the training goes on, and is told of it once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Out = TypeVar("Out")


class Outage:
    """Whether a place can be written to at present. One message says that it cannot, one that it can again."""

    def __init__(self, place: str, say: Callable[[str], None]) -> None:
        self._place, self._say = place, say
        self.error: OSError | None = None  # of the last attempt; None: it went well

    @property
    def problem(self) -> str:
        """What is wrong, in one line; empty: nothing."""
        return "" if self.error is None else f"cannot write to {self._place}: {reason(self.error)}"

    def begins(self, error: OSError, meanwhile: str = "") -> None:
        """An attempt has failed; `meanwhile`: what becomes of what was to be written."""
        first, self.error = self.error is None, error
        if first:
            self._say("; ".join(filter(None, [self.problem, f"training goes on{meanwhile and f', {meanwhile}'}"])))

    def ends(self, after: str = "") -> None:
        """An attempt has succeeded; `after`: what it has caught up with."""
        if self.error is not None:
            self.error = None
            self._say(f"{self._place} can be written to again{after and f', {after}'}")

    @contextmanager
    def noted(self, meanwhile: str = "") -> Iterator[None]:
        """What this block writes may fail."""
        try:
            yield
        except OSError as error:
            self.begins(error, meanwhile)
        else:
            self.ends()


def reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def twice(write: Callable[[], Out]) -> Out:
    """Once more if it fails: a single fault of a disk costs nothing."""
    try:
        return write()
    except OSError:
        return write()
