"""The undocumented parts of multiprocessing and threading in use. tests/transport/test_multiprocessing.py names a
version of Python that has changed them."""

from __future__ import annotations

import atexit
import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker


def server_pid() -> int | None:
    """Return the ID of the process that forks children, if this process has started one."""
    pid: int | None = getattr(forkserver._forkserver, "_forkserver_pid", None)
    return pid


def tracker_pid() -> int | None:
    """Return the ID of the process that multiprocessing starts together with the server."""
    pid: int | None = getattr(resource_tracker._resource_tracker, "_pid", None)
    return pid


def kept_descriptors() -> set[int]:
    """Return the descriptors that this process holds open for both."""
    found = (
        getattr(forkserver._forkserver, "_forkserver_alive_fd", None),
        getattr(resource_tracker._resource_tracker, "_fd", None),
    )
    return {descriptor for descriptor in found if descriptor is not None}


def has_temporary_folder() -> bool:
    """Return whether multiprocessing.util.get_temp_dir() was called here, or in the process that forked this one."""
    return vars(multiprocessing.current_process())["_config"].get("tempdir") is not None


def before_threads_end(call: Callable[[], None]) -> None:
    """Make a call when the interpreter ends, before it waits for threads; handlers of atexit run after that."""
    getattr(threading, "_register_atexit", atexit.register)(call)
