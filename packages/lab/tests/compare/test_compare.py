"""Tests of the whole command `freewheel compare`, with real trainings that take a moment."""

from __future__ import annotations

import html
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from freewheel.cli.main import main
from freewheel.errors import MeasureError
from freewheel.timeline.chrome import TRACE, encode
from freewheel.timeline.model import Timeline
from freewheel_lab.bench.measure import Measurement, TrainingRequest
from freewheel_lab.compare import comparison, table
from freewheel_lab.compare.command import usual_folder
from freewheel_lab.compare.results import Results
from freewheel_lab.compare.summary import summarised
from freewheel_lab.compare.trainings import measuring
from freewheel_lab.compare.trainings.cases import Case, GivenOptions
from freewheel_lab.compare.verdict import judged
from freewheel_lab.plots import picture
from packages.lab.tests.support.comparison import measured, row
from tests.support.golden import assert_golden
from tests.support.places import ROOT
from tests.support.runs import IDENTITY, assert_balanced
from tests.support.timelines import made
from tests.support.trainers import wait_until

Capture: TypeAlias = pytest.CaptureFixture[str]
SMALL = ("--num-envs", "4", "--num-steps-per-env", "16", "--steps", "256", "--repeats", "1")
NO_LICENCE = "RuntimeError: this simulator has no licence for another process"


def pretended(order: TrainingRequest, watch: Callable[[Any], None] = lambda _: None) -> Measurement:
    """Stands in for a training in another process: returns what `freewheel_lab.bench.measure.measure` would."""
    order.path.mkdir(parents=True)
    if order.name.startswith("batch"):
        raise MeasureError(f"every worker was given up\n\n{NO_LICENCE}")
    (order.path / TRACE).write_bytes(encode(made()))
    return row("sequential", 1, 1000.0, trained=256, produced=256, updates=4, dropped={})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The trainings are made up, and no pictures are drawn."""
    for module in (comparison, measuring):
        monkeypatch.setattr(module, "measure", pretended)
    monkeypatch.setattr(picture, "write", lambda *_, **__: None)
    return monkeypatch


@pytest.mark.timeout(240)
@pytest.mark.parametrize("trainings", ["made up", pytest.param("real", marks=pytest.mark.system)])
def test_a_mode_that_fails_is_explained_and_the_others_are_reported(
    tmp_path: Path, capsys: Capture, request: pytest.FixtureRequest, trainings: str
) -> None:
    if trainings == "made up":
        request.getfixturevalue("quick")
    out = tmp_path / "out"
    env = "tests.support.faulty_worlds:NotInWorkers"
    code = main(["compare", env, "--modes", "sequential,batch", "--workers", "2", *SMALL, "--out", str(out)])
    shown = capsys.readouterr().out
    assert code == 3
    results = Results.read(out)
    assert [(row.mode, row.trained, row.updates) for row in results.rows] == [("sequential", 256, 4)]
    assert_balanced(vars(results.rows[0]))
    failed = results.case("batch").failed
    assert failed is not None
    assert NO_LICENCE in failed
    assert "batch failed: every worker was given up" in shown
    assert f"{NO_LICENCE}\n" in shown
    assert "Equal work by the ledger: 256 rows trained and 4 updates in each of 1 training." in shown
    assert results.recommendation is not None
    assert results.recommendation.command in shown
    text = (out / "table.md").read_text()
    assert f"{results.recommendation.sentence}\n\n    {results.recommendation.command}\n" in text
    assert f"{results.summary[0].steps_per_s.median:,.0f}" in text
    assert {path.name for path in (out / "runs").iterdir()} == {"sequential-r1", "sequential-timeline", "batch-r1"}
    assert set(results.timelines) == {"sequential"}
    assert {"step", "update"} <= set(Timeline.from_json(results.timelines["sequential"]).kinds())
    assert results.recommendation.command in html.unescape((out / "report.html").read_text())


def test_a_mode_that_is_not_installed_is_no_failure(tmp_path: Path, quick: pytest.MonkeyPatch, capsys: Capture) -> None:
    quick.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["compare", IDENTITY, "--modes", "sequential,ray", *SMALL, "--out", str(tmp_path / "out")]) == 0
    assert "ray was skipped: not installed: pip install 'freewheel-ray[ray]'\n" in capsys.readouterr().out


def test_an_interrupt_leaves_what_is_there(tmp_path: Path, quick: pytest.MonkeyPatch, capsys: Capture) -> None:
    def interrupted(order: TrainingRequest, watch: Callable[[Any], None]) -> Measurement:
        if order.name == "sequential-r2":
            signal.raise_signal(signal.SIGINT)
            watch(None)
        return pretended(order)

    quick.setattr(measuring, "measure", interrupted)
    words = ["--modes", "sequential", *SMALL, "--repeats", "3", "--out", str(tmp_path / "out")]
    assert main(["compare", IDENTITY, *words]) == 130
    results = Results.read(tmp_path / "out")
    assert (results.ended, len(results.rows)) == ("interrupted", 1)
    assert "Interrupted: " in capsys.readouterr().out


@pytest.mark.system
@pytest.mark.timeout(240)
def test_ctrl_c_leaves_nothing_running(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["compare", IDENTITY, "--modes", "sequential,lockstep", *SMALL, "--repeats", "2", "--no-timelines"]
    command = [sys.executable, "-m", "freewheel", *words, "--out", str(out)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wait_until((out / "compare.json").is_file, 120.0, "no training has ended")
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert 1 <= len(Results.read(out).rows) < 4
    assert "Interrupted: " in shown
    assert (out / "table.md").is_file()
    assert [pid for pid in os.listdir("/proc") if pid.isdigit() and str(out) in _command_line(pid)] == []


def _command_line(pid: str) -> str:
    try:
        return Path("/proc", pid, "cmdline").read_text(errors="replace")
    except OSError:
        return ""


def test_a_dry_run_says_what_would_be_done(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    assert main(["compare", IDENTITY, "--dry-run", "--modes", "sequential,episodes", "--workers", "2", *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "--steps 256: 4 updates of 64 rows in every mode" in shown
    assert "episodes has 4 workers instead of 2: one for each of the 4 envs" in shown
    assert "\n2 trainings, eta 0:1" in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mode", "batch"], "--mode: all modes are compared: choose them with --modes"),
        (["--minutes", "1"], "--minutes: all modes do the same work"),
        (["--trace"], "--trace: a short training of every mode is recorded"),
        (["--modes", "batch,nonsense"], "unknown mode 'nonsense'"),
        (["--modes", "lockstep", "--max-lag", "2"], "--max-lag is an option of mode continuous; add it to --modes"),
        (["--scale", "1,x"], "--scale must be numbers of workers like 1,2,4,8, not 1,x"),
        (["--scale", "0,2"], "--scale accepts 1 to 10,000 workers"),
        (["--repeats", "0"], "--repeats must be positive"),
        (["--nonsense", "1"], "unknown option --nonsense"),
        (["--lr", "-1"], "--ppo.lr"),
    ],
)
def test_what_is_wrong_is_told_before_a_start(words: list[str], message: str, tmp_path: Path, capsys: Capture) -> None:
    assert main(["compare", IDENTITY, "--out", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ("CartPole-v1", "compare-CartPole-v1-ppo"),
        ("./envs/warehouse.py:Warehouse", "compare-warehouse_Warehouse-ppo"),
        ("warehouse.py", "compare-warehouse-ppo"),
        ("freewheel/Straggler-v0", "compare-freewheel_Straggler-v0-ppo"),
    ],
)
def test_the_folder_is_named_after_the_environment(env: str, name: str) -> None:
    assert usual_folder(env, "ppo") == name


def test_a_folder_that_holds_something_is_not_written_to(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "mine").touch()
    assert main(["compare", IDENTITY, "--out", str(tmp_path)]) == 1
    assert "is not empty; choose another folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_every_mode_gets_the_options_that_it_has() -> None:
    words = [IDENTITY, "--max-lag", "3", "--lr", "0.01", "--env.n", "5", "--workers", "2"]
    given = GivenOptions.read(words, trust=False)
    assert given.argv("continuous", num_envs=8) == (
        IDENTITY, "--mode", "continuous", "--max-lag", "3", "--lr", "0.01", "--env.n", "5", "--workers", "2", "--num-envs", "8",
    )  # fmt: skip
    assert given.argv("lockstep", num_envs=8, lr=None) == (
        IDENTITY, "--mode", "lockstep", "--env.n", "5", "--num-envs", "8",
    )  # fmt: skip


def test_repeats_are_interleaved_and_begin_with_another_mode_each() -> None:
    given = GivenOptions(IDENTITY, {})
    cases = [Case(label=mode, mode=mode, given=given) for mode in ("sequential", "lockstep", "batch")]
    planned = measuring.jobs(cases, (5, 6))
    assert [(job.name, job.seed) for job in planned] == [
        ("sequential-r1", 5), ("lockstep-r1", 5), ("batch-r1", 5),
        ("lockstep-r2", 6), ("batch-r2", 6), ("sequential-r2", 6),
    ]  # fmt: skip


def test_the_table_holds_the_figures_of_the_rows() -> None:
    results = measured()
    results = replace(results, ideal=replace(results.ideal, steps_per_s=5000.0))
    assert_golden(__file__, "table", table.markdown(judged(summarised(results))))


def test_a_partial_comparison_says_so_and_json_is_plain() -> None:
    results = measured()
    part = judged(summarised(replace(results, rows=results.rows[:5], ended="interrupted")))
    assert_golden(__file__, "table_of_an_interrupted_comparison", table.markdown(part))
    json.dumps(part.to_json(), allow_nan=False)
    assert "Nothing was measured." in table.markdown(judged(summarised(replace(results, rows=()))))
