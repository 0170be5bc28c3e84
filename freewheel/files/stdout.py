"""Standard output that cannot end a run: if its reader is gone or the disk is full, the run continues without it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from freewheel.errors import printable

WHITE = "\n\t"  # white space in reports of several lines


class LossyStream:
    """A text stream that drops everything after its first error. `told`: the error is reported on standard error."""

    def __init__(self, stream: Any, *, told: bool = True) -> None:
        self._stream, self._lost, self._told = stream, False, told

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
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self._lost = True
            _give_up(self._stream, error, self._told)


def _give_up(stream: Any, error: OSError | ValueError, told: bool) -> None:
    discard_output(stream)
    if told and not isinstance(error, BrokenPipeError):  # a reader (| head) may stop reading on purpose
        complain(f"cannot print any more ({getattr(error, 'strerror', None) or error}); the run continues without it")


def discard_output(stream: Any) -> None:
    """Redirect a stream to /dev/null: else its buffer would fail again when Python exits, which gives exit code 120."""
    with suppress(OSError, ValueError, AttributeError):  # the stream may not be a file
        number, nowhere = stream.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


def loading() -> None:
    """Print a line at once, because imports delay the next one by seconds. In a terminal the next line replaces it."""
    try:
        sys.stdout.write("loading ...\r" if sys.stdout.isatty() else "loading ...\n")
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        _give_up(sys.stdout, error, told=True)


def complain(text: str) -> None:
    """Print a line on standard error, if that is possible."""
    try:
        sys.stderr.write(f"freewheel: {printable(text, WHITE)}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        discard_output(sys.stderr)


def fill_standard_streams() -> None:
    """Open streams that were closed when the command was started (>&-) on /dev/null. Otherwise the next file that is
    opened takes the number of such a stream, and receives everything that is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with suppress(OSError):
                os.close(number)
            opened = os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, "w" if number else "r", encoding="utf-8", closefd=False))


def keep_printing_harmless() -> None:
    """Make errors of printing harmless to an environment in a child process. The parent reports lost output."""
    sys.stdout = LossyStream(sys.stdout, told=False)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Keep errors of standard output from ending this block."""
    before, sys.stdout = sys.stdout, LossyStream(sys.stdout)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = before
