"""The trainer is killed: every child goes with it, whatever it is doing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.support.chaos import (
    LONG,
    MODES,
    alive,
    command,
    commands,
    family,
    hang_one_of_each,
    tokens,
    wait_until,
    workers_of,
    world,
)


def kill_and_watch(pid: int, children: list[psutil.Process]) -> None:
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(alive, children)), limit=2.0, what="children outlive their trainer")
    assert time.monotonic() - killed < 2.0


def test_every_child_goes_with_the_trainer(tmp_path: Path) -> None:
    """One is inside a step that never ends and deaf to SIGTERM, one is stopped, and one acts."""
    argv = [world("Mishap"), "--env.how", "hangs", "--env.only", "1", "--env.folder", tokens(tmp_path / "mishaps", 0)]
    with commands(tmp_path, MODES, *argv) as processes:
        hang_one_of_each(tmp_path / "mishaps", len(MODES))
        for process in processes.values():
            workers = workers_of(process.pid)
            assert len(workers) == 3
            workers[2].suspend()
            kill_and_watch(process.pid, family(process.pid))


@pytest.mark.skipif(not LONG, reason="in the long form")
@pytest.mark.parametrize("mode", MODES)
def test_whenever_the_trainer_is_killed_nothing_is_left(mode: str, tmp_path: Path) -> None:
    """From the first import to the middle of training, evaluations included."""
    rng = np.random.default_rng(7)
    argv = [world("Certified"), "--mode", mode, "--workers", "4", "--num-envs", "4", "--steps", "1000000000"]
    for number in range(34):
        folder = tmp_path / str(number)
        folder.mkdir()
        with command(folder / "runs", *argv) as process:
            time.sleep(rng.uniform(0.0, 6.0))
            kill_and_watch(process.pid, family(process.pid))
