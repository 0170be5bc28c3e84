"""Tests of `freewheel runs`: the table and the JSON of runs in any state."""

from __future__ import annotations

import json
import os
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from freewheel.cli.main import main
from freewheel_watch.listing import list_runs
from freewheel_watch.runs import age, table


def make(folder: Path, seed: int = 1, ago: float = 0.0, **summary: Any) -> None:
    folder.mkdir(parents=True)
    config = {"env": "CartPole-v1", "algo": "ppo", "mode": "lockstep", "seed": seed}
    ended = {"ended": "steps", "exit_code": 0, "env_steps": 1234, "best_eval": 9.25} | summary
    for name, content in (("config.json", config), ("summary.json", ended)):
        (folder / name).write_text(json.dumps(content))
        os.utime(folder / name, (time.time() - ago,) * 2)


def lines(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["runs", str(folder), *words]) == 0
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_runs_are_listed_by_group_and_damage_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "both-seeds.json").touch()
    make(tmp_path / "old", ago=7200.0, exit_code=1, ended="failed", error="it broke\nbadly")
    make(tmp_path / "both-s2", seed=2, ago=130.0, best_eval=10.0)
    make(tmp_path / "both-s1", seed=1, ago=600.0, best_eval=20.0)
    make(tmp_path / "between", ago=300.0)
    make(tmp_path / "new", ago=3.0)
    (tmp_path / "new" / "config.json").write_text("{")
    shown = lines(tmp_path, capsys)
    assert [line.split("  ")[0].strip() or line.split("  ")[1] for line in shown[1:]] == [
        "new", "both", "both-s1", "both-s2", "between", "old",
    ]  # fmt: skip
    assert "damaged" in shown[1]
    assert "config.json is damaged" in shown[1]
    assert " ".join(shown[2].split()) == "both (2 seeds) CartPole-v1 ppo lockstep 2,468 15.0 ended 2 min"
    assert shown[3].split()[4:8] == ["1", "1,234", "20.0", "ended"]
    assert shown[6].split()[-6:] == ["failed", "2", "h", "it", "broke", "badly"]
    assert len(lines(tmp_path, capsys, "--last", "1")) == 2


def test_the_same_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "a", seed=7)
    (entry,) = json.loads("\n".join(lines(tmp_path, capsys, "--json")))
    assert {"name": "a", "seed": 7, "steps": 1234, "best": 9.25, "state": "ended", "group": ""}.items() <= entry.items()
    (alone,) = json.loads("\n".join(lines(tmp_path / "a", capsys, "--json")))
    assert alone["name"] == "a"


def test_no_runs_and_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(tmp_path, capsys) == [f"no runs in {tmp_path}; train one first"]
    assert main(["runs", str(tmp_path / "none")]) == 2
    assert "there is no directory" in capsys.readouterr().err
    assert main(["runs", "a", "b"]) == 2
    assert "give one directory" in capsys.readouterr().err


def test_a_narrow_terminal_cuts_what_is_wrong_before_what_a_run_is(tmp_path: Path) -> None:
    make(tmp_path / "first", ago=100.0, exit_code=1, ended="failed", error="x" * 500)
    out = Console(file=StringIO(), width=100, force_terminal=True, color_system=None)
    out.print(table(list_runs(tmp_path), time.time(), out.width))
    written = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(written) == 2
    words = ("first", "CartPole-v1", "ppo", "lockstep", "1,234", "9.2", "failed", "1 min")
    assert all(word in written[1] for word in words)


def test_ages_have_one_unit() -> None:
    assert [age(seconds) for seconds in (-1, 0, 59, 60, 3599, 3600, 86399, 86400, 86400 * 7, 86400 * 364)] == [
        "0 s", "0 s", "59 s", "1 min", "59 min", "1 h", "23 h", "1 d", "1 w", "1 y",
    ]  # fmt: skip
