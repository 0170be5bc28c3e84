"""Child processes: forked from a server that has imported their modules, with one thread each, killed if this process dies."""

from __future__ import annotations

import fcntl
import gc
import json
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from freewheel.errors import SetupError
from freewheel.transport.clock import Limit, clock

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
PRELOAD = ("freewheel.transport.shm.worker", "freewheel.transport.preload")
PRELOADED = "FREEWHEEL_PRELOAD"  # the variable that tells preload.py what to import, and in how many seconds
PRELOAD_LIMIT = 20.0
TERMINAL = (signal.SIGINT, signal.SIGHUP)  # what a terminal sends to all its processes
RESTART_LIMIT = 5.0  # seconds to replace a server that was killed
_starting = threading.Lock()  # only one thread at a time may hide the caller's script


def prepare(modules: Sequence[str] = (), limit: float = PRELOAD_LIMIT) -> None:
    """Start the server unless it runs; children need not import again what it has imported. Modules that fail there or take
    longer than `limit` seconds are left out."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    with signals_blocked(signal.SIGHUP):  # which it inherits: a lost terminal must not end it
        resource_tracker.ensure_running()  # before the rest, because starting it unblocks interrupts
    with (
        _starting,
        _environment(_for_server() | {PRELOADED: json.dumps([min(limit, PRELOAD_LIMIT), *modules])}),
        without_main(),
        signals_blocked(*TERMINAL),
    ):
        forkserver.ensure_running()  # it inherits the block, and its children do until `ignore_interrupts`


def _for_server() -> dict[str, str]:
    """The server does not get our sys.path before it imports (python/cpython#117378)."""
    return ONE_THREAD | {"PYTHONPATH": os.pathsep.join(os.path.abspath(folder) for folder in sys.path)}


class Lifeline:
    """A pipe that closes when this process ends: the kernel then kills the children that are tied to it."""

    def __init__(self) -> None:
        self._held, self._other = os.pipe()

    def process(self, target: Callable[..., None], *args: Any, name: str) -> ForkServerProcess:
        """A process, not yet started, that is killed when this one ends."""
        context = multiprocessing.get_context("forkserver")
        end = f"/proc/{os.getpid()}/fd/{self._held}"  # every child opens it again: the kernel kills one owner per open file
        return context.Process(target=_tied, args=(end, target, args), name=name)

    def close(self) -> None:
        os.close(self._held)
        os.close(self._other)


def start(process: ForkServerProcess) -> None:
    """Start a process without running the caller's script again; starts the server if `prepare` was not called."""
    limit = Limit(RESTART_LIMIT)
    with _starting, _environment(_for_server()), without_main(), signals_blocked(*TERMINAL):
        while True:
            try:
                return process.start()
            except (ConnectionError, EOFError):  # a killed server is replaced only when it is dead
                if not limit.left:
                    raise
                time.sleep(0.01)


def _continue_server() -> None:
    """Let the server go on if it alone was stopped: without it no process starts, and nobody learns that one has ended."""
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    with suppress(OSError):
        if pid is not None and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            os.kill(pid, signal.SIGCONT)


clock.chores.append(_continue_server)


def _tied(end: str, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    ignore_interrupts()
    try:
        tie(os.open(end, os.O_RDONLY | os.O_NONBLOCK))
    except FileNotFoundError:  # the process that started this one has ended
        return
    target(*args)


def pickled(value: Any, what: str) -> bytes:
    """A value for another process; SetupError if that is impossible."""
    try:
        blob: bytes = cloudpickle.dumps(value)
    except Exception as error:
        reason = f"{what} cannot be pickled for another process ({error})"
        raise SetupError(f"{reason}: pass an importable factory") from error
    return blob


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


@contextmanager
def without_main() -> Iterator[None]:
    """Hide the caller's script while children start: they would run it again, and it may lack an `if __name__` guard."""
    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {name: vars(main)[name] for name in ("__file__", "__spec__") if name in vars(main)}
    vars(main).pop("__file__", None)
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(hidden)


@contextmanager
def signals_blocked(*numbers: signal.Signals) -> Iterator[None]:
    """Signals of these kinds that come to this thread are handled at the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts() -> None:
    """An interrupt or a hang-up reaches all processes of the terminal; only the parent handles it."""
    for number in TERMINAL:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINAL)


def freeze_heap() -> None:
    """Exclude all objects made so far from garbage collection, which would make steps slow."""
    gc.collect()
    gc.freeze()


def tie(descriptor: int) -> None:
    """Let the kernel kill this process when the other end of a pipe is closed, for example because its owner died.

    This works even if the process hangs. The descriptor is a read end that is never read. No other process may share the open
    file (open it again from /proc), because the kernel stores with the open file which process to kill.
    """
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    poller = select.poll()
    poller.register(descriptor, 0)
    if poller.poll(0):  # it was closed before the kernel began to watch it
        signal.raise_signal(signal.SIGKILL)
