"""What every child process of ours does first: leave interrupts and the caller's script alone, die with its parent, settle."""

from __future__ import annotations

import fcntl
import gc
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_main() -> Iterator[None]:
    """Hide the caller's script while children start: they would run it again, and it may have no `if __name__` guard."""
    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {name: vars(main)[name] for name in ("__file__", "__spec__") if name in vars(main)}
    vars(main).pop("__file__", None)
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(hidden)


def ignore_interrupts() -> None:
    """An interrupt reaches the whole family; it is for the parent to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def settle() -> None:
    """Warmed up: what is there by now stays, and no garbage collection, which is what makes steps slow, looks at it again."""
    gc.collect()
    gc.freeze()


def tie(descriptor: int) -> None:
    """Have the kernel kill this process when the other end of a pipe is let go, by its holder's death for instance.

    So it ends even if it hangs. The descriptor is the read end, which nobody reads; it is this process's own (opened anew
    from /proc, or of a pipe that no other child is tied to), because whom to kill is remembered with the open file.
    """
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    poller = select.poll()
    poller.register(descriptor, 0)
    if poller.poll(0):  # it was let go before the kernel was asked to watch it
        signal.raise_signal(signal.SIGKILL)
