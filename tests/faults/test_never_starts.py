"""Worlds that cannot start, or not everywhere: few tries, a clear word, the right exit code, and no time wasted."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from freewheel.cli import main as cli
from tests.support.chaos import SMALL_ARGV, every, harms, tokens, world

WORKERS = 3
MANY = 100  # tokens: more than anyone will take


def train(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], mode: str, *argv: str, steps: int = 400
) -> tuple[int, str, float]:
    """The exit code of a training, what it says on stderr, and how long it took."""
    options = ["--mode", mode, "--workers", str(WORKERS), "--num-envs", str(WORKERS), "--steps", str(steps)]
    began = time.monotonic()
    code = cli.main(["train", *argv, *options, *SMALL_ARGV, "--runs-dir", str(tmp_path / "runs"), "--run", "x"])
    return code, capfd.readouterr().err, time.monotonic() - began


def summary(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "runs" / "x" / "summary.json").read_text())
    assert found["produced"] == found["trained"] + sum(found["dropped"].values())
    return found


@pytest.mark.parametrize(
    ("mode", "name", "what"),
    every(
        ("Raises", "lane 0 of freewheel.testing.worlds:Raises raised ValueError: boom (in its first reset"),
        ("Dies", "the environment ended its process (exit code -9)"),
    ),
)
def test_a_world_that_cannot_be_built_starts_nothing(
    mode: str, name: str, what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is tried out in a process of its own first."""
    code, said, took = train(tmp_path, capfd, mode, f"freewheel.testing.worlds:{name}", "--env.at", "0")
    assert (code, said.startswith(f"freewheel: {what}")) == (1, True), said
    assert took < 10.0
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("mode", "how", "what"),
    every(
        ("raises", "it ended (exit code 1)\nlane {} of tests.support.faulty_worlds:Mishap raised ValueError: boom"),
        ("is killed", "it was killed (SIGKILL)"),
        ("hangs", "it did not answer within 0.8 s of construct"),
    ),
)
def test_a_world_that_no_worker_can_build_fails_soon(
    mode: str, how: str, what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tokens(tmp_path / "mishaps", MANY)
    argv = [world("Mishap"), "--env.how", how, "--env.at", "-1", "--env.folder", folder]
    patience = ["--construct-timeout", "0.8"] if how == "hangs" else []
    code, said, took = train(tmp_path, capfd, mode, *argv, *patience)
    assert code == summary(tmp_path)["exit_code"] == 1
    start = "freewheel: every worker was given up, the last one because "
    assert any(said.startswith(start + what.format(lane)) for lane in range(WORKERS)), said
    assert took < 10.0
    tried = Counter(harm.worker for harm in harms(tmp_path / "mishaps"))
    assert tried == {0: 3, 1: 3, 2: 3} or (how == "hangs" and tried < Counter({0: 3, 1: 3, 2: 3}))  # killed on the way
    if how == "raises":
        assert said.rstrip().endswith("ValueError: boom")


@pytest.mark.parametrize(
    ("mode", "how", "at", "words"),
    every(("raises", "5", "raised ValueError: boom (episode"), ("nan", "3", "gave an observation that is not finite")),
)
def test_when_every_lane_was_given_up_the_run_fails_in_the_words_of_the_env(
    mode: str, how: str, at: str, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """However many steps that took."""
    code, said, took = train(tmp_path, capfd, mode, world("Mishap"), "--env.how", how, "--env.at", at, steps=10**6)
    assert code == summary(tmp_path)["exit_code"] == 1
    assert said.startswith("freewheel: every worker was given up, the last one because it ended (exit code 4)\n")
    assert "no lane of tests.support.faulty_worlds:Mishap is left: lane " in said
    assert words in said
    assert how != "raises" or said.rstrip().endswith("ValueError: boom")
    assert took < 10.0


@pytest.mark.parametrize(("mode", "how", "at"), every(("raises", "-1"), ("is killed", "3"), ("nan", "4")))
def test_training_is_finished_without_the_workers_that_are_lost_for_good(
    mode: str, how: str, at: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = [world("Mishap"), "--env.how", how, "--env.at", at, "--env.only", "1"]
    code, said, took = train(tmp_path, capfd, mode, *argv, steps=1000)
    found = summary(tmp_path)
    assert (code, found["exit_code"], found["ended"]) == (3, 3, "steps"), said
    assert (found["workers_lost"], found["worker_restarts"]) == (1, 2)
    assert found["env_steps"] >= 1000
    assert found["trained"] >= 1000 - WORKERS * 16
    assert took < 20.0
