"""Tests of `--seeds`: several runs of one command, their names, their table, their exit code and their end."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import psutil
import pytest

from freewheel.cli import main as cli
from freewheel.config.resolve import from_argv
from freewheel.errors import SetupError, UsageError
from freewheel.metrics.meter import Budget
from freewheel.rollout.probe import EnvCost
from freewheel.run.plan import Plan
from freewheel.run.planning import plan
from freewheel_lab.seeds import group as seeds
from freewheel_lab.seeds.group import SeedGroup, SeedRun
from tests.support.places import ROOT
from tests.support.runs import IDENTITY
from tests.support.trainers import wait_until

Capture: TypeAlias = pytest.CaptureFixture[str]
SMALL = ["--num-envs", "2", "--num-steps-per-env", "16", "--policy.hidden", "8", "--evals", "1", "--eval-episodes", "2"]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("1..5", [1, 2, 3, 4, 5]), ("7", [7]), ("1,2,7", [1, 2, 7]), ("1..3,9", [1, 2, 3, 9]), ("3, 1..3", [3, 1, 2])],
)
def test_seeds_are_ranges_and_lists(text: str, numbers: list[int]) -> None:
    assert seeds.read(text) == numbers


@pytest.mark.parametrize("text", ["5..1", "a", "1,", "1-5", "-1", "1...5", "0..1000", "1.5"])
def test_other_seeds_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--seeds must be like 1\.\.5 or 1,2,7 \(at most 1000 seeds\), not "):
        seeds.read(text)


@pytest.mark.parametrize(
    ("df", "quantile"), [(1, 12.706), (4, 2.776), (10, 2.228), (11, 2.201), (30, 2.042), (999, 1.962)]
)
def test_the_quantiles_of_students_t(df: int, quantile: float) -> None:
    assert seeds.student(df) == pytest.approx(quantile, rel=1e-3)


def group(folder: Path, *summaries: dict[str, Any] | None, codes: list[int] | None = None) -> SeedGroup:
    """Return runs that have ended with these summaries."""
    runs = [SeedRun(seed, folder / f"it-s{seed}", summary=found or {}) for seed, found in enumerate(summaries, 1)]
    for run, code in zip(runs, codes or [0] * len(runs), strict=True):
        run.code = code
    return SeedGroup("World  ppo  lockstep", folder / "it-seeds.json", runs, 2, Budget())


def test_the_table_has_mean_and_interval(tmp_path: Path) -> None:
    done = group(tmp_path, *({"final_eval": 10.0 * n, "best_eval": 100.0} for n in (1, 2, 3)))
    title, head, *rows, mean, spread, file = (line.split() for line in done.lines())
    assert (title, file) == (["World", "ppo", "lockstep:", "3", "seeds"], [str(tmp_path / "it-seeds.json")])
    assert head == ["seed", "final", "best", "time", "run"]
    assert rows[2] == ["3", "30.0", "100.0", "0:00", str(tmp_path / "it-s3")]
    assert mean[:3] == ["mean", "20.0", "100.0"]
    assert spread[:3] == ["±", f"{4.303 * 10 / math.sqrt(3):.1f}", "0.0"]


def test_a_run_that_failed_is_no_part_of_the_mean(tmp_path: Path) -> None:
    good = {"final_eval": 1.0, "best_eval": 2.0}
    done = group(tmp_path, good, good | {"final_eval": 99.0}, None, codes=[0, 1, 1])
    done.runs[1].error = "it broke"
    lines = list(done.lines())
    assert lines[3].endswith("it-s2 (exit code 1: it broke)")
    assert lines[5].split() == ["mean", "1.0", "2.0", "of", "1", "seeds"]
    assert "±" not in "".join(lines)


@pytest.mark.parametrize(("codes", "worst"), [([0, 0], 0), ([0, 3], 3), ([3, 1, 0], 1), ([1, 143], 143), ([2, 3], 2)])
def test_the_exit_code_is_the_worst(tmp_path: Path, codes: list[int], worst: int) -> None:
    assert group(tmp_path, *[None] * len(codes), codes=codes).exit_code == worst


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., Plan]:
    return lambda *argv: plan(from_argv([IDENTITY, *SMALL, "--runs-dir", str(tmp_path / "runs"), *argv]))


def test_groups_never_share_a_name(tmp_path: Path, planned: Callable[..., Plan]) -> None:
    usual, runs = planned(), tmp_path / "runs"
    names = [[path.name for path in (one.file, one.runs[1].path)] for one in (seeds.claim(usual, [4, 5]) for _ in "ab")]
    base = "tests.support.worlds_Identity-ppo-lockstep"
    assert names == [[f"{base}{part}-seeds.json", f"{base}{part}-s5"] for part in ("", "-2")]
    (runs / f"{base}-3-s5").mkdir()
    assert seeds.claim(usual, [5]).runs[0].path.name == f"{base}-4-s5"


def test_a_name_that_is_taken_is_refused(tmp_path: Path, planned: Callable[..., Plan]) -> None:
    (tmp_path / "runs" / "mine-s2").mkdir(parents=True)
    mine = planned("--run", "mine")
    with pytest.raises(SetupError, match=r"^'mine-s2' exists in .*runs; choose another --run or remove it$"):
        seeds.claim(mine, [1, 2])
    assert seeds.claim(mine, [1, 3]).file.name == "mine-seeds.json"
    with pytest.raises(SetupError, match=r"^'mine-seeds.json' exists in "):
        seeds.claim(mine, [7])


@pytest.mark.parametrize(
    ("argv", "duty", "memory", "count"),
    [
        ("", 1.0, 0, 6),
        ("", 0.01, 0, 12),  # a run uses at least half a core
        ("--placement processes", 1.0, 0, 3),
        ("--mode continuous --workers 2", 1.0, 0, 3),
        ("--mode continuous --workers 2", 0.5, 0, 6),
        ("--mode continuous --workers 8 --num-envs 8", 1.0, 0, 1),
        ("", 1.0, 1 << 30, 2),  # two envs of a gigabyte each, and five gigabytes are free
    ],
)
def test_as_many_at_once_as_the_machine_can_serve(
    planned: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, argv: str, duty: float, memory: int, count: int
) -> None:
    one = planned(*argv.split())
    one = replace(one, cost=EnvCost(spec=one.spec, wall=1.0, row=1.0, cpu=duty, memory=memory))
    monkeypatch.setattr("freewheel.rollout.probe.usable_cores", lambda: 6)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=5 << 30))
    assert seeds.at_once(one) == count
    assert seeds.group_of(one, range(99), jobs=7).at_once == 7
    assert seeds.group_of(one, [1]).at_once == 1


def test_a_dry_run_shows_the_plan_of_all(tmp_path: Path, capfd: Capture) -> None:
    argv = ["train", IDENTITY, "--seeds", "1..3", "--jobs", "2", "--dry-run", "--runs-dir", str(tmp_path / "runs")]
    assert cli.main([*argv, "--run", "mine"]) == 0
    lines, runs = capfd.readouterr().out.splitlines(), tmp_path / "runs"
    where = [f"runs     {runs / 'mine-s1'} to mine-s3", f"table    {runs / 'mine-seeds.json'}"]
    assert lines[-3:] == ["seeds    1, 2, 3: 2 at once", *where]
    assert not runs.exists()


@pytest.mark.system
def test_seeds_train_together_and_are_reported(tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    runs = tmp_path / "runs"
    argv = [IDENTITY, *SMALL, "--steps", "64", "--runs-dir", str(runs), "--run", "mine"]
    assert cli.main(["train", "--seeds", "3,4", *argv]) == 0
    table = json.loads((runs / "mine-seeds.json").read_text())
    assert (table["seeds"], table["exit_code"], table["command"][2:]) == ([3, 4], 0, argv)
    for seed, run in zip((3, 4), table["runs"], strict=True):
        assert run["path"] == str(runs / f"mine-s{seed}")
        assert json.loads((runs / f"mine-s{seed}" / "config.json").read_text())["seed"] == seed
        assert (run["env_steps"], run["ended"], run["error"]) == (64, "steps", None)
        assert "all steps taken" in (runs / f"mine-s{seed}" / "output.txt").read_text()
    first, second = (run["final_eval"] for run in table["runs"])
    assert table["final_eval"]["mean"] == pytest.approx((first + second) / 2)
    assert sorted(path.name for path in runs.iterdir()) == ["mine-s3", "mine-s4", "mine-seeds.json"]
    out = capfd.readouterr().out
    assert f"     3  {first:8.1f}  " in out
    assert "2 seeds" in out


@pytest.mark.system
def test_a_failed_seed_is_named_without_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    broken = SeedGroup("it", tmp_path / "it-seeds.json", [SeedRun(1, tmp_path / "it-s1")], 1, Budget())
    assert broken.start(["NoSuchWorld-v0", "--runs-dir", str(tmp_path)], 1.0) == 1
    out = capfd.readouterr().out
    assert "\nseed 1 failed: unknown environment 'NoSuchWorld-v0'; " in out
    assert "nothing was written (exit code 1: unknown environment" in out
    assert [path.name for path in tmp_path.iterdir()] == ["it-seeds.json"]


@pytest.mark.system
def test_an_interrupt_ends_all_runs_in_good_order(tmp_path: Path) -> None:
    """Send SIGINT to the whole group of processes, as a terminal does."""
    runs = tmp_path / "runs"
    argv = [IDENTITY, *SMALL, "--evals", "0", "--steps", "1000000000", "--log-every", "0.05"]
    argv += ["--seeds", "1..3", "--jobs", "2", "--runs-dir", str(runs), "--run", "cut"]
    process = subprocess.Popen(
        [sys.executable, "-m", "freewheel", "train", *argv], env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    with process:
        try:
            logs = [runs / f"cut-s{seed}" / "metrics.jsonl" for seed in (1, 2)]
            wait_until(lambda: all(log.is_file() and log.stat().st_size for log in logs))
            children = psutil.Process(process.pid).children(recursive=True)
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=55)
        finally:
            if process.poll() is None:
                process.kill()
    assert (process.returncode, err) == (130, "")
    assert not psutil.wait_procs(children, timeout=30)[1]
    for seed in (1, 2):
        summary = json.loads((runs / f"cut-s{seed}" / "summary.json").read_text())
        assert (summary["ended"], summary["exit_code"]) == ("interrupted (SIGINT)", 130)
    assert not (runs / "cut-s3").exists()
    assert "     3         -         -    0:00  not started" in out
    assert json.loads((runs / "cut-seeds.json").read_text())["exit_code"] == 130
