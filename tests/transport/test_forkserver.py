"""The forkserver: its children have one thread each, know the modules of workers, never run the caller's script, die with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from freewheel.transport import forkserver
from tests.support import children
from tests.support.places import ROOT

if TYPE_CHECKING:
    from tests.transport.conftest import Eventually, Start

LIMIT = 20.0

#: A script without a guard. Whoever runs it says so.
SCRIPT = """
import multiprocessing, os, sys
print("run by", "me" if sys.argv[1:] == ["main"] else "a child", flush=True)
from freewheel.transport.executors import call_in_process
from freewheel.transport import forkserver
from tests.support import children

{first}
ours, theirs = multiprocessing.Pipe(duplex=False)
lifeline = forkserver.Lifeline()
process = lifeline.process(children.tell, theirs, *forkserver.ONE_THREAD, name="child")
forkserver.start(process)
assert ours.poll(20)
facts, modules, main = ours.recv()
process.join(20)
print(sorted(set(facts.values())), "json.tool" in modules, "torch" in modules, main, process.exitcode)
print([os.environ.get(name) for name in forkserver.ONE_THREAD])
"""


def run(tmp_path: Path, first: str) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(first=first))
    environ = {name: value for name, value in os.environ.items() if name not in forkserver.ONE_THREAD}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "7"}
    done = subprocess.run(
        [sys.executable, str(script), "main"], env=environ, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("first", "loaded"),
    [
        ("forkserver.prepare(['json.tool'])", True),
        ("assert call_in_process(lambda: os.environ['OMP_NUM_THREADS'], 'a question', 20) == '1'", False),
        ("", False),
    ],
    ids=["prepared", "after an errand", "unprepared"],
)
def test_children_have_a_thread_each_and_never_run_the_callers_script(tmp_path: Path, first: str, loaded: bool) -> None:
    run_by_me, child, environment = run(tmp_path, first)
    assert run_by_me == "run by me"
    assert child == f"['1'] {loaded} False None 0"
    assert environment == "['7', None, None, None]", "the caller's own settings are as they were"


def test_a_worker_finds_its_modules_loaded_and_torch_is_not_one_of_them(start: Start) -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with ours, theirs:
        start(children.tell, theirs)
        assert ours.poll(LIMIT)
        _, modules, _ = ours.recv()
    assert "freewheel.transport.shm.worker" in modules
    assert "torch" not in modules


def test_an_interrupt_is_left_to_the_parent_and_a_leash_let_go_ends_all(eventually: Eventually) -> None:
    lifeline = forkserver.Lifeline()
    ours, theirs = multiprocessing.Pipe(duplex=False)
    processes = [lifeline.process(children.hang_on, theirs, name="child") for _ in range(2)]
    with ours, theirs:
        for process in processes:
            forkserver.start(process)
            assert ours.poll(LIMIT)
            assert ours.recv() == "here"
        for process in processes:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGINT)
            assert ours.poll(LIMIT)
            assert ours.recv() == "still here"
        lifeline.close()
        for process in processes:
            process.join(LIMIT)
            assert process.exitcode == -signal.SIGKILL
            process.close()
