"""What is used of multiprocessing and threading beyond what is documented: a version of Python that changes it is named."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
from multiprocessing import util

import psutil

from freewheel.transport import _multiprocessing, forkserver
from freewheel.transport._multiprocessing import kept_descriptors, server_pid, tracker_pid
from tests.support.places import ROOT
from tests.support.trainers import wait_until

CHANGED = f"Python {platform.python_version()} changed multiprocessing: mend freewheel/transport/_multiprocessing.py"


def command_of(pid: int | None) -> str:
    assert pid is not None, CHANGED
    return " ".join(psutil.Process(pid).cmdline())


def test_the_server_and_the_tracker_are_found() -> None:
    forkserver.prepare()
    pids = server_pid(), tracker_pid()
    wait_until(lambda: all(map(command_of, pids)), what="they have not begun")
    assert ["multiprocessing.forkserver" in command_of(pid) for pid in pids] == [True, False], CHANGED
    assert ["multiprocessing.resource_tracker" in command_of(pid) for pid in pids] == [False, True], CHANGED
    assert server_pid() != tracker_pid()


def test_what_is_held_open_for_them_are_two_pipes() -> None:
    forkserver.prepare()
    links = [os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in kept_descriptors()]
    assert [link.partition(":")[0] for link in links] == ["pipe", "pipe"], CHANGED


ASKED = "from freewheel.transport import _multiprocessing as it; print(it.{})"


def answer(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_nothing_is_found_where_nothing_was_started() -> None:
    assert answer(ASKED.format("server_pid(), it.tracker_pid(), it.kept_descriptors()")) == "None None set()", CHANGED


def test_a_temporary_folder_is_known_once_it_was_asked_for() -> None:
    util.get_temp_dir()
    assert _multiprocessing.has_temporary_folder(), CHANGED
    assert answer(ASKED.format("has_temporary_folder()")) == "False", CHANGED


def test_a_call_before_threads_end_comes_while_they_run() -> None:
    assert hasattr(threading, "_register_atexit"), CHANGED
    program = (
        "import threading; from freewheel.transport import _multiprocessing as it\n"
        "over = threading.Event()\n"
        "threading.Thread(target=lambda: (over.wait(20.0), print('ended'))).start()\n"
        "it.before_threads_end(lambda: (print('called', flush=True), over.set()))\n"
    )
    assert answer(program).split() == ["called", "ended"], CHANGED
