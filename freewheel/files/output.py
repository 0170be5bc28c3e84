"""Standard output that cannot end a run: if nobody reads it any more, or the disk is full, the run goes on without it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from freewheel.errors import printable

WHITE = "\n\t"  # of reports of several lines


class LossyStream:
    """A text stream that gives up after the first error; then what is written to it is lost. `told`: standard error says so."""

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
        except (OSError, ValueError) as error:  # ValueError: somebody has closed it
            self._lost = True
            _give_up(self._stream, error, self._told)


def _give_up(stream: Any, error: OSError | ValueError, told: bool) -> None:
    discard_output(stream)
    if told and not isinstance(error, BrokenPipeError):  # a reader who leaves (| head) has seen enough
        complain(f"cannot print any more ({getattr(error, 'strerror', None) or error}); the run goes on without it")


def discard_output(stream: Any) -> None:
    """Redirect a stream to /dev/null: what is still buffered would fail again when Python exits, with exit code 120."""
    with suppress(OSError, ValueError, AttributeError):  # it may be no file
        number, nowhere = stream.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


def loading() -> None:
    """A line at once: what comes before the next one takes seconds to import. In a terminal the next line replaces it."""
    try:
        sys.stdout.write("loading ...\r" if sys.stdout.isatty() else "loading ...\n")
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        _give_up(sys.stdout, error, told=True)


def complain(text: str) -> None:
    """A line on standard error, if it can be written there."""
    try:
        sys.stderr.write(f"freewheel: {printable(text, WHITE)}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        discard_output(sys.stderr)


def fill_standard_streams() -> None:
    """Streams that were closed when the command was started (>&-) lead nowhere: else Python has none of them, and the next file
    that is opened takes their place and everything that is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with suppress(OSError):
                os.close(number)
            opened = os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, "w" if number else "r", encoding="utf-8", closefd=False))


def keep_printing_harmless() -> None:
    """In a child process: what an environment prints cannot be its failure. The parent tells that nothing is printed any more."""
    sys.stdout = LossyStream(sys.stdout, told=False)


@contextmanager
def lasting_output() -> Iterator[None]:
    """In this block errors of standard output end nothing."""
    before, sys.stdout = sys.stdout, LossyStream(sys.stdout)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = before
