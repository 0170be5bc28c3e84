"""Child processes, forked with one thread each from a server that has imported their modules. Each leads a process
group, and is killed with everything that it has started, even if this process dies or the server is stopped."""

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
from freewheel.files.stdout import keep_printing_harmless
from freewheel.transport._multiprocessing import has_temporary_folder, server_pid, tracker_pid
from freewheel.transport.clock import Limit, clock

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
PRELOAD = ("freewheel.transport.shm.worker", "freewheel.transport.preload")
PRELOADED = "FREEWHEEL_PRELOAD"  # the variable with the seconds and the modules for the imports of preload.py
PRELOAD_LIMIT = 20.0
TEMPORARY = "FREEWHEEL_TEMPORARY"  # the variable with the trainer's process ID and the folder to remove if it is killed
TERMINAL = (signal.SIGINT, signal.SIGHUP)  # the signals that a terminal sends to all its processes
RESTART_LIMIT = 5.0  # seconds to replace a server that was killed
SERVES_LIMIT = PRELOAD_LIMIT + 40.0  # seconds for all imports of the server
ORPHANED = 255  # the exit code if the forkserver has died: the process may still run
TOLD = 1.0  # seconds: a forkserver that takes longer to report the end of a process must have been stopped
KILLED = 10.0  # seconds within which the kernel ends a killed process, on a busy machine
_temporary: dict[str, int] = {}  # which process made each folder of temporary files
_starting = threading.Lock()  # only one thread at a time may hide the caller's script
_orphans: list[psutil.Process] = []  # started by workers of killed servers: only this list still leads to them


def prepare(modules: Sequence[str] = (), limit: float = PRELOAD_LIMIT) -> None:
    """Start the server unless it runs; its children need not repeat its imports. It skips modules that fail or exceed
    `limit` seconds."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOAD))
    preload = {PRELOADED: json.dumps([min(limit, PRELOAD_LIMIT), *modules])}
    with _starting, environment(for_server() | preload), without_main():
        with signals_blocked(signal.SIGHUP):  # the tracker inherits this: a lost terminal must not end it
            resource_tracker.ensure_running()  # before the rest, because starting it unblocks interrupts
        with signals_blocked(*TERMINAL):
            forkserver.ensure_running()  # it inherits the block; so do its children, until `ignore_interrupts`


def for_server() -> dict[str, str]:
    """Return the server's variables. They carry our sys.path, which its imports lack (python/cpython#117378)."""
    return ONE_THREAD | own_folders.variables() | {TEMPORARY: f"{os.getpid()}:{_own_temporary()}"}


def _own_temporary() -> str:
    """Return the temporary folder of this process; "" if it belongs to the process that forked this one."""
    if not has_temporary_folder():
        _temporary[util.get_temp_dir()] = os.getpid()
    folder = util.get_temp_dir()
    return folder if _temporary.get(folder) == os.getpid() else ""


class Lifeline:
    """A pipe that closes when this process ends: the kernel then kills the children that are tied to it."""

    def __init__(self) -> None:
        self._held, self._other = os.pipe()

    def process(self, target: Callable[..., None], *args: Any, name: str) -> ForkServerProcess:
        """Return a process, not yet started, that is killed when this one ends."""
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
                with signals_blocked(*TERMINAL):  # a process that is started halfway would print an error
                    return process.start()
            except (ConnectionError, EOFError):  # a killed server is replaced only when it is dead
                limit = limit or Limit(RESTART_LIMIT)
                if not limit.left:
                    raise
                time.sleep(0.01)


def wait_until_it_serves() -> None:
    """Wait until the server has made its imports: from then on it handles SIGCHLD. A signal may end the wait."""
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
    """Kill the server; the next start of a process starts another server."""
    pid = server_pid()
    if pid is not None:
        _orphans.extend(_descendants(pid))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def helpers() -> set[int]:
    """Return the IDs of the server and of the process that multiprocessing starts with it."""
    return {pid for pid in (server_pid(), tracker_pid()) if pid is not None}


def _continue_server() -> None:
    """Continue the server if only it was stopped: without it, no process starts and no process end is reported."""
    pid = server_pid()
    with suppress(OSError):
        if pid is not None and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1] == ["T"]:
            os.kill(pid, signal.SIGCONT)


clock.chores.append(_continue_server)


class _Admitted:
    """Admits the user's module folders when it is unpickled, before the objects that follow it are unpickled."""

    def __reduce__(self) -> tuple[Callable[..., None], own_folders.State]:
        return own_folders.restore, own_folders.state()


def _tied(_: object, end: str, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    if lead_group(end):
        target(*args)


def lead_group(end: str) -> bool:
    """Begin a child process: it leads a new group, which dies with the process that holds this pipe. Return False if
    that process has already ended."""
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
    """Pickle a value for another process; SetupError if that is impossible."""
    try:
        blob: bytes = cloudpickle.dumps(value)
    except Exception as error:
        reason = f"{what} cannot be pickled for another process ({error})"
        raise SetupError(f"{reason}: pass an importable factory") from error
    return blob


@contextmanager
def environment(changes: dict[str, str]) -> Iterator[None]:
    """Set variables of this process, and of processes that it starts, within the block."""
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
    """Delay signals of these kinds to this thread until the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts() -> None:
    """Ignore interrupts and hang-ups, which reach all processes of the terminal: only the parent handles them."""
    for number in TERMINAL:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINAL)


def freeze_heap() -> None:
    """Exclude all objects made so far from garbage collection, which would make steps slow."""
    gc.collect()
    gc.freeze()


def tie(descriptor: int) -> None:
    """Let the kernel kill this process, and the group that it leads, when the other end of a pipe is closed, for example
    because its owner died.

    This works even if the process hangs. The descriptor is a read end that is never read. No other process may share the
    open file (open it again from /proc), because the kernel stores with the open file which process to kill.
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
    """Kill a process that leads a group, and its whole group, even if the process has already ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill_tree(pid: int) -> None:
    """Kill a process that leads a group, its group, and its descendants in other groups."""
    descendants = _descendants(pid)
    kill_group(pid)
    with suppress(ProcessLookupError):  # it may not lead a group yet
        os.kill(pid, signal.SIGKILL)
    _kill_each(descendants)


def _descendants(pid: int) -> list[psutil.Process]:
    """Return all living descendants of a process."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _kill_each(processes: Iterable[psutil.Process]) -> None:
    """Kill these processes, of which some may end meanwhile."""
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def has_ended(process: BaseProcess, seconds: float) -> bool:
    """Return whether a process ends within this time. A forkserver that does not report how is killed; the other
    processes that it has started then count as orphaned."""
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
    """Wait for processes to end by themselves, then send SIGTERM (unless after_term is None), then kill the rest of
    their groups. Return the exit codes."""
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
        if code is not None:  # otherwise the kernel cannot end it: it waits for a device
            process.close()
    return codes


def _left(processes: Sequence[BaseProcess], seconds: float) -> list[BaseProcess]:
    """Return the processes that have not ended after this many seconds."""
    limit = Limit(seconds)
    return [process for process in processes if not limit.wait(partial(has_ended, process))]


class Leftovers:
    """Finds processes that environments have started, in this thread or in workers, and have not ended."""

    def __init__(self) -> None:
        self._thread = threading.get_native_id()
        self._others = self._children()  # not started by environments
        self.kept: list[int] = []  # children of the server that end by themselves, with their descendants

    @contextmanager
    def spared(self) -> Iterator[None]:
        """Note that processes started in this block belong to no environment."""
        before = self._children()
        try:
            yield
        finally:
            self._others |= self._children() - before

    def kill(self) -> None:
        """Kill all leftover processes."""
        ours = helpers()
        started = self._children() - self._others - ours
        for pid in started:
            _kill_each(_descendants(pid))
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        kept = _trees(self.kept)
        for pid in ours:  # the forkserver is the parent of processes that workers left behind, in other groups
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
        """Return the processes that this thread has started."""
        try:
            return set(map(int, Path(f"/proc/self/task/{self._thread}/children").read_text().split()))
        except OSError:  # the kernel does not list them
            return {process.pid for process in psutil.Process().children()}


def _trees(pids: Sequence[int]) -> set[int]:
    """Return these processes and all their descendants."""
    return {*pids, *(process.pid for pid in pids for process in _descendants(pid))}


def _group(pid: int) -> int | None:
    """Return the process group; None if the process has ended."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True
