"""Worker processes: forked from a server that has numpy and the world's modules loaded, one thread each, and dying with us."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from typing import Any

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
PRELOAD = ("freewheel.transport.shm.worker", "freewheel.transport.preload")
REBIRTH = 5.0  # seconds for a server that was killed to be replaced
_starting = threading.Lock()  # hiding the caller's script is for one thread at a time


def prepare(modules: Sequence[str] = ()) -> None:
    """Start the server, unless it runs; what it has loaded, no worker has to load."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*modules, *PRELOAD])
    # The server does not take over our sys.path before it loads (python/cpython#117378), and says nothing of what it missed.
    path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    with _starting, _environment(ONE_THREAD | {"PYTHONPATH": path}), without_main():
        forkserver.ensure_running()


class Lifeline:
    """A pipe that ends with this process: children that are tied to it are killed by the kernel then."""

    def __init__(self) -> None:
        self._held, self._other = os.pipe()

    def process(self, target: Callable[..., None], *args: Any, name: str) -> ForkServerProcess:
        """A process, not yet started, whose life hangs on this one's."""
        context = multiprocessing.get_context("forkserver")
        end = f"/proc/{os.getpid()}/fd/{self._held}"  # opened anew by every child: the kernel kills one owner a file
        return context.Process(target=_tied, args=(end, target, args), name=name)

    def close(self) -> None:
        os.close(self._held)
        os.close(self._other)


def start(process: ForkServerProcess) -> None:
    """Start it without running the caller's script again. The first one starts the server, unless that was prepared."""
    deadline = time.monotonic() + REBIRTH
    with _starting, _environment(ONE_THREAD), without_main():
        while True:
            try:
                return process.start()
            except (ConnectionError, EOFError):  # a server that was killed is not started anew before it is quite dead
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)


def _tied(end: str, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    ignore_interrupts()
    tie(os.open(end, os.O_RDONLY | os.O_NONBLOCK))
    target(*args)


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# -------------------------------------------------------------------------------------------- what every child does first


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
