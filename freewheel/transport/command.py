"""Commands of this program in separate processes, which get SIGTERM when this process ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from freewheel.files import disk
from freewheel.files.own_folders import python
from freewheel.files.reach import typed

PR_SET_PDEATHSIG = 1  # of Linux's prctl
LEAVE_WITHIN = 5.0  # seconds for threads and exit handlers of imported modules after a command has done its work


def start(module: str, argv: Sequence[str], output: Path, pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE PID ARGV...` with its output in a file. The module passes PID on to `end_with`.

    The command leads a new session: signals of the terminal reach it only through this process, once.
    """
    words = [*python(module), str(os.getpid()), *argv]
    with disk.begin(typed(output.parent) / output.name) as file:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=pass_fds,
        )


def start_with_line(module: str, output: Path) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start `python -m MODULE PID FD` and open a line to it, for bytes. The module passes FD on to `line_to_parent`."""
    ours, theirs = Pipe()
    with theirs:
        return start(module, [str(theirs.fileno())], output, [theirs.fileno()]), ours


def line_to_parent(descriptor: str) -> Connection:
    """Return the other end of the line."""
    return Connection(int(descriptor))


def end_with(parent: int) -> None:
    """Let the kernel send SIGTERM to this process when its parent ends, however the parent ends."""
    with suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent ended before the kernel began to watch it
        signal.raise_signal(signal.SIGTERM)


def leave_soon(code: int) -> None:
    """End this process with this exit code, at the latest in LEAVE_WITHIN seconds: the command has done its work. Until
    then, threads and exit handlers of imported modules may finish."""

    def leave() -> None:
        time.sleep(LEAVE_WITHIN)
        main = threading.main_thread()
        threads = [one.name for one in threading.enumerate() if not (one.daemon or one is main)]
        what = f"the thread '{threads[0]}'" if threads else "an exit handler"
        told = f"freewheel: {what} of an imported module did not end within {LEAVE_WITHIN:g} s; it is left behind\n"
        with suppress(OSError):
            os.write(2, told.encode(errors="backslashreplace"))
        os._exit(code)

    threading.Thread(target=leave, name="freewheel-leaves", daemon=True).start()
