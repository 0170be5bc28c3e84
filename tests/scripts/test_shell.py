"""scripts/*.sh: lines that users bring from the trainers that they replace work as they are written."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from freewheel.cli import main as cli
from tests.support.places import ROOT

DRONE = (
    "run_async_mbpo.sh --task=Isaac-Exploration-Rough-Drone-v0 --num_envs=128 --num_collectors=8 --max_queue_size=2000 "
)
DRONE += "--collection_batch_size=512 --headless --device=cuda:0"
CAGE = "--total-episodes 1000 --episodes-per-update 100 --red-agent B_lineAgent"
SIDE_BY_SIDE = ["collect  episodes: 100 envs, 100 episodes an update", "workers  1 worker x 100 envs"]
#: A line, and what the plan says about it.
LINES = {
    DRONE: [
        "world    freewheel/RoughDrone-v0: ",
        "collect  continuous: 128 envs",
        "note     Isaac-Exploration-Rough-Drone-v0 needs Isaac Lab, which is not installed: this run uses ",
        "note     --headless changes nothing on freewheel/RoughDrone-v0",
        "note     --collection-batch-size 512 steps x 128 envs would keep rows back: fragments have ",
        "note     --max-queue-size 2000 has no effect: ",
    ],
    "run_async_mbpo_v2.sh --num_envs=8": ["collect  batch: 8 envs x 24 steps = 192 rows"],
    f"run_async_training.sh --n-envs 100 {CAGE}": SIDE_BY_SIDE,
    f"run_executor_async_training.sh --n-workers 100 {CAGE}": SIDE_BY_SIDE,
}


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The scripts, where there is no .venv, and a `freewheel` on PATH that only shows its words."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "freewheel"
    command.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split()[0])
def test_a_line_works_as_it_is_written(line: str, on_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shown = subprocess.run(
        ["sh", *f"{on_path}/scripts/{line}".split()], capture_output=True, text=True, check=True, timeout=60
    )
    assert cli.main([*shown.stdout.split("\n")[:-1], "--dry-run"]) == 0
    lines = capfd.readouterr().out.splitlines()
    for wanted in LINES[line]:
        assert any(one.startswith(wanted) for one in lines), (wanted, lines)


def test_without_freewheel_a_script_says_what_to_do(on_path: Path) -> None:
    (on_path / "bin" / "freewheel").unlink()
    done = subprocess.run(
        ["sh", on_path / "scripts" / "run_async_mbpo.sh"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr.count("\n")) == (127, 1)
    assert "neither in .venv nor on PATH" in done.stderr
