"""Tests of the terminal view: runs in any state, terminals of any size, and its end."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freewheel.errors import SetupError
from freewheel.files.lock import FileLock
from freewheel.metrics.meter import Meter
from freewheel.run.live.reporter import LiveStatus
from freewheel.run.live.status import Worker
from freewheel_watch.tui import TerminalView, run_tui
from tests.support.places import ROOT
from tests.support.runs import train

CALM = Worker(
    worker=0, state="wait-credit", since_s=0.1, steps=9, steps_per_s=5.0, restarts=0, pid=1, lane=None, seed=None
)
ROW = {
    "wall_s": 2.0, "env_steps": 50, "episodes": 4, "updates": 3, "steps_per_s": 25.0, "updates_per_s": 1.5, "episodes_per_s": 2.0,
    "return_mean": 7.5, "length_mean": 7.5, "lag_mean": 1.0, "queue_util": 0.65, "buffer_util": 0.1, "cpu_util": 0.9,
    "produced": 60, "trained": 50, "queued": 6, "open": 4, "dropped": {}, "gpu_util": None,
    "time/worker_wait_credit": 0.75, "time/worker_step": 0.25,
}  # fmt: skip


def make(folder: Path, *rows: dict[str, Any], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    known = {"env": "CartPole-v1", "algo": "ppo", "mode": "continuous", "seed": 3, "steps": 100} | config
    (folder / "config.json").write_text(json.dumps(known))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_status(folder: Path, *workers: Worker) -> None:
    status = replace(LiveStatus(folder, "CartPole-v1", Meter(1), 1.0).now(), workers=workers)
    (folder / "status.json").write_text(status.to_json())


def shown(view: TerminalView, width: int = 120, height: int = 40) -> str:
    view.look()
    lines = view.lines(width, height)
    assert len(lines) <= height
    return "\n".join(line.plain for line in lines)


def test_a_directory_without_runs_and_then_with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freewheel_watch.tui.CHOOSE", 0.0)
    view = TerminalView(tmp_path / "runs")
    assert "no run in" in shown(view)
    make(tmp_path / "runs" / "first")
    assert "first  CartPole-v1  ppo  continuous  seed 3   gone" in shown(view)
    newer = make(tmp_path / "runs" / "second", ROW)
    assert shown(view).startswith("first")  # the run on the screen stays ...
    with FileLock(newer / ".lock"):
        assert shown(view).startswith("second  CartPole-v1")  # ... until another one runs


def test_figures_targets_curve_ledger_and_shares(tmp_path: Path) -> None:
    rows = [ROW | {"env_steps": 10 * step, "return_mean": float(step), "eval_return": 9.0} for step in range(1, 6)]
    page = shown(TerminalView(make(tmp_path / "it", *rows).parent, "it"))
    for part in (
        "50%  50 / 100 steps", "▌collection rate", "▌25/s", "▌65%", "●", "return 5.0   best eval 9.0", "█ wait-credit 75%",
        "60 produced = 50 trained + 6 queued + 4 open + 0 dropped",
    ):  # fmt: skip
        assert part in page


def test_targets_are_those_of_the_run(tmp_path: Path) -> None:
    path = train(tmp_path, mode="lockstep", steps=64, evals=0).path
    page = shown(TerminalView(path.parent, path.name))
    assert "ended" in page
    assert "50-80 %" in page
    assert "queue: lockstep takes turns: there is no queue" in page


def test_the_most_interesting_workers_come_first(tmp_path: Path) -> None:
    folder = make(tmp_path / "it", ROW)
    many = [replace(CALM, worker=worker) for worker in range(100)]
    many[70] = replace(CALM, worker=70, state="lost", pid=None)
    many[80] = replace(CALM, worker=80, state="down", waits_for="its replacement: it was killed")
    many[60] = replace(CALM, worker=60, state="step", since_s=12.0, lane=60, seed=5, step=7)
    many[50] = replace(CALM, worker=50, died_s=3.0, restarts=1)
    write_status(folder, *many)
    with FileLock(folder / ".lock"):
        page = shown(TerminalView(tmp_path, "it"))
    table = page.partition("steps/s  restarts")[2].splitlines()[1:]
    assert [line.split()[0] for line in table[:5]] == ["70", "80", "60", "50", "0"]
    assert "100: 1 step, 97 wait-credit, 1 down, 1 lost" in page
    assert "lane 60, step 7 of the episode with seed 5" in page


def test_rows_that_a_resume_has_cut_leave_the_curve(tmp_path: Path) -> None:
    view = TerminalView(make(tmp_path / "it", ROW, ROW | {"return_mean": 400.0}).parent, "it")
    assert "400" in shown(view)
    make(tmp_path / "it", ROW, ROW | {"return_mean": 8.5, "wall_s": 3.0})
    assert "400" not in shown(view)
    assert "return 8.5" in shown(view)


@pytest.mark.parametrize("size", [(10, 3), (40, 10), (80, 24), (300, 90)])
def test_any_terminal_is_large_enough(tmp_path: Path, size: tuple[int, int]) -> None:
    folder = make(tmp_path / "it", ROW, {"odd": 1}, ROW | {"env_steps": None, "return_mean": "text"}, ROW)
    write_status(folder, *(replace(CALM, worker=worker) for worker in range(50)))
    with FileLock(folder / ".lock"):
        assert "it" in shown(TerminalView(tmp_path, "it"), *size)


def test_without_a_terminal_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="needs a terminal"):
        run_tui(tmp_path)


SHOW = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a shell inherit that it is ignored
from pathlib import Path
from freewheel_watch.tui import run_tui
raise SystemExit(run_tui(Path(sys.argv[1])))
"""


@pytest.mark.parametrize("way", ["q", "Ctrl-C"])
def test_it_ends_and_the_terminal_is_as_before(tmp_path: Path, way: str) -> None:
    make(tmp_path / "it", ROW)
    ours, theirs = pty.openpty()
    before, env = termios.tcgetattr(theirs), {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    argv = [sys.executable, "-c", SHOW, str(tmp_path)]
    process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    try:
        output = b""
        while b"best eval" not in output:
            assert select.select([ours], [], [], 30.0)[0], output
            output += os.read(ours, 65536)
        if way == "q":
            os.write(ours, b"q")
        else:
            process.send_signal(signal.SIGINT)
        while b"\x1b[?1049l" not in output:  # the previous screen is back
            assert select.select([ours], [], [], 10.0)[0], output
            output += os.read(ours, 65536)
        assert process.wait(10) == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)
