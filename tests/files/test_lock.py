"""The lock on a file: who holds it can be asked by anybody, without disturbing the holder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from freewheel.files.lock import FileLock
from tests.support.places import ROOT

HOLDER = """
import sys
from pathlib import Path
from freewheel.files.lock import FileLock
with FileLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_the_holder_of_a_lock(tmp_path: Path) -> None:
    path, env = tmp_path / "lock", {**os.environ, "PYTHONPATH": str(ROOT)}
    assert FileLock.holder(path) is None
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert FileLock.holder(path) == process.pid
        assert FileLock.holder(path) == process.pid  # to ask has not released it
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(20) == 0
    assert FileLock.holder(path) is None


def test_to_ask_for_an_own_lock_does_not_release_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with FileLock(path):
        assert FileLock.holder(path) == os.getpid()
        ask = f"from pathlib import Path; from freewheel.files.lock import FileLock; print(FileLock.holder(Path({str(path)!r})))"
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        told = subprocess.run(
            [sys.executable, "-c", ask], capture_output=True, text=True, env=env, check=True, timeout=60
        )
        assert told.stdout.strip() == str(os.getpid())
    assert FileLock.holder(path) is None
