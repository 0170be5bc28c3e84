"""The leak check fails exactly the tests that leave something behind, and names it."""

from __future__ import annotations

import pytest

from tests.support.places import ROOT

#: Leaks end with the inner run: processes are killed by the check, the rest belongs to the interpreter.
LEAKS = """
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from multiprocessing.shared_memory import SharedMemory

import gymnasium
import pytest

KEPT = []  # else garbage collection would tidy up
SLEEP = [sys.executable, "-c", "import time; time.sleep(30)"]
ORPHAN = [sys.executable, "-c", f"import os; os.spawnv(os.P_NOWAIT, {SLEEP[0]!r}, {SLEEP!r})"]
forked = multiprocessing.get_context("forkserver")

def test_process():
    KEPT.append(subprocess.Popen(SLEEP))

def test_orphan():
    subprocess.run(ORPHAN, check=True)

def test_zombie():
    KEPT.append(subprocess.Popen([sys.executable, "-c", ""]))

def test_forkserver_worker():
    worker = forked.Process(target=time.sleep, args=(30,), daemon=True)
    worker.start()
    KEPT.append(worker)

def test_thread():
    threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()

def test_descriptor():
    KEPT.append(os.open(__file__, os.O_RDONLY))

def test_pipe():
    KEPT.append(os.pipe())

def test_shared_memory():
    memory = SharedMemory(create=True, size=8)
    memory.close()  # without unlink

@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_clean(context, tmp_path):
    envs = gymnasium.make_vec(
        "CartPole-v1", num_envs=2, vectorization_mode="async", vector_kwargs={"context": context}
    )
    try:
        envs.reset(seed=1)
    finally:
        envs.close()
    memory = SharedMemory(create=True, size=8)
    memory.close()
    memory.unlink()
    with open(tmp_path / "file", "w") as file, subprocess.Popen(SLEEP) as process:
        file.write("closed")
        process.kill()
    thread = threading.Thread(target=len, args=("",))
    thread.start()
    thread.join()
"""


@pytest.mark.system
def test_each_kind_of_leak_is_seen_and_named(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile(test_leaks=LEAKS)
    options = ("-p", "tests.plugins.leaks", "-p", "no:cacheprovider", "-o", "leak_grace=0.5", "-v")
    result = pytester.runpytest_subprocess(*options, timeout=50)
    result.assert_outcomes(passed=8 + 3, errors=8)  # a leak is an error at teardown: the test itself passed
    leaks = {
        "process": "process * time.sleep(30)",
        "orphan": "process * time.sleep(30)",
        "zombie": "process * (zombie)",
        "forkserver_worker": "process * from multiprocessing.forkserver import main*",
        "thread": "thread forgotten",
        "descriptor": "file descriptor */test_leaks.py",
        "pipe": "file descriptor pipe:*",
        "shared_memory": "shared memory psm_*",
    }
    for name, words in leaks.items():
        result.stdout.fnmatch_lines([f"*ERROR at teardown of test_{name} *", "left behind:", f"  {words}"])
