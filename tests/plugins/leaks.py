"""Every test is checked for what it leaves behind: processes, threads, file descriptors and shared memory."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from freewheel.transport._multiprocessing import kept_descriptors

#: Every process started from here carries this, so that orphans are found too.
MARK, RUN = "FREEWHEEL_TEST_RUN", f"{os.getpid()}-{time.time_ns()}"
os.environ[MARK] = RUN

SHARED_MEMORY = Path("/dev/shm")
#: Python's own helpers; they live until the interpreter ends.
HELPERS = ("from multiprocessing.forkserver import main", "from multiprocessing.resource_tracker import main")

#: They end with what they have started; if one of them is left, it is named.
KEEPERS = ("freewheel_ray.actors.local_cluster", "packages.ray.tests.support.ray_nodes")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("leak_grace", "seconds that what a test leaves may need to vanish", default="10.0")


@pytest.fixture(autouse=True)
def leaves_nothing_behind(pytestconfig: pytest.Config) -> Iterator[None]:
    """Fail a test that leaves a process, thread, file descriptor or shared-memory name behind."""
    before, priority = Belongings.now(), os.getpriority(os.PRIO_PROCESS, 0)
    yield
    with contextlib.suppress(PermissionError):  # some commands lower that of their process, which is this one here
        os.setpriority(os.PRIO_PROCESS, 0, priority)
    deadline = time.monotonic() + float(pytestconfig.getini("leak_grace"))
    late, left = False, before.added()
    while left and not late:
        late = time.monotonic() > deadline
        gc.collect()
        multiprocessing.active_children()  # reaps the ones that have ended
        time.sleep(0.02)
        left = before.added()  # once more at least, however long the first look has taken
    if left:
        for process in before.added_processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)


@dataclass(frozen=True)
class Belongings:
    """What there is at one moment: of the whole machine where names are shared, else of this process."""

    pids: frozenset[int]
    threads: frozenset[threading.Thread]
    descriptors: Counter[str]
    names: frozenset[str]

    @classmethod
    def now(cls) -> Belongings:
        return cls(
            pids=frozenset(psutil.pids()),
            threads=frozenset(threading.enumerate()),
            descriptors=open_descriptors(),
            names=frozenset(os.listdir(SHARED_MEMORY)),
        )

    def added(self) -> list[str]:
        """What has come since and is ours, in words."""
        now = Belongings.now()
        return [
            *(f"process {process.pid}: {command_of(process)}" for process in self.added_processes()),
            *(f"thread {thread.name}" for thread in now.threads - self.threads),
            *(f"file descriptor {target}" for target in now.descriptors - self.descriptors),
            *(f"shared memory {name}" for name in now.names - self.names if is_unclaimed(name)),
        ]

    def added_processes(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if process.pid not in self.pids and is_ours(process)]


ACTOR = "ray::RayWorker"


def is_ours(process: psutil.Process) -> bool:
    """Whether this run started the process, directly or not; Python's helpers for this very process do not count."""
    try:
        if any(keeper in command_of(parent) for parent in process.parents() for keeper in KEEPERS):
            worker = command_of(process).startswith(ACTOR)  # of a cluster that several tests share: none stays
            return worker and process.environ().get(MARK) == RUN
        if process.ppid() == os.getpid():
            return not any(helper in command_of(process) for helper in HELPERS)
        return psutil.Process() in process.parents() or process.environ().get(MARK) == RUN
    except psutil.Error:
        return False


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.ZombieProcess:  # ended, but nobody has asked how
        return "(zombie)"
    except psutil.NoSuchProcess:
        return "(ended)"


def open_descriptors() -> Counter[str]:
    """What this process holds open, apart from what multiprocessing keeps for its helpers and its heap."""
    kept = kept_descriptors()
    targets: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the listing's own
            continue
        if int(number) not in kept and f"/pym-{os.getpid()}-" not in target and not is_of_ray(target):
            targets[target] += 1
    return targets


def is_of_ray(target: str) -> bool:
    """Whether a descriptor may be Ray's, which keeps some for as long as the process lives and says nothing of them."""
    return "ray" in sys.modules and (target.startswith(("socket:", "anon_inode:")) or "/fw-ray-" in target)


def is_unclaimed(name: str) -> bool:
    """Whether this shared memory is there and no process outside this run (another run, on the same machine) maps it."""
    path = SHARED_MEMORY / name
    with contextlib.suppress(FileNotFoundError):
        others = (process for process in psutil.process_iter() if process.pid != os.getpid() and not is_ours(process))
        return path.stat().st_uid == os.getuid() and not any(str(path) in maps_of(process) for process in others)
    return False


def maps_of(process: psutil.Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return ""
