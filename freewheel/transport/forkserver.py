"""Nursery: where worker processes are born, from a server that has numpy and the world's modules loaded and one thread each."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from typing import Any

from freewheel.rollout.child import ignore_interrupts, tie, without_main

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


class Leash:
    """A pipe that ends with this process: whoever is tied to it is killed by the kernel then."""

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
