"""Endings: with full queues, with workers that hang or are stopped, and on request; always in time, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from freewheel.cli import main as cli
from freewheel.run.saved import open_run
from tests.support.chaos import (
    LONG,
    MODES,
    SMALL_ARGV,
    Trial,
    alive,
    commands,
    family,
    hang_one_of_each,
    has_logged,
    idle,
    kill,
    tokens,
    trial,
    wait_until,
    world,
)
from tests.support.pools import wire_of

TIMES = 333 if LONG else 3
COMMANDS = MODES if LONG else MODES[1:2]  # a command takes seconds to start


@pytest.mark.parametrize("mode", MODES)
def test_full_queues_do_not_keep_it_from_ending(mode: str) -> None:
    """Results that nobody reads, workers that wait for room; and by turns, workers in the middle of it."""
    for number in range(TIMES):
        with trial(world("Certified"), mode, workers=4, num_envs=4, env_args={"seconds": 0.0}) as on:
            on.publish()
            ready = idle if number % 2 else has_begun
            wait_until(partial(ready, on))
            children = on.processes()
            ended = time.monotonic()
        assert time.monotonic() - ended < 5.0
        assert len(children) == 4
        assert not any(child.is_running() for child in children)
        rows = on.balance()
        assert (rows.produced > 0, rows.open, rows.trained, rows.dropped) == (True, 0, 0, {})


def has_begun(on: Trial) -> bool:
    return on.balance().queued > 0


@pytest.mark.parametrize("mode", MODES if LONG else ["continuous"])
def test_workers_that_hang_or_are_stopped_or_dead_do_not_keep_it_from_ending(mode: str, tmp_path: Path) -> None:
    args = {"how": "hangs", "only": 1, "folder": tokens(tmp_path, 1)}
    with trial(world("Mishap"), mode, workers=4, num_envs=4, env_args=args) as on:
        on.publish()
        steps = wire_of(on.collector).heartbeats.memory["steps"]
        wait_until(lambda: (tmp_path / "used-token-0").exists() and bool((steps > 0).all()))
        on.processes()[2].suspend()
        assert kill(on.supervisor.slots[3], [])
        ended = time.monotonic()
    assert time.monotonic() - ended < 5.0


@pytest.mark.parametrize(
    ("number", "hung"),
    [(signal.SIGINT, True), *[(signal.SIGTERM, True), (signal.SIGINT, False), (signal.SIGTERM, False)] * LONG],
)
def test_a_signal_ends_a_command_in_order(number: signal.Signals, hung: bool, tmp_path: Path) -> None:
    """SIGINT goes to the whole group, as from a terminal; SIGTERM to the trainer alone, as from a job queue."""
    argv = [world("Mishap"), "--env.how", "hangs", "--env.only", "1", "--env.folder", tokens(tmp_path / "mishaps", 0)]
    with commands(tmp_path, COMMANDS, *argv) as processes:
        if hung:
            hang_one_of_each(tmp_path / "mishaps", len(COMMANDS))
        children = {mode: family(process.pid) for mode, process in processes.items()}
        sent = time.monotonic()
        for process in processes.values():
            (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        for mode, process in processes.items():
            _, err = process.communicate(timeout=20)
            assert time.monotonic() - sent < (8.0 if hung else 5.0)
            assert (process.returncode, err) == (128 + number, "")
            wait_until(lambda mode=mode: not any(map(alive, children[mode])), limit=1.0)  # type: ignore[misc]
            assert_in_order(tmp_path / mode, number)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_training_in_order(mode: str, number: signal.Signals, tmp_path: Path) -> None:
    """The same from within, where no time is lost with imports."""
    sent = []

    def send() -> None:
        wait_until(lambda: has_logged(tmp_path))
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    argv = [world("Certified"), "--mode", mode, "--workers", "3", "--num-envs", "3", "--steps", "1000000000"]
    code = cli.main(["train", *argv, *SMALL_ARGV, "--log-every", "0.05", "--runs-dir", str(tmp_path), "--run", "cut"])
    assert time.monotonic() - sent[0] < 5.0
    sender.join()
    assert code == 128 + number
    assert_in_order(tmp_path, number)


def assert_in_order(runs: Path, number: signal.Signals) -> None:
    """The books are closed and the weights are saved."""
    summary = json.loads((runs / "cut" / "summary.json").read_text())
    assert (summary["exit_code"], summary["ended"]) == (128 + number, f"interrupted ({number.name})")
    assert summary["produced"] == summary["trained"] + sum(summary["dropped"].values()) > 0
    assert (summary["queued"], summary["open"]) == (0, 0)
    _, warnings = open_run("cut", str(runs)).actor("latest")
    assert warnings == []
