"""Standard output that cannot end a run: if nobody reads it any more, or the disk is full, the run goes on without it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


class Output:
    """A text stream that gives up after the first error; then what is written to it is lost."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._lost = stream, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], Any]) -> None:
        if self._lost:
            return
        try:
            action()
        except OSError as error:
            self._lost = True
            _give_up(error)


def _give_up(error: OSError) -> None:
    with suppress(OSError):  # what is still buffered goes nowhere, instead of failing again at the end
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
    if not isinstance(error, BrokenPipeError):  # a reader who leaves (| head) has seen enough
        with suppress(OSError):
            sys.stderr.write(f"freewheel: cannot print any more ({error.strerror}); the run goes on without it\n")


@contextmanager
def lasting_output() -> Iterator[None]:
    """In this block errors of standard output end nothing."""
    before, sys.stdout = sys.stdout, Output(sys.stdout)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = before
