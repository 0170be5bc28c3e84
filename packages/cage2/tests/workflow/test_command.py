"""`freewheel workflow search` as a user runs it: plans, searches, mistakes, and resuming after a kill."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from freewheel.cli import main as cli
from freewheel.config import flags
from freewheel_cage2.workflow.command import SearchOptions, begin, read
from freewheel_cage2.workflow.search import WorkflowTrial
from freewheel_cage2.workflow.trials import SAMPLING, STATE, TRAINING, TRIALS, SearchFiles
from packages.cage2.tests.support.tables import rows_of
from tests.support.golden import assert_golden
from tests.support.places import ROOT

QUICK = [
    "--max-episode-steps", "10", "--mode", "lockstep", "--placement", "inline", "--num-envs", "4", "--num-steps-per-env", "10",
    "--window", "4", "--plateau", "0", "--evals", "0", "--seed", "1",
]  # fmt: skip
SMALL = [*QUICK, "--total-episodes", "40", "--max-episodes-per-workflow", "8", "--compliance-threshold", "0.05"]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def trials_of(folder: Path) -> list[WorkflowTrial]:
    return SearchFiles(folder).read()[1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished search and its output. Tests that change it must copy it."""
    folder, output = tmp_path_factory.mktemp("finished"), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(output):
        assert cli.main(["workflow", "search", *SMALL, "--run", "mine"]) == 0
    return folder / "runs" / "mine", output.getvalue()


@pytest.fixture
def mine(runs: Path, finished: tuple[Path, str]) -> Path:
    """A copy of the finished search."""
    return Path(shutil.copytree(finished[0], runs / "mine"))


def test_a_search_tries_orders_and_reports_the_best(finished: tuple[Path, str]) -> None:
    folder, output = finished
    trials = trials_of(folder)
    assert len(trials) >= 5
    assert re.findall(r"^trial (\d+) of about \d+: ", output, re.M) == [str(one + 1) for one in range(len(trials))]
    assert sum(trial.outcome.episodes for trial in trials) == 40
    state = json.loads((folder / STATE).read_text())
    assert state["best"]["workflow"] in output.splitlines()[-1] + output.splitlines()[-2]
    assert output.count("chosen") == 1
    assert {path.name for path in (folder / TRIALS).iterdir()} == {trial.outcome.run for trial in trials}
    log = rows_of(folder / TRAINING)
    assert int(log[-1]["total_episodes"]) == 40
    for row in (*log, *rows_of(folder / SAMPLING)):
        assert float(row["env_return"]) + float(row["alignment"]) == pytest.approx(float(row["total_reward"]), abs=1e-3)
    assert any(row["init"] for row in rows_of(folder / SAMPLING))
    assert cli.main(["eval", str(folder / TRIALS / trials[-1].outcome.run), "--episodes", "2"]) == 0


def test_the_ablations_are_what_they_say(runs: Path) -> None:
    argv = ["--strategy", "random", "--no-warm-start", "--fixed-episodes", "--run", "mine"]
    assert cli.main(["workflow", "search", *SMALL, *argv]) == 0
    trials = trials_of(runs / "mine")
    assert [trial.outcome.episodes for trial in trials] == [8] * 5
    assert {trial.proposal.init for trial in trials} == {None}
    assert {trial.outcome.ended for trial in trials} == {"episodes"}


@pytest.mark.parametrize(("strategy", "count"), [("plain", 1), ("canonical", 6)])
def test_the_baselines_have_the_same_episodes(runs: Path, strategy: str, count: int) -> None:
    argv = ["workflow", "search", *QUICK, "--total-episodes", "48", "--strategy", strategy, "--run", "mine"]
    assert cli.main(argv) == 0
    trials = trials_of(runs / "mine")
    assert (len(trials), sum(trial.outcome.episodes for trial in trials)) == (count, 48)


@pytest.mark.parametrize("whole", [3, pytest.param(0, marks=pytest.mark.system)])
def test_a_killed_search_resumes_to_the_same_result(mine: Path, finished: tuple[Path, str], whole: int) -> None:
    """A kill during a trial leaves the earlier trials, an incomplete run, and its rows in the log."""
    state = json.loads((mine / STATE).read_text())
    (mine / STATE).write_text(json.dumps({**state, "trials": state["trials"][:whole]}))
    assert cli.main(["workflow", "search", "--run", "mine", "--resume"]) == 0
    assert trials_of(mine) == trials_of(finished[0])
    assert strip(rows_of(mine / TRAINING)) == strip(rows_of(finished[0] / TRAINING))
    assert rows_of(mine / SAMPLING) == rows_of(finished[0] / SAMPLING)


def strip(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def shell(*argv: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "freewheel", "workflow", "search", *argv]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.system
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_a_real_kill_can_come_at_any_time(runs: Path, number: signal.Signals, code: int) -> None:
    many = [*QUICK, "--strategy", "random", "--total-episodes", "400000", "--max-episodes-per-workflow", "40"]
    search = shell(*many, "--compliance-threshold", "1", "--run", "cut")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and len(list((runs / "cut" / TRIALS).glob("*/summary.json"))) < 2:
        assert search.poll() is None, search.communicate()
        time.sleep(0.05)
    search.send_signal(number)
    output, complaint = search.communicate(timeout=60)
    assert (search.returncode, complaint) == (code, "")
    assert ("--run cut --resume continues" in output) == (code == 143)
    before = trials_of(runs / "cut")
    assert before
    spent = sum(trial.outcome.episodes for trial in before)
    assert cli.main(["workflow", "search", "--run", "cut", "--resume", "--total-episodes", str(spent + 40)]) == 0
    after = trials_of(runs / "cut")
    assert after[: len(before)] == before
    assert len(after) == len(before) + 1


def test_a_search_that_is_over_can_be_given_more(mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["workflow", "search", "--run", "mine", "--resume", "--dry-run"]) == 0
    assert "finished: there is nothing left to try" in capfd.readouterr().out
    assert cli.main(["workflow", "search", "--run", "mine", "--resume", "--total-episodes", "48"]) == 0
    assert sum(trial.outcome.episodes for trial in trials_of(mine)) == 48


def test_a_dry_run_starts_nothing(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["workflow", "search", *SMALL, "--dry_run"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "search   gp: 40 episodes, 0 of them used, at most 8 per workflow, to compliance 0.05"
    assert "collect  lockstep: 4 envs x 10 steps = 40 rows an update" in lines
    assert not runs.exists()


def resolved(*argv: str) -> tuple[dict[str, Any], Any]:
    options, passed, _ = read(argv)
    task = begin(options, passed)
    proposal = task.search.propose()
    assert proposal is not None
    return dict(task.training), task.trainer().config(proposal)


def test_the_known_flags_reach_the_training(runs: Path) -> None:
    training, config = resolved(
        "--n-workers", "2", "--mode", "episodes", "--episodes-per-update", "50", "--red-agent", "RedMeanderAgent",
        "--alignment-lambda", "12", "--ppo.lr", "0.5", "--env.green", "true", "--max-episodes-per-workflow", "500",
    )  # fmt: skip
    assert (config.mode, config.collector.workers, config.collector.episodes_per_update) == ("episodes", 2, 50)
    given = {"red_agent": "RedMeanderAgent", "alignment_lambda": 12.0, "green": True}
    assert {**config.env.args, "memory": None} == {**given, "memory": None}  # the preset's
    assert (config.learner.lr, config.run.limits.episodes, config.run.limits.steps) == (0.5, 500, 50_000)
    assert training["preset"] == "cage2"


def test_episodes_of_an_update_become_rows_where_a_mode_counts_those(runs: Path) -> None:
    _, config = resolved(*QUICK, "--episodes-per-update", "6")
    assert config.run.num_steps_per_env == 15  # 6 episodes of 10 steps over 4 envs


def test_the_real_simulator_is_played_in_whole_episodes_and_not_mostly_evaluated(runs: Path) -> None:
    training, config = resolved("cyborg:Scenario2", "--n-workers", "2", "--max-episode-steps", "30")
    assert config.env.id == "freewheel_cage2.workflow.envs:RealWorkflow"
    assert config.env.args["max_episode_steps"] == 30
    assert (config.mode, config.collector.workers, config.collector.episodes_per_update) == ("episodes", 2, 100)
    assert training["eval_episodes"] == 10
    assert SearchOptions(env="cyborg:Scenario2").training({"eval_episodes": 3})["eval_episodes"] == 3
    assert "eval_episodes" not in SearchOptions(env="freewheel/Cage2-v0").training({}), "the preset's"


WRONG = [
    ("search --strategy best", "--strategy must be one of gp, greedy, random, canonical, plain, not best"),
    ("search --total-episodes 0", "--total-episodes must be positive, not 0"),
    ("search --compliance-threshold 2", "--compliance-threshold must lie in 0..1, not 2.0"),
    ("search --gp-beta -1", "--gp-beta must not be negative, but is -1.0"),
    ("search --ppo.lrr 1", "unknown option --ppo.lrr; did you mean '--ppo.lr'?"),
    (
        "search --mode lockstep --n-workers 2",
        "--workers is an option of mode batch, continuous, episodes or ray, not of lockstep",
    ),
]


def test_mistakes_of_a_search_have_one_line(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for argv in ("", "serach", "search CartPole-v1", "search --resume", "search --run none --resume", "search --run ../up",
                 "search A B"):  # fmt: skip
        assert cli.main(["workflow", *argv.split()]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert_golden(__file__, "mistakes", err)
    assert not runs.exists()


@pytest.mark.parametrize(("argv", "text"), WRONG)
def test_mistakes_in_options_have_one_line(runs: Path, capfd: pytest.CaptureFixture[str], argv: str, text: str) -> None:
    assert cli.main(["workflow", *argv.split()]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"freewheel: {text}")
    assert not runs.exists()


@pytest.mark.usefixtures("mine")
def test_a_search_is_not_overwritten_and_its_settings_stay(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["workflow", "search", *SMALL, "--run", "mine"]) == 1
    assert "'mine' exists in runs; add --resume to continue it, or choose another --run" in capfd.readouterr().err
    assert cli.main(["workflow", "search", "--run", "mine", "--resume", "--gp-beta", "1"]) == 2
    assert "--gp-beta cannot be changed in a search that is resumed; leave it out" in capfd.readouterr().err


def test_help_lists_every_option(capfd: pytest.CaptureFixture[str]) -> None:
    for argv in (["workflow", "--help"], ["workflow", "search", "--help"]):
        assert cli.main(argv) == 0
        shown = " ".join(capfd.readouterr().out.replace("│", " ").split())
        for name in flags.option_types(SearchOptions):
            assert f" --{name.replace('_', '-')} " in shown
        assert "Search for the best workflow" in shown
