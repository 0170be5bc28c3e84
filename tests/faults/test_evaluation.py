"""Evaluation in a separate process: if it fails, the failure is reported and training continues."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from freewheel.cli import main as cli
from freewheel.seeding import closing_seed, tree
from tests.support.chaos import every
from tests.support.trainers import SMALL_ARGV

EVALUATED = str(
    tree(closing_seed(1000), "eval", 0)
)  # the seed of the closing evaluation's first episode; it is not trained on


@pytest.mark.parametrize(
    ("mode", "name", "what"),
    every(
        ("Dies", "evaluation ended its process (exit code -9)"),
        ("Raises", "lane 0 of tests.support.worlds:Raises raised ValueError: boom (episode 0, "),
    ),
)
def test_an_evaluation_that_fails_is_reported_and_training_continues(
    mode: str, name: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [f"tests.support.worlds:{name}", "--env.only_seed", EVALUATED, "--mode", mode, "--workers", "2"]
    argv += ["--num-envs", "2", "--steps", "640", *SMALL_ARGV, "--evals", "1", "--eval-episodes", "2"]
    assert cli.main(["train", *argv, "--runs-dir", str(tmp_path), "--run", "x"]) == 0
    assert capsys.readouterr().out.count(": " + what) == 1
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert (summary["ended"], summary["best_eval"], summary["trained"] >= 600) == ("steps", None, True)


def test_an_evaluation_that_hangs_does_not_delay_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["tests.support.worlds:Hangs", "--env.only_seed", EVALUATED, "--mode", "continuous", "--workers", "2"]
    argv += ["--num-envs", "2", "--steps", "640", "--step-timeout", "1", *SMALL_ARGV, "--evals", "1"]
    alarm = threading.Timer(20.0, os.kill, (os.getpid(), signal.SIGTERM))
    alarm.start()
    try:
        assert cli.main(["train", *argv, "--runs-dir", str(tmp_path), "--run", "x"]) == 0
    finally:
        alarm.cancel()
        alarm.join()
    told = f"Hangs did not return within 1 s from step 3 of the episode with seed {EVALUATED};"
    assert f"no closing evaluation: tests.support.worlds:{told}" in capsys.readouterr().out
