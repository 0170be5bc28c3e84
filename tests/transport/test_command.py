"""Commands in processes of their own: what they print is kept, and they do not outlive the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from freewheel.transport import command
from tests.support.places import ROOT
from tests.support.trainers import wait_until

#: Says that it waits, and says so when it is asked to end.
WAITS = """
import pathlib, signal, sys
from freewheel.transport.command import end_with

def end(number, frame):
    pathlib.Path("ended").write_text(signal.Signals(number).name)
    sys.exit(5)

signal.signal(signal.SIGTERM, end)
end_with(int(sys.argv[1]))
print(*sys.argv[2:], flush=True)
signal.pause()
"""
STARTS = """
import pathlib
from freewheel.transport.command import start
process = start("waits", ["a", "b"], pathlib.Path("out"))
print(process.pid, flush=True)
process.wait()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "waits.py").write_text(WAITS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path)]))
    return tmp_path


def test_what_it_prints_is_kept_and_signals_reach_it(folder: Path) -> None:
    with command.start("waits", ["one", "two"], folder / "out") as process:
        wait_until(lambda: (folder / "out").read_text() == "one two\n")
        assert os.getsid(process.pid) == process.pid  # interrupts of the terminal do not reach it
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 5


def test_it_is_asked_to_end_when_its_parent_is_killed(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        wait_until(lambda: (folder / "out").read_text() == "a b\n")
        parent.kill()
    wait_until((folder / "ended").exists)
    assert (folder / "ended").read_text() == "SIGTERM"
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_a_parent_that_is_gone_already_counts(folder: Path) -> None:
    """The number of a process that is not the parent."""
    assert subprocess.run([sys.executable, "-m", "waits", "1"], timeout=20, check=False).returncode == 5


LEAVES = """
import atexit, sys, threading, time
from freewheel.transport import command

def for_ever():
    while True:
        time.sleep(1.0)

{left}
command.LEAVE_WITHIN = 0.2
command.leave_soon(7)
sys.exit(7)
"""


@pytest.mark.parametrize(
    ("left", "told"),
    [
        ("threading.Thread(target=for_ever, name='telemetry').start()", "the thread 'telemetry' of an imported module"),
        ("atexit.register(for_ever)", "an exit handler of an imported module"),
        ("", ""),
    ],
)
def test_what_a_module_leaves_behind_does_not_keep_the_process(left: str, told: str) -> None:
    words = [sys.executable, "-c", LEAVES.format(left=left)]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=30, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 7
    assert bool(done.stderr) == bool(told)
    assert told in done.stderr
