"""Environments that raise, hang, die or give invalid answers: a failure costs its episode; in serial modes a death the run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import freewheel
from freewheel.cli import main as cli
from freewheel.run.checkpoints import checkpoint
from freewheel.seeding import tree
from tests.support.chaos import finite, modes, tokens, trial, world
from tests.support.places import LONG
from tests.support.trainers import SMALL_ARGV

Capture: TypeAlias = pytest.CaptureFixture[str]
SEED = 9
FAULTY_SEED = tree(SEED, "env", 2, 1)  # lane 2, episode 1

#: Lanes of 8-step episodes and chunks of 8 steps: episode 1 is chunk 1. One update of 4 × 8 rows comes before the fault.
SMALL = ["--num-envs", "4", "--num-steps-per-env", "8", "--steps", "320", "--seed", str(SEED), "--evals", "0"]
MEASURED = [tree(0, "env", 0, episode) for episode in range(3000)]  # seeds of the measurement before a run
BROKEN = ["--env.spared", json.dumps(MEASURED), "--seed", str(SEED)]
FAULT = ["--env.only_seed", str(FAULTY_SEED), "--env.at", "3", "--log-every", "1e-9", "--run", "faulty"]


def failed_run(tmp_path: Path, capfd: Capture, *argv: str) -> tuple[str, dict[str, Any]]:
    """The error output of a training that fails, and its summary."""
    code = cli.main(["train", *argv, *SMALL, *FAULT, "--runs-dir", str(tmp_path)])
    summary = json.loads((tmp_path / "faulty" / "summary.json").read_text())
    assert (code, summary["exit_code"], summary["ended"]) == (1, 1, "failed")
    output = capfd.readouterr().err
    assert output == f"freewheel: {summary['error']}\n"
    return output, summary


def assert_accounted(tmp_path: Path, summary: dict[str, Any], produced: int) -> None:
    """One update was made and saved; every later row was dropped and counted."""
    assert (summary["produced"], summary["trained"], summary["updates"]) == (produced, 32, 1)
    assert (summary["queued"], summary["open"], summary["dropped"]) == (0, 0, {"shutdown": produced - 32})
    latest = checkpoint.load(tmp_path / "faulty" / "checkpoints", "latest")
    assert (latest.step, latest.warnings, latest.about["version"]) == (32, (), 1)
    assert checkpoint.fingerprint(latest.params) == summary["weights_sha256"]


SERIAL = {place: ["--placement", place] for place in ("inline", "processes")} | {"sequential": ["--mode", "sequential"]}
SERIALLY = pytest.mark.parametrize("place", SERIAL.values(), ids=SERIAL)


@SERIALLY
@pytest.mark.parametrize(
    ("name", "cause", "text"),
    [
        ("Raises", "env_error", "raised ValueError: boom"),
        ("WrongShape", "shape", "gave a wrong observation in step(): "),
        ("ReturnsNaN", "nan", "gave an observation that is not finite"),
    ],
)
def test_an_env_that_fails_once_costs_its_episode_in_serial_modes_too(
    tmp_path: Path, capsys: Capture, place: list[str], name: str, cause: str, text: str
) -> None:
    world = f"tests.support.worlds:{name}"
    assert cli.main(["train", world, *place, *SMALL, *FAULT, "--runs-dir", str(tmp_path)]) == 0
    output, summary = capsys.readouterr().out, json.loads((tmp_path / "faulty" / "summary.json").read_text())
    assert summary["dropped"].pop(cause) == 1
    assert summary["trained"] == 320
    # Less than a step of all lanes is produced beside what it cost.
    assert summary["produced"] == 321 + summary["dropped"].get("stale", 0)
    (first,) = (line for line in output.splitlines() if line.startswith(f"lane 2 of {world} {text}"))
    assert f"episode 1, seed {FAULTY_SEED}, step 3, last action" in first
    assert output.count("Traceback (most recent call last)") == (name == "Raises")
    if name == "Raises":
        assert 'raise ValueError("boom")' in output
        assert "freewheel/envs" not in output


def test_serial_modes_learn_the_same_from_an_env_that_fails(tmp_path: Path) -> None:
    """One step in fifty fails, by the seed of its episode."""
    weights = set()
    for name, place in SERIAL.items():
        argv = ["train", "tests.support.worlds:Raises", *place, *SMALL, "--env.rate", "0.02"]
        assert cli.main([*argv, "--runs-dir", str(tmp_path), "--run", name]) == 0
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["dropped"]["env_error"] > 3
        weights.add(summary["weights_sha256"])
    assert len(weights) == 1


@SERIALLY
def test_a_run_whose_lanes_all_fail_ends_with_their_traceback(tmp_path: Path, capfd: Capture, place: list[str]) -> None:
    argv = ["train", "tests.support.worlds:Breaks", *place, "--num-envs", "2", "--evals", "0", *BROKEN]
    assert cli.main([*argv, "--steps", "320", "--run", "faulty", "--runs-dir", str(tmp_path)]) == 1
    first, *_, last = capfd.readouterr().err.splitlines()
    assert first.startswith("freewheel: no lane of tests.support.worlds:Breaks is left: lane 1 of ")
    assert "was given up after 3 failures in a row; the last: lane 1 of tests.support.worlds:Breaks raised" in first
    assert last == "ValueError: boom"
    summary = json.loads((tmp_path / "faulty" / "summary.json").read_text())
    assert (summary["exit_code"], summary["ended"]) == (1, "failed")
    assert summary["produced"] == sum(summary["dropped"].values())


@pytest.mark.parametrize(
    ("world", "what"),
    [
        pytest.param(["tests.support.worlds:Hangs"], "did not answer within 0.5 s", marks=pytest.mark.system),
        (["tests.support.worlds:Hangs", "--env.deaf", "true"], "did not answer within 0.5 s"),
        (["tests.support.worlds:Dies"], "died (exit code -9)"),
    ],
    ids=["hangs", "hangs, ignores SIGTERM", "dies"],
)
def test_a_dead_or_hung_process_ends_a_run_in_time(tmp_path: Path, capfd: Capture, world: list[str], what: str) -> None:
    output, summary = failed_run(tmp_path, capfd, *world, "--placement", "processes", "--step-timeout", "0.5")
    assert f"lane 2 of {world[0]} {what} (episode 1, seed {FAULTY_SEED}, step 3, last action" in output
    assert_accounted(tmp_path, summary, produced=32 + 2 * 4)


def test_an_env_that_cannot_start_leaves_no_run(tmp_path: Path, capfd: Capture) -> None:
    for name in ("Raises", "Dies", "Hangs"):
        argv = [f"tests.support.worlds:{name}", "--env.at", "0", "--placement", "processes"]
        assert cli.main(["train", *argv, "--reset-timeout", "0.5", "--runs-dir", str(tmp_path)]) == 1
        answer = capfd.readouterr().err.splitlines()[0]
        assert re.match(rf"freewheel: (lane 0 of )?tests.support.worlds:{name} .*reset.*seed 0", answer)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("where", "error", "dropped"),
    [
        ("freewheel.run.evaluation.players.scored", ZeroDivisionError("of ours"), {}),
        ("freewheel.learn.ppo.numpy_engine.NumpyEngine.improve", MemoryError("too large"), {"shutdown": 128}),
    ],
)
def test_a_bug_of_ours_is_in_the_summary_and_the_rows_of_an_update_that_fails_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception, dropped: dict[str, int]
) -> None:
    def broken(*_: Any) -> None:
        raise error

    monkeypatch.setattr(where, broken)
    few = {"num_envs": 2, "num_steps_per_env": 64, "steps": 128}
    with pytest.raises(type(error)):
        freewheel.train("tests.support.worlds:Counter", quiet=True, runs_dir=tmp_path, run="x", options=few)
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert (summary["ended"], summary["exit_code"], summary["error"]) == ("failed", 1, str(error))
    assert (summary["produced"], summary["dropped"]) == (128, dropped)
    assert summary["trained"] == 128 - sum(dropped.values())


PLACE = r"episode \d+, seed \d+, step \d+, last action [01]"


@pytest.mark.parametrize("mode", modes("batch"))
def test_an_env_that_raises_sometimes_does_not_stop_training(mode: str, tmp_path: Path, capsys: Capture) -> None:
    """Two kinds of error in 1 % of all steps: each is shown once with its traceback, all are counted."""
    argv = ["train", world("Faulty"), "--env.how", "raises variously", "--env.rate", "0.01", *SMALL_ARGV]
    argv += ["--mode", mode, "--workers", "3", "--num-envs", "3", "--log-every", "0.2"]
    argv += ["--steps", "200000" if LONG else "2000", "--runs-dir", str(tmp_path), "--run", "bumpy"]
    assert cli.main(argv) == 0
    output = capsys.readouterr().out
    summary = json.loads((tmp_path / "bumpy" / "summary.json").read_text())
    assert (summary["ended"], summary["exit_code"]) == ("steps", 0)
    assert (summary["workers_lost"], summary["worker_restarts"]) == (0, 0)
    assert summary["dropped"]["env_error"] > 0.004 * summary["produced"]
    assert summary["produced"] == summary["trained"] + sum(summary["dropped"].values())
    for error in ("ValueError: boom", "KeyError: 'bang'"):
        first = re.findall(rf"^lane [0-2] of \S+:Faulty raised {error} \(({PLACE})\)$", output, re.MULTILINE)
        assert len(first) == output.count(f"\n{error}\n") == 1, output
    assert output.count("Traceback (most recent call last)") == 2


#: Reports about faulty_worlds.INVALID; those that differ only in numbers are shown once for each lane.
REPORTS = (
    r"gave an observation that is not finite: \[nan nan nan\]",
    r"gave a reward that is not finite: inf",
    r"gave an observation that is not finite: \[.*-inf.*\]",
    r"gave a wrong observation in step\(\): .*\(3,\).*\([12],\)",
    r"gave a wrong observation in step\(\): .*None",
    r"gave a wrong observation in step\(\): .*float32.*(<U1|complex)",
)


@pytest.mark.parametrize("mode", modes("episodes"))
def test_invalid_answers_are_dropped_and_reported(mode: str, tmp_path: Path) -> None:
    """Every invalid answer drops a row (in episodes, also the earlier rows of its episode)."""
    args = {"how": "invalid answers", "at": 12, "folder": tokens(tmp_path, 8)}
    with trial(world("Faulty"), mode, workers=2, num_envs=2 if mode == "episodes" else 4, env_args=args) as on:
        on.run(lambda: not list(tmp_path.glob("token-*")))
        each = 12 if mode == "episodes" else 1
        on.run(lambda: on.dropped == {"nan": 3 * each, "shape": 5 * each})
        on.learn(2)
        assert (on.supervisor.losses, on.audit.gaps > 0) == ([], mode == "episodes")
        assert finite(on.learner.snapshot())
        place = rf" \({PLACE}\)"
        on.run(lambda: all(re.search(rf"lane \d of \S+:Faulty {what}.*{place}", on.shown) for what in REPORTS))


@pytest.mark.parametrize(("mode", "how", "cause"), [("batch", "nan", "nan"), ("continuous", "raises", "env_error")])
def test_a_lane_that_fails_too_often_is_given_up(mode: str, how: str, cause: str) -> None:
    """Lane 2, the first of two envs of worker 1, fails at the fourth step of every episode; lane 3 continues."""
    args = {"how": how, "only": 1, "envs": 1, "at": 4}
    with trial(world("Faulty"), mode, workers=2, num_envs=4, env_args=args) as on:
        on.run(lambda: "given up" in on.shown)
        on.learn(5)
        assert on.dropped == {cause: 3}
        assert on.supervisor.losses == []
        (report,) = re.findall(r"^lane 2 of .* was given up after 3 failures in a row.*$", on.shown, re.MULTILINE)
        assert re.search(PLACE, report)
        assert finite(on.learner.snapshot())


def test_a_worker_whose_only_lane_was_given_up_is_given_up() -> None:
    """In episodes a worker has one lane: it is tried in three processes before the worker is given up."""
    with trial(world("Faulty"), "episodes", workers=3, num_envs=3, env_args={"how": "nan", "only": 1, "at": 4}) as on:
        on.run(lambda: on.supervisor.given_up == 1)
        on.learn(3)
        # Each process ends at its third failure; the three good rows before it are dropped when it is replaced.
        assert on.dropped == {"nan": 3 * 2 * 4, "worker_death": 2 * 3}
        on.run(lambda: on.shown.count("worker 1 ended (exit code 4) and is given up\nno lane of") == 1)
        assert on.shown.count("worker 1 ended (exit code 4) and is replaced\nno lane of") == 2


@pytest.mark.parametrize("mode", modes("continuous"))
def test_an_env_may_overwrite_its_last_observation(mode: str) -> None:
    with trial(world("ReusesArray"), mode, workers=2, num_envs=2) as on:
        on.learn(10)
        assert on.dropped == {}
