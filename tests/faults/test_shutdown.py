"""Endings: with full queues, with workers that hang or are stopped, and on request; always in time, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from freewheel.saved import open_run
from tests.faults.chaos import (
    LONG, MODES, Trial, alive, command, family, has_logged, idle, kill, tokens, trial, wait_until, workers_of, world,
)  # fmt: skip

TIMES = 333 if LONG else 4


@pytest.mark.parametrize("mode", MODES)
def test_full_queues_do_not_keep_it_from_ending(mode: str) -> None:
    """Results that nobody reads, workers that wait for room; and by turns, workers in the middle of it."""
    for number in range(TIMES):
        with trial(world("Certified"), mode, workers=4, num_envs=4, env_args={"seconds": 0.0}) as on:
            on.publish()
            ready = idle if number % 2 else has_begun
            wait_until(lambda on=on, ready=ready: ready(on))
            children = [psutil.Process(seat.process.pid) for seat in on.crew.seats if seat.process is not None]
            ended = time.monotonic()
        assert time.monotonic() - ended < 5.0
        assert len(children) == 4
        assert not any(child.is_running() for child in children)
        rows = on.balance()
        assert (rows.produced > 0, rows.open, rows.trained, rows.dropped) == (True, 0, 0, {})


def has_begun(on: Trial) -> bool:
    return on.balance().queued > 0


@pytest.mark.parametrize("mode", MODES)
def test_workers_that_hang_or_are_stopped_or_dead_do_not_keep_it_from_ending(mode: str, tmp_path: Path) -> None:
    args = {"how": "hangs", "only": 1, "folder": tokens(tmp_path, 0)}
    with trial(world("Mishap"), mode, workers=4, num_envs=4, env_args=args) as on:
        on.wait_for_workers()
        tokens(tmp_path, 1)
        on.run(lambda: not (tmp_path / "token-0").exists()) if mode != "batch" else on.learn(1)
        process = on.crew.seats[2].process
        assert process is not None
        psutil.Process(process.pid).suspend()
        assert kill(on.crew.seats[3], [])
        ended = time.monotonic()
    assert time.monotonic() - ended < 5.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("number", "hung"),
    [(signal.SIGINT, False), (signal.SIGTERM, True)] + [(signal.SIGINT, True), (signal.SIGTERM, False)] * LONG,
)
def test_a_signal_ends_the_run_in_order(mode: str, number: signal.Signals, hung: bool, tmp_path: Path) -> None:
    """SIGINT goes to the whole group, as from a terminal; SIGTERM to the trainer alone, as from a job queue."""
    runs, mishaps = tmp_path / "runs", tmp_path / "mishaps"
    argv = [world("Mishap"), "--env.how", "hangs", "--env.only", "1", "--env.folder", tokens(mishaps, 0)]
    argv += ["--mode", mode, "--workers", "3", "--num-envs", "3", "--steps", "1000000000", "--log-every", "0.05"]
    with command(runs, *argv) as process:
        wait_until(lambda: has_logged(runs), limit=40.0)
        if hung:
            tokens(mishaps, 1)
            wait_until(lambda: (mishaps / "used-token-0").exists())
        children = family(process.pid)
        assert len(workers_of(process.pid)) == 3
        sent = time.monotonic()
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        _, err = process.communicate(timeout=20)
        assert time.monotonic() - sent < (8.0 if hung else 5.0)
    assert (process.returncode, err) == (128 + number, "")
    wait_until(lambda: not any(map(alive, children)), limit=1.0)
    summary = json.loads((runs / "cut" / "summary.json").read_text())
    assert (summary["exit_code"], summary["ended"]) == (128 + number, f"interrupted ({number.name})")
    assert summary["produced"] == summary["trained"] + sum(summary["dropped"].values()) > 0
    assert (summary["queued"], summary["open"]) == (0, 0)
    _, warnings = open_run("cut", str(runs)).actor("latest")
    assert warnings == []
