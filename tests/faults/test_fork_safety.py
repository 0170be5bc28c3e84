"""Workers do not inherit threads and locks of the caller: they are forked from a server that has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil
import pytest

from tests.support.chaos import MODES, trial, world
from tests.support.places import ROOT

#: A script without `if __name__ == "__main__"`, as users write them; it has threads and a held lock.
SCRIPT = """
import json, sys, threading
import torch

torch.set_num_threads(4)
a = torch.ones(512, 512)
for _ in range(5):
    a = a @ a / 512
lock = threading.Lock()
lock.acquire()
waiting = threading.Thread(target=lock.acquire, daemon=True)
waiting.start()

import freewheel

for mode in ("batch", "continuous", "episodes"):
    result = freewheel.train(
        "tests.support.faulty_worlds:Certified", mode=mode, workers=2, num_envs=2, num_steps_per_env=16, steps=500, evals=1,
        eval_episodes=1, runs_dir=sys.argv[1], quiet=True,
    )
    print(json.dumps([mode, result.exit_code, torch.get_num_threads()]))
"""


@pytest.mark.system
def test_a_caller_with_threads_can_train(tmp_path: Path) -> None:
    """And its own settings are unchanged."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    words, env = [sys.executable, str(script), str(tmp_path / "runs")], {**environment, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(words, env=env, capture_output=True, text=True, timeout=55, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [json.loads(line) for line in ran.stdout.splitlines()] == [[mode, 0, 4] for mode in MODES]


def test_workers_are_children_of_the_server_with_one_thread_and_without_torch() -> None:
    with trial(world("Certified"), "batch", workers=2, num_envs=2) as on:
        on.wait_for_workers()
        for slot in on.supervisor.slots:
            assert isinstance(slot.process, ForkServerProcess)
            process = psutil.Process(slot.process.pid)
            server = process.parent()
            assert server is not None
            assert "multiprocessing.forkserver" in " ".join(server.cmdline())
            assert server.num_threads() == process.num_threads() == 1
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            assert "torch" not in maps
            assert "numpy" in maps
