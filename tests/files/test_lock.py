"""The lock on a file: who holds it can be asked by anybody, without disturbing the holder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from freewheel.files.lock import FileLock
from tests.support.places import ROOT

OTHER = """
import sys
from pathlib import Path
from freewheel.files.lock import FileLock
path = Path(sys.argv[1])
print(FileLock.holder(path), flush=True)
sys.stdin.readline()
with FileLock(path):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_the_holder_of_a_lock(tmp_path: Path) -> None:
    path, words = tmp_path / "lock", [sys.executable, "-c", OTHER, str(tmp_path / "lock")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert FileLock.holder(path) is None
    with FileLock(path):
        assert FileLock.holder(path) == os.getpid()  # to ask has not released it: the other process sees it too
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == f"{os.getpid()}\n"
    with process:
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "held\n"
        assert FileLock.holder(path) == FileLock.holder(path) == process.pid
    assert process.returncode == 0
    assert FileLock.holder(path) is None
