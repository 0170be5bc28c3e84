"""Evaluation in a separate process: failures are reported, an exception costs its episode only, and training continues."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from freewheel.cli import main as cli
from freewheel.seeding import closing_seed, tree
from tests.support.chaos import MODES, every
from tests.support.places import LONG
from tests.support.trainers import SMALL_ARGV, command
from tests.support.warm import Server

#: The seed of the closing evaluation's first episode; it is not trained on.
EVALUATED = tree(closing_seed(1000), "eval", 0)


@pytest.mark.parametrize(
    ("mode", "name", "what", "best"),
    every(
        ("Dies", "evaluation ended its process (exit code -9)", None),
        ("Raises", "lane 0 of tests.support.worlds:Raises raised ValueError: boom (episode 0, ", 36.0),
    ),
)
def test_an_evaluation_that_fails_is_reported_and_training_continues(
    mode: str, name: str, what: str, best: float | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [f"tests.support.worlds:{name}", "--env.only_seed", str(EVALUATED), "--mode", mode, "--workers", "2"]
    argv += ["--num-envs", "2", "--steps", "640", *SMALL_ARGV, "--evals", "1", "--eval-episodes", "2"]
    assert cli.main(["train", *argv, "--runs-dir", str(tmp_path), "--run", "x"]) == 0
    assert capsys.readouterr().out.count(": " + what) == 1
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert (summary["ended"], summary["best_eval"], summary["trained"] >= 600) == ("steps", best, True)


DURING = tree(1000, "eval", 0)  # the seed of the first episode of the evaluations while it trains
LIMIT = 40.0  # seconds, on a busy machine
LOCKSTEP = ("--mode", "lockstep", "--placement", "processes")
WORKERS = [(("--mode", mode, "--workers", "2")) for mode in MODES]


@pytest.mark.parametrize(
    ("mode", "seed", "at"),
    [
        pytest.param(LOCKSTEP, DURING, 3, marks=pytest.mark.system),
        (LOCKSTEP, EVALUATED, 0),
        pytest.param(WORKERS[0], DURING, 0, marks=pytest.mark.system),
        (WORKERS[1], DURING, 3),
        pytest.param(WORKERS[2], EVALUATED, 3, marks=pytest.mark.system),
    ],
)
def test_an_evaluation_that_hangs_does_not_delay_the_end(
    mode: tuple[str, ...], seed: int, at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a reset or a step, while it trains or at the end, where environments have processes of their own."""
    argv = [*f"tests.support.worlds:Hangs --env.only_seed {seed} --env.at {at} --env.deaf true".split(), *mode]
    limits = ["--step-timeout", "0.7", "--reset-timeout", "0.7"]
    argv += ["--num-envs", "2", "--steps", "640", *limits, *SMALL_ARGV, "--evals", "3", "--eval-episodes", "2"]
    alarm = threading.Timer(LIMIT, os.kill, (os.getpid(), signal.SIGTERM))
    alarm.start()
    try:
        assert cli.main(["train", *argv, "--runs-dir", str(tmp_path), "--run", "x"]) == 0
    finally:
        alarm.cancel()
        alarm.join()
    call = f"step {at} of the episode with seed {seed};" if at else f"reset() with seed {seed};"
    told, summary = capsys.readouterr().out, json.loads((tmp_path / "x" / "summary.json").read_text())
    assert (summary["ended"], summary["eval_fresh"]) == ("steps", seed == DURING)
    named = f": tests.support.worlds:Hangs did not return within 0.7 s from {call}"
    # An evaluation that still runs when training ends is not waited for.
    assert named in told or (seed == DURING and summary["evals_skipped"]), told


@pytest.mark.system
@pytest.mark.parametrize("mode", ["sequential", *["lockstep"] * LONG])
def test_an_evaluation_that_hangs_in_the_runs_own_process_ends_a_run(server: Server, mode: str, tmp_path: Path) -> None:
    """It cannot be interrupted there; what was learned is saved, and the call is named."""
    argv = ["tests.support.worlds:Hangs", "--env.only_seed", str(DURING), "--mode", mode, "--num-envs", "1"]
    argv += ["--steps", "100000000", "--step-timeout", "1", "--evals", "1000000", "--eval-episodes", "2"]
    with command(server, tmp_path, *argv) as process:
        assert process.wait(LIMIT) == 1
    assert f"did not return within 1 s (episode 0, seed {DURING}, step 3" in process.err
    summary = json.loads((tmp_path / "cut" / "summary.json").read_text())
    assert (summary["ended"], summary["exit_code"]) == ("failed", 1)
    assert list((tmp_path / "cut" / "checkpoints").iterdir())


@pytest.mark.parametrize("mode", ["sequential", *["lockstep", *MODES] * LONG])
def test_evaluations_do_not_outrun_the_minutes(mode: str, tmp_path: Path) -> None:
    """Many evaluations are due, each of which would take a hundred times longer than the whole run."""
    argv = ["tests.support.worlds:Crawls", "--env.seconds", "0.002", "--env.length", "1000", "--mode", mode]
    argv += ["--num-envs", "2", "--minutes", "0.02", *SMALL_ARGV, "--evals", "100", "--eval-episodes", "50"]
    argv += ["--eval-share", "1"]
    assert cli.main(["train", *argv, "--runs-dir", str(tmp_path), "--run", "x"]) == 0
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert summary["ended"] == "minutes"
    assert summary["wall_s"] < 50  # of 100 in one evaluation
