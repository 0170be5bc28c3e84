"""Run a local Ray cluster that lives as long as the process that started this one.

`python -m freewheel_ray.actors.local_cluster PID CPUS BYTES` starts Ray on the loopback device and prints the address. Then it
waits until its standard input is closed, or until its parent process or a vital process of the cluster has ended for any reason.
Finally it kills every process that the cluster has started and removes the cluster's folder. On Linux every orphan among its
descendants becomes its child, so no process escapes. It does not import ray, or anything else that can hang.

With FOLDER instead of PID it starts the single node of the cluster and prints its address. `ray start --head` is not used,
because it would also start a server for clients (`ray://`) on a fixed port, and it has no option to prevent that.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from freewheel.files.own_folders import python

PR_SET_CHILD_SUBREAPER = 36  # an option of Linux's prctl
LONGEST_FOLDER = 40  # characters; the path of a socket in the folder may have at most 107
SERVES = 60.0  # seconds that Ray has to start, also on a busy machine
ENDS = 10.0  # seconds that the kernel has to end the killed processes
VITAL = ("gcs_server", "raylet")  # a cluster of one node cannot work without these processes
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # stops Ray from replacing the address 127.0.0.1
#: Variables that may belong to another cluster.
FOREIGN = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_REDIS_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_TMPDIR")


class StartedCluster(NamedTuple):
    """The address of the cluster that was started, or the error."""

    address: str
    folder: str
    error: str = ""


def token_file(folder: str | Path) -> Path:
    return Path(folder) / "token"


def with_token(folder: str | Path) -> dict[str, str]:
    """Return the environment variables with which Ray's processes and their clients use this cluster's token."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file(folder))}


def main(words: Sequence[str]) -> int:
    first = words[0]
    cpus, store = int(words[1]), int(words[2])
    return keep(int(first), cpus, store) if first.isdecimal() else start_node(first, cpus, store)


def keep(parent: int, cpus: int, store: int) -> int:
    """Run the cluster until the parent no longer needs it."""
    for number in (signal.SIGINT, signal.SIGHUP):  # the terminal sends these; the parent handles them
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    watched = _watched(parent)
    if not watched:
        return 0
    folder = make_folder()
    try:
        sys.stdout.write(json.dumps(_start(folder, cpus, store, watched)) + "\n")
        sys.stdout.flush()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets orphans that have ended
        select.select([*watched, *_vital()], [], [])
    except (BrokenPipeError, _ParentEndedError):
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_all(folder, descendants=True)
    return 0


class _ParentEndedError(Exception):
    pass


def _watched(parent: int) -> list[int]:
    """Return descriptors that become readable when the parent closes our standard input or ends; none if it has ended."""
    watched = [sys.stdin.fileno()]
    try:
        watched.append(os.pidfd_open(parent))
    except ProcessLookupError:
        return []
    except (OSError, AttributeError):  # an old kernel, or not Linux
        pass
    return watched if os.getppid() == parent else []


def _vital() -> list[int]:
    """Return descriptors that become readable when a vital process ends. Ray itself takes a minute to notice a lost head."""
    with suppress(psutil.Error, OSError, AttributeError):
        return [os.pidfd_open(one.pid) for one in psutil.Process().children() if one.name() in VITAL]
    return []


def make_folder() -> str:
    """Create a folder that only this user can enter, and write a new token into it."""
    place = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="fw-ray-", dir=place if len(place) <= LONGEST_FOLDER else "/tmp")
    descriptor = os.open(token_file(folder), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    return folder


def _start(folder: str, cpus: int, store: int, watched: Sequence[int]) -> StartedCluster:
    environment = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    environment |= with_token(folder) | LOOPBACK | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    place = f"{folder}/r"  # Ray makes its folder accessible to everybody
    head = [*python("freewheel_ray.actors.local_cluster"), place, str(cpus), str(store)]
    printed, log = Path(folder) / "address", Path(folder) / "start.log"
    with printed.open("wb") as out, log.open("wb") as err:
        ray = subprocess.Popen(head, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
    deadline = time.monotonic() + SERVES
    while ray.poll() is None and time.monotonic() < deadline:
        if select.select(watched, [], [], 0.05)[0]:
            raise _ParentEndedError
    if ray.poll() == 0:
        return StartedCluster(printed.read_text().split()[-1], folder)
    lines = log.read_text(errors="replace").split("\n")
    why = next((line for line in reversed(lines) if line.strip()), "it printed no error")
    return StartedCluster("", folder, f"it does not answer within {SERVES:g} s" if ray.poll() is None else why)


def start_node(folder: str, cpus: int, store: int) -> int:
    """Start the single node of the cluster. Runs in a separate process."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    parameters = RayParams(
        node_ip_address="127.0.0.1",
        num_cpus=cpus,
        object_store_memory=store,
        temp_dir=folder,
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
    )
    node = Node(parameters, head=True, shutdown_at_exit=False, spawn_reaper=False)
    sys.stdout.write(f"{node.address}\n")
    return 0


def end_all(folder: str, *, descendants: bool) -> None:
    """Kill every process of the cluster in this folder, including those that start meanwhile, and remove the folder.

    With `descendants`, all descendants of this process belong to the cluster. Otherwise only the processes that Ray has started
    with this folder are found.
    """
    deadline = time.monotonic() + ENDS
    while (left := _members(folder, descendants)) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, 0.1)
    shutil.rmtree(folder, ignore_errors=True)


def _members(folder: str, descendants: bool) -> list[psutil.Process]:
    found = set(psutil.Process().children(recursive=True)) if descendants else set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            if any(folder in word for word in words) and any("/ray/" in word for word in words):
                found.add(process)
    return [process for process in found if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
