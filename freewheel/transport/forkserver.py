"""Child processes: forked from a server that has imported their modules, with one thread each. Each leads a group, and is killed
with all that it has started, also if this process dies or the server is stopped."""

from __future__ import annotations

import faulthandler
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import connection, forkserver, resource_tracker, util
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import psutil

from freewheel.errors import SetupError
from freewheel.files import own_folders
from freewheel.files.output import keep_printing_harmless
from freewheel.transport._multiprocessing import has_temporary_folder, server_pid, tracker_pid
from freewheel.transport.clock import Limit, clock

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
PRELOAD = ("freewheel.transport.shm.worker", "freewheel.transport.preload")
PRELOADED = "FREEWHEEL_PRELOAD"  # the variable that tells preload.py what to import, and in how many seconds
PRELOAD_LIMIT = 20.0
TEMPORARY = (
    "FREEWHEEL_TEMPORARY"  # the variable with the process ID of the trainer, and the folder to remove if it is killed
)
TERMINAL = (signal.SIGINT, signal.SIGHUP)  # what a terminal sends to all its processes
RESTART_LIMIT = 5.0  # seconds to replace a server that was killed
SERVES_LIMIT = PRELOAD_LIMIT + 40.0  # seconds for its own imports and those that it was told to make
ORPHANED = 255  # the exit code if the forkserver has died: the process may still run
TOLD = 1.0  # seconds within which a forkserver says that a process has ended; one that does not has been stopped
KILLED = 10.0  # seconds within which the kernel ends a process that was killed, on a busy machine
_temporary: dict[str, int] = {}  # which process made a folder of temporary files
_starting = threading.Lock()  # only one thread at a time may hide the caller's script
_orphans: list[psutil.Process] = []  # what workers of servers that were killed have started: nothing else leads there


def prepare(modules: Sequence[str] = (), limit: float = PRELOAD_LIMIT) -> None:
    """Start the server unless it runs; children need not import again what it has imported. Modules that fail there or take
    longer than `limit` seconds are left out."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOAD))
    preload = {PRELOADED: json.dumps([min(limit, PRELOAD_LIMIT), *modules])}
    with _starting, environment(for_server() | preload), without_main():
        with signals_blocked(signal.SIGHUP):  # which it inherits: a lost terminal must not end it
            resource_tracker.ensure_running()  # before the rest, because starting it unblocks interrupts
        with signals_blocked(*TERMINAL):
            forkserver.ensure_running()  # it inherits the block, and its children do until `ignore_interrupts`


def for_server() -> dict[str, str]:
    """The server does not get our sys.path before it imports (python/cpython#117378); it knows our folder of temporary files."""
    return ONE_THREAD | own_folders.variables() | {TEMPORARY: f"{os.getpid()}:{_own_temporary()}"}


def _own_temporary() -> str:
    """The folder of temporary files of this process, which goes with it; "" if it has that of the process it was forked from."""
    if not has_temporary_folder():
        _temporary[util.get_temp_dir()] = os.getpid()
    folder = util.get_temp_dir()
    return folder if _temporary.get(folder) == os.getpid() else ""


class Lifeline:
    """A pipe that closes when this process ends: the kernel then kills the children that are tied to it."""

    def __init__(self) -> None:
        self._held, self._other = os.pipe()

    def process(self, target: Callable[..., None], *args: Any, name: str) -> ForkServerProcess:
        """A process, not yet started, that is killed when this one ends."""
        context = multiprocessing.get_context("forkserver")
        end = f"/proc/{os.getpid()}/fd/{self._held}"  # every child opens it again: the kernel kills one owner per open file
        return context.Process(target=_tied, args=(_Admitted(), end, target, args), name=name)

    def close(self) -> None:
        os.close(self._held)
        os.close(self._other)


def start(process: ForkServerProcess) -> None:
    """Start a process without running the caller's script again; starts the server if `prepare` was not called."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOAD))
    limit: Limit | None = None
    with _starting, environment(for_server()), without_main():
        while True:
            with signals_blocked(*TERMINAL):
                forkserver.ensure_running()
            wait_until_it_serves()
            try:
                with signals_blocked(*TERMINAL):  # half a process would complain
                    return process.start()
            except (ConnectionError, EOFError):  # a killed server is replaced only when it is dead
                limit = limit or Limit(RESTART_LIMIT)
                if not limit.left:
                    raise
                time.sleep(0.01)


def wait_until_it_serves() -> None:
    """Wait until the server has imported what it was told to; a signal may end that. It handles SIGCHLD from then on."""
    limit = Limit(SERVES_LIMIT)
    while True:
        try:
            status = Path(f"/proc/{server_pid()}/status").read_text()
        except OSError:  # it has ended, or there is no /proc
            return
        words = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        if int(words["SigCgt"], 16) >> (signal.SIGCHLD - 1) & 1 or words["State"].startswith("Z"):
            return
        if not limit.left:
            kill()
            raise SetupError("the server of child processes does not answer: does an import hang?")
        time.sleep(0.005)


def kill() -> None:
    """Kill the server; the next start of a process starts another."""
    pid = server_pid()
    if pid is not None:
        _orphans.extend(_descendants(pid))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def helpers() -> set[int]:
    """The server, and the process that multiprocessing starts beside it."""
    return {pid for pid in (server_pid(), tracker_pid()) if pid is not None}


def _continue_server() -> None:
    """Let the server go on if it alone was stopped: without it no process starts, and nobody learns that one has ended."""
    pid = server_pid()
    with suppress(OSError):
        if pid is not None and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1] == ["T"]:
            os.kill(pid, signal.SIGCONT)


clock.chores.append(_continue_server)


class _Admitted:
    """Restores what is admitted of the user's own, where it is unpickled: before what stands behind it."""

    def __reduce__(self) -> tuple[Callable[..., None], own_folders.State]:
        return own_folders.restore, own_folders.state()


def _tied(_: object, end: str, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    if lead_group(end):
        target(*args)


def lead_group(end: str) -> bool:
    """The beginning of a child process: it gets a group of its own, which dies with the process that holds this end of a pipe.
    False: that has ended already."""
    ignore_interrupts()
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # it may use the terminal as if it were in the group of its parent
    faulthandler.enable()
    keep_printing_harmless()
    try:
        tie(os.open(end, os.O_RDONLY | os.O_NONBLOCK))
    except FileNotFoundError:
        return False
    return True


def pickled(value: Any, what: str) -> bytes:
    """A value for another process; SetupError if that is impossible."""
    try:
        blob: bytes = cloudpickle.dumps(value)
    except Exception as error:
        reason = f"{what} cannot be pickled for another process ({error})"
        raise SetupError(f"{reason}: pass an importable factory") from error
    return blob


@contextmanager
def environment(changes: dict[str, str]) -> Iterator[None]:
    """Variables of this process, and of those that it starts, within the block."""
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
    """Let the kernel kill this process, and the group that it leads, when the other end of a pipe is closed, for example because
    its owner died.

    This works even if the process hangs. The descriptor is a read end that is never read. No other process may share the open
    file (open it again from /proc), because the kernel stores with the open file which process to kill.
    """
    pid = os.getpid()
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, -pid if os.getpgrp() == pid else pid)
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    poller = select.poll()
    poller.register(descriptor, 0)
    if poller.poll(0):  # it was closed before the kernel began to watch it
        signal.raise_signal(signal.SIGKILL)


def kill_group(pid: int) -> None:
    """Kill a process that leads a group, and all in its group, also after it has ended itself."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill_tree(pid: int) -> None:
    """Kill a process that leads a group, its group, and its descendants in other groups."""
    descendants = _descendants(pid)
    kill_group(pid)
    with suppress(ProcessLookupError):  # it has not come to lead a group yet
        os.kill(pid, signal.SIGKILL)
    _kill_each(descendants)


def _descendants(pid: int) -> list[psutil.Process]:
    """All that a process has started, directly or not, and that has not ended."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _kill_each(processes: Iterable[psutil.Process]) -> None:
    """Kill these processes; some may end meanwhile, which spares none of the others."""
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def has_ended(process: BaseProcess, seconds: float) -> bool:
    """Whether a process has ended within this time. Its forkserver, which has to tell how, is killed if it does not: others
    that it would tell of are then said to be orphaned."""
    if process.exitcode not in (None, ORPHANED):
        return True
    try:
        handle = os.pidfd_open(process.pid or 0)
    except ProcessLookupError:
        pass
    else:
        try:
            if not connection.wait([handle], seconds):
                return False
        finally:
            os.close(handle)
    if not Limit(TOLD).wait(partial(connection.wait, [process.sentinel])):
        kill()
    process.join(TOLD)
    return True


def end(processes: Sequence[BaseProcess], grace: float, after_term: float | None = None) -> list[int | None]:
    """Wait for processes to end by themselves, then send SIGTERM (unless after_term is None), then kill what is left of their
    groups; returns the exit codes."""
    left = _left(processes, grace)
    if after_term is not None:
        for process in left:
            process.terminate()
        left = _left(left, after_term)
    for process in processes:
        if process.exitcode == ORPHANED:
            _orphans.extend(_descendants(process.pid or 0))
        kill_group(process.pid or 0)
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process.pid or 0, signal.SIGKILL)
    _left(left, KILLED)
    codes = [process.exitcode for process in processes]
    for process, code in zip(processes, codes, strict=True):
        if code is not None:  # else the kernel cannot end it, because it waits for a device
            process.close()
    return codes


def _left(processes: Sequence[BaseProcess], seconds: float) -> list[BaseProcess]:
    """Those that have not ended after so many seconds."""
    limit = Limit(seconds)
    return [process for process in processes if not limit.wait(partial(has_ended, process))]


class Leftovers:
    """Finds the processes that environments have started in this process (from this thread) or in workers and not ended."""

    def __init__(self) -> None:
        self._thread = threading.get_native_id()
        self._others = self._children()  # which have nothing to do with environments
        self.kept: list[int] = []  # children of the server that end by themselves, with all that they have started

    @contextmanager
    def spared(self) -> Iterator[None]:
        """What is started in this block is not an environment's."""
        before = self._children()
        try:
            yield
        finally:
            self._others |= self._children() - before

    def kill(self) -> None:
        """Kill all that is left."""
        ours = helpers()
        started = self._children() - self._others - ours
        for pid in started:
            _kill_each(_descendants(pid))
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        kept = _trees(self.kept)
        for pid in ours:  # the forkserver is the parent of what workers have left behind, in groups of their own
            group = _group(pid)
            left = (process for process in _descendants(pid) if process.pid not in kept)
            _kill_each(process for process in left if _group(process.pid) not in (group, None))
        _kill_each(process for process in _orphans if process.pid not in kept)
        _orphans.clear()
        deadline = time.monotonic() + TOLD
        while started and time.monotonic() < deadline:
            started = {pid for pid in started if not _reaped(pid)}
            time.sleep(0.001)

    def _children(self) -> set[int]:
        """Processes that this thread has started."""
        try:
            return set(map(int, Path(f"/proc/self/task/{self._thread}/children").read_text().split()))
        except OSError:  # the kernel does not list them
            return {process.pid for process in psutil.Process().children()}


def _trees(pids: Sequence[int]) -> set[int]:
    """These processes and all that they have started."""
    return {*pids, *(process.pid for pid in pids for process in _descendants(pid))}


def _group(pid: int) -> int | None:
    """The process group; None: the process has ended."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True
