"""What is used of multiprocessing and threading beyond what is documented. tests/transport/test_multiprocessing.py says which
version of Python has changed it."""

from __future__ import annotations

import atexit
import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker


def server_pid() -> int | None:
    """The process that forks children, if this process has started one."""
    pid: int | None = getattr(forkserver._forkserver, "_forkserver_pid", None)
    return pid


def tracker_pid() -> int | None:
    """The process that multiprocessing starts together with the server."""
    pid: int | None = getattr(resource_tracker._resource_tracker, "_pid", None)
    return pid


def kept_descriptors() -> set[int]:
    """What this process holds open for both."""
    found = (
        getattr(forkserver._forkserver, "_forkserver_alive_fd", None),
        getattr(resource_tracker._resource_tracker, "_fd", None),
    )
    return {descriptor for descriptor in found if descriptor is not None}


def has_temporary_folder() -> bool:
    """Whether multiprocessing.util.get_temp_dir() has been called here, or in the process that this one was forked from."""
    return vars(multiprocessing.current_process())["_config"].get("tempdir") is not None


def before_threads_end(call: Callable[[], None]) -> None:
    """Make a call when the interpreter ends, before threads are waited for; handlers of atexit come after that."""
    getattr(threading, "_register_atexit", atexit.register)(call)
