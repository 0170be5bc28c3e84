"""Environments that cannot start, or not in all workers: few tries, a clear error, the right exit code, no long waits."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from freewheel.cli import main as cli
from tests.support.chaos import every, tokens, used_tokens, world
from tests.support.trainers import SMALL_ARGV

Capture: TypeAlias = pytest.CaptureFixture[str]
WORKERS = 3
MANY = 100  # tokens: more than will be used
STEPS = 4_000  # of which the others have some left when a worker has been tried for the last time


def train(tmp_path: Path, capfd: Capture, mode: str, *argv: str, steps: int = 400) -> tuple[int, str]:
    """The exit code of a training, and its error output."""
    options = ["--mode", mode, "--workers", str(WORKERS), "--num-envs", str(WORKERS), "--steps", str(steps)]
    code = cli.main(["train", *argv, *options, *SMALL_ARGV, "--runs-dir", str(tmp_path / "runs"), "--run", "x"])
    return code, capfd.readouterr().err


def summary(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "runs" / "x" / "summary.json").read_text())
    assert found["produced"] == found["trained"] + sum(found["dropped"].values())
    return found


@pytest.mark.parametrize(
    ("mode", "name", "what"),
    every(
        ("Raises", "lane 0 of tests.support.worlds:Raises raised ValueError: boom (in its first reset"),
        ("Dies", "tests.support.worlds:Dies was killed (SIGKILL) in reset() with seed 0"),
    ),
)
def test_an_unbuildable_env_starts_nothing(mode: str, name: str, what: str, tmp_path: Path, capfd: Capture) -> None:
    """It is surveyed in a separate process first."""
    code, output = train(tmp_path, capfd, mode, f"tests.support.worlds:{name}", "--env.at", "0")
    assert (code, output.startswith(f"freewheel: {what}")) == (1, True), output
    assert not (tmp_path / "runs").exists()


FAULTY = "tests.support.faulty_worlds:Faulty"
HANGS = f"it did not return within 1.5 s from its constructor (lane {{}} of {FAULTY})"


@pytest.mark.parametrize(
    ("mode", "how", "what"),
    [
        ("batch", "raises", f"it ended (exit code 1)\nlane {{}} of {FAULTY} raised ValueError: boom"),
        ("continuous", "is killed", "it was killed (SIGKILL)"),
        pytest.param("episodes", "hangs", HANGS, marks=pytest.mark.system),
    ],
)
def test_an_env_no_worker_can_build_fails_soon(mode: str, how: str, what: str, tmp_path: Path, capfd: Capture) -> None:
    argv = [world("Faulty"), "--env.how", how, "--env.at", "-1", "--env.folder", tokens(tmp_path / "faults", MANY)]
    timeout = ["--construct-timeout", "1.5"] if how == "hangs" else []
    code, output = train(tmp_path, capfd, mode, *argv, *timeout)
    assert code == summary(tmp_path)["exit_code"] == 1
    start = "freewheel: every worker was given up, the last one because "
    assert any(output.startswith(start + what.format(lane)) for lane in range(WORKERS)), output
    tried = Counter(used.worker for used in used_tokens(tmp_path / "faults"))
    assert tried == {0: 3, 1: 3, 2: 3} or (how == "hangs" and tried < Counter({0: 3, 1: 3, 2: 3}))  # killed at the end
    if how == "raises":
        assert output.rstrip().endswith("ValueError: boom")


@pytest.mark.parametrize(
    ("mode", "how", "at", "error"),
    every(("raises", "5", "raised ValueError: boom (episode"), ("nan", "3", "gave an observation that is not finite")),
)
def test_if_every_lane_was_given_up_the_run_fails_with_the_error_of_the_env(
    mode: str, how: str, at: str, error: str, tmp_path: Path, capfd: Capture
) -> None:
    """After any number of steps."""
    code, output = train(tmp_path, capfd, mode, world("Faulty"), "--env.how", how, "--env.at", at, steps=10**6)
    assert code == summary(tmp_path)["exit_code"] == 1
    assert output.startswith("freewheel: every worker was given up, the last one because it ended (exit code 4)\n")
    assert "no lane of tests.support.faulty_worlds:Faulty is left: lane " in output
    assert error in output
    assert how != "raises" or output.rstrip().endswith("ValueError: boom")


@pytest.mark.parametrize(
    ("mode", "how", "at"),
    [
        ("batch", "raises", "-1"),
        pytest.param("continuous", "is killed", "3", marks=pytest.mark.system),
        pytest.param("episodes", "nan", "4", marks=pytest.mark.system),
    ],
)
def test_training_finishes_without_the_lost_workers(
    mode: str, how: str, at: str, tmp_path: Path, capfd: Capture
) -> None:
    argv = [world("Faulty"), "--env.how", how, "--env.at", at, "--env.only", "1"]
    code, output = train(tmp_path, capfd, mode, *argv, steps=STEPS)
    found = summary(tmp_path)
    assert (code, found["exit_code"], found["ended"]) == (3, 3, "steps"), output
    assert (found["workers_lost"], found["worker_restarts"]) == (1, 2)
    assert found["env_steps"] >= STEPS
    assert found["trained"] >= STEPS - WORKERS * 16
