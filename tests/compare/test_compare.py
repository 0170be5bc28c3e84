"""`freewheel compare` from beginning to end, with real trainings that take a moment."""

from __future__ import annotations

import html
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from freewheel.cli.main import main
from freewheel.compare import table
from freewheel.compare.command import usual_folder
from freewheel.compare.results import Results
from freewheel.compare.summary import summarised
from freewheel.compare.trainings.cases import Case, Given
from freewheel.compare.trainings.measuring import jobs
from freewheel.compare.verdict import judged
from freewheel.timeline.model import Timeline
from tests.support.comparison import measured
from tests.support.places import ROOT
from tests.support.runs import IDENTITY, assert_balanced

SMALL = ("--num-envs", "4", "--num-steps-per-env", "16", "--steps", "256", "--repeats", "1", "--workers", "2")


def test_a_mode_that_fails_is_explained_and_the_others_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    env = "tests.support.faulty_worlds:NotInWorkers"
    code = main(["compare", env, "--modes", "sequential,batch", *SMALL, "--out", str(out)])
    shown = capsys.readouterr().out
    assert code == 3
    results = Results.read(out)
    assert [row.mode for row in results.rows] == ["sequential"]
    for row in results.rows:
        assert (row.trained, row.updates) == (256, 4)
        assert_balanced(vars(row))
    failed = results.case("batch").failed
    assert failed is not None
    assert "no licence for another process" in failed
    assert "batch failed: every worker was given up" in shown
    assert "RuntimeError: this simulator has no licence for another process\n" in shown
    assert "Equal work by the ledger: 256 rows trained and 4 updates in each of 1 training." in shown
    assert results.recommendation is not None
    assert results.recommendation.command in shown
    text = (out / "table.md").read_text()
    assert f"{results.recommendation.sentence}\n\n    {results.recommendation.command}\n" in text
    assert f"{results.summary[0].steps_per_s.median:,.0f}" in text
    assert {path.name for path in (out / "runs").iterdir()} == {"sequential-r1", "sequential-timeline", "batch-r1"}
    assert set(results.timelines) == {"sequential"}
    drawn = Timeline.from_json(results.timelines["sequential"])
    assert {"step", "update"} <= set(drawn.kinds())
    assert results.recommendation.command in html.unescape((out / "report.html").read_text())


def test_a_dry_run_says_what_would_be_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sys.path.insert(0, str(ROOT))
    try:
        assert main(["compare", IDENTITY, "--dry-run", "--modes", "sequential,episodes", *SMALL]) == 0
    finally:
        sys.path.remove(str(ROOT))
    shown = capsys.readouterr().out
    assert "--steps 256: 4 updates of 64 rows in every mode" in shown
    assert "episodes has 4 workers instead of 2: one for each of the 4 envs" in shown
    assert "\n2 trainings, eta 0:1" in shown
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_what_is_there_and_nothing_running(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [
        "compare",
        IDENTITY,
        "--modes",
        "sequential,lockstep",
        "--num-envs",
        "4",
        "--out",
        str(out),
        "--repeats",
        "2",
    ]
    command = [
        sys.executable,
        "-m",
        "freewheel",
        *words,
        "--num-steps-per-env",
        "16",
        "--steps",
        "512",
        "--no-timelines",
    ]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (out / "compare.json").is_file():
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    results = Results.read(out)
    assert results.ended == "interrupted"
    assert 1 <= len(results.rows) < 4
    assert "Interrupted: " in shown
    assert (out / "table.md").is_file()
    holders = [pid for pid in os.listdir("/proc") if pid.isdigit() and str(out) in _command_line(pid)]
    assert holders == []


def _command_line(pid: str) -> str:
    try:
        return Path("/proc", pid, "cmdline").read_text(errors="replace")
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mode", "batch"], "--mode: every mode is compared: choose them with --modes"),
        (["--minutes", "1"], "--minutes: every mode does the same work"),
        (["--trace"], "--trace: a short training of every mode is recorded"),
        (["--modes", "batch,nonsense"], "unknown mode 'nonsense'"),
        (["--modes", "lockstep", "--max-lag", "2"], "--max-lag is an option of mode continuous; add it to --modes"),
        (["--scale", "1,x"], "--scale must be numbers of workers like 1,2,4,8, not 1,x"),
        (["--scale", "0,2"], "--scale takes 1 to 10,000 workers"),
        (["--repeats", "0"], "--repeats must be positive"),
        (["--nonsense", "1"], "unknown option --nonsense"),
        (["--lr", "-1"], "--ppo.lr"),
    ],
)
def test_what_is_wrong_is_told_before_anything_starts(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_folder_that_holds_something_is_not_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    assert main(["compare", IDENTITY, "--out", str(tmp_path)]) == 1
    assert "is not empty; choose another folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_every_mode_gets_the_options_that_it_has() -> None:
    given = Given.read([IDENTITY, "--max-lag", "3", "--lr", "0.01", "--env.n", "5", "--workers", "2"], trust=False)
    assert given.argv("continuous", num_envs=8) == (
        IDENTITY, "--mode", "continuous", "--max-lag", "3", "--lr", "0.01", "--env.n", "5", "--workers", "2", "--num-envs", "8",
    )  # fmt: skip
    assert given.argv("lockstep", num_envs=8, lr=None) == (
        IDENTITY,
        "--mode",
        "lockstep",
        "--env.n",
        "5",
        "--num-envs",
        "8",
    )


def test_repeats_are_interleaved_and_begin_with_another_mode_each() -> None:
    given = Given(IDENTITY, {})
    cases = [Case(label=mode, mode=mode, given=given) for mode in ("sequential", "lockstep", "batch")]
    planned = jobs(cases, {"batch": 2}, (5, 6))
    assert [(job.name, job.seed) for job in planned] == [
        ("sequential-r1", 5), ("lockstep-r1", 5), ("batch-r1", 5), ("batch-r1-2", 5),
        ("lockstep-r2", 6), ("batch-r2", 6), ("batch-r2-2", 6), ("sequential-r2", 6),
    ]  # fmt: skip


def test_the_table_holds_the_figures_of_the_rows() -> None:
    results = measured()
    results = replace(results, ideal=replace(results.ideal, steps_per_s=5000.0))
    text = table.markdown(judged(summarised(results)))
    line = next(line for line in text.splitlines() if line.startswith("| continuous"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["continuous", "8 x 1", "3,100 (3,050 .. 3,150)", "31", "54 min", "3.10x", "62%"]


def test_a_partial_comparison_says_so_and_json_is_plain() -> None:
    results = measured()
    part = judged(summarised(replace(results, rows=results.rows[:5], ended="interrupted")))
    text = table.markdown(part)
    assert "Interrupted: 5 trainings in 2 of 3 repeats are here." in text
    json.dumps(part.to_json(), allow_nan=False)
    nothing = judged(summarised(replace(results, rows=())))
    assert "Nothing was measured." in table.markdown(nothing)
