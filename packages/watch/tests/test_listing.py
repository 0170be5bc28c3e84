"""Tests of the list of runs: its contents, its order, and how much is read for it."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from freewheel.errors import FileError
from freewheel.files.lock import FileLock
from freewheel_watch.listing import RunEntry, list_runs

SUMMARY = {"ended": "steps", "exit_code": 0, "env_steps": 640, "wall_s": 1.5, "best_eval": 9.5, "return_mean": 8.0}


def make(folder: Path, *, summary: Any = None, row: Any = None, age: float = 0.0, **config: Any) -> Path:
    folder.mkdir(parents=True)
    known = {"env": "CartPole-v1", "algo": "ppo", "mode": "lockstep", "seed": 3} | config
    (folder / "config.json").write_text(json.dumps(known))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    if row is not None:
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    then = time.time() - age
    for file in folder.iterdir():
        os.utime(file, (then, then))
    return folder


def by_name(folder: Path) -> dict[str, RunEntry]:
    return {entry.name: entry for entry in list_runs(folder)}


def test_what_is_told_of_a_run_that_has_ended(tmp_path: Path) -> None:
    make(tmp_path / "a", summary=SUMMARY)
    (entry,) = list_runs(tmp_path)
    assert (entry.env, entry.algo, entry.mode, entry.seed) == ("CartPole-v1", "ppo", "lockstep", 3)
    assert (entry.state, entry.steps, entry.wall_s, entry.best, entry.returned) == ("ended", 640, 1.5, 9.5, 8.0)
    assert entry.problem == ""


def test_the_newest_come_first(tmp_path: Path) -> None:
    for name, age in (("old", 100.0), ("new", 1.0), ("middle", 50.0)):
        make(tmp_path / name, summary=SUMMARY, age=age)
    assert [entry.name for entry in list_runs(tmp_path)] == ["new", "middle", "old"]


def test_running_gone_failed_and_interrupted_runs(tmp_path: Path) -> None:
    row = {"env_steps": 64, "wall_s": 0.5, "return_mean": 4.0}
    make(tmp_path / "running", row=row)
    make(tmp_path / "gone", row=row)
    make(tmp_path / "failed", summary=SUMMARY | {"ended": "failed", "exit_code": 1, "error": "it broke"})
    make(tmp_path / "cut", summary=SUMMARY | {"ended": "interrupted (SIGINT)", "exit_code": 130})
    with FileLock(tmp_path / "running" / ".lock"):
        found = by_name(tmp_path)
    assert {name: entry.state for name, entry in found.items()} == {
        "running": "running", "gone": "gone", "failed": "failed", "cut": "interrupted",
    }  # fmt: skip
    assert found["failed"].problem == "it broke"
    assert (found["running"].steps, found["running"].returned, found["gone"].steps) == (64, 4.0, 64)


def test_damaged_directories_are_listed_with_what_is_wrong(tmp_path: Path) -> None:
    (make(tmp_path / "config", summary=SUMMARY) / "config.json").write_text("{")
    (make(tmp_path / "summary") / "summary.json").write_bytes(b"\xff\xff")
    (make(tmp_path / "missing", summary=SUMMARY) / "config.json").unlink()
    make(tmp_path / "types", env=7, seed=True, algo=None, summary={"exit_code": 0, "env_steps": "many", "ended": 5})
    os.mkfifo(make(tmp_path / "pipe") / "metrics.jsonl")
    (tmp_path / "no run").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    found = by_name(tmp_path)
    assert {name: entry.state for name, entry in found.items()} == {
        "config": "damaged", "summary": "damaged", "missing": "damaged", "types": "ended", "pipe": "gone",
    }  # fmt: skip
    assert "not JSON" in found["config"].problem
    assert "UTF-8" in found["summary"].problem
    assert "is missing" in found["missing"].problem
    assert (found["types"].env, found["types"].seed, found["types"].steps) == ("", None, None)
    assert (found["config"].steps, found["config"].best) == (640, 9.5)


def test_the_runs_of_one_command_with_seeds_are_a_group(tmp_path: Path) -> None:
    (tmp_path / "both-seeds.json").write_text("{}")
    for name in ("both-s1", "both-s12", "alone-s1", "both"):
        make(tmp_path / name, summary=SUMMARY)
    groups = {name: entry.group for name, entry in by_name(tmp_path).items()}
    assert groups == {"both-s1": "both", "both-s12": "both", "alone-s1": "", "both": ""}


def test_a_directory_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="No such file"):
        list_runs(tmp_path / "none")


def test_of_large_metrics_only_the_end_is_read(tmp_path: Path) -> None:
    row = json.dumps({"env_steps": 5}).encode()
    for name in ("a", "b"):
        with (make(tmp_path / name) / "metrics.jsonl").open("wb") as file:
            file.truncate(1 << 30)  # a sparse file, which takes no room on the disk
            file.seek(0, os.SEEK_END)
            file.write(b"\n" + row + b"\n")
    tracemalloc.start()
    try:
        assert [entry.steps for entry in list_runs(tmp_path)] == [5, 5]
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_a_folder_that_takes_long_to_read_is_damaged_and_the_others_are_shown(tmp_path: Path) -> None:
    make(tmp_path / "a", summary=SUMMARY)
    make(tmp_path / "bomb", summary=SUMMARY)
    keys = ",".join(f'"{key:x}":1' for key in range(600_000))
    (tmp_path / "bomb" / "config.json").write_text(f'{{"env":"CartPole-v1",{keys},"927bf":1}}')
    began = time.process_time()
    found = by_name(tmp_path)
    assert time.process_time() - began < 10
    assert (found["a"].state, found["bomb"].state) == ("ended", "damaged")
    assert "has '927bf' twice" in found["bomb"].problem
    assert list_runs(tmp_path, lambda: True) == []


def test_a_run_that_is_a_link_is_listed_by_its_name_and_links_in_a_run_are_not_followed(tmp_path: Path) -> None:
    make(tmp_path / "elsewhere" / "real", summary=SUMMARY)
    make(tmp_path / "runs" / "bad", summary=SUMMARY)
    (tmp_path / "runs" / "bad" / "config.json").unlink()
    (tmp_path / "runs" / "bad" / "config.json").symlink_to(tmp_path / "elsewhere" / "real" / "config.json")
    (tmp_path / "runs" / "good").symlink_to(tmp_path / "elsewhere" / "real")
    found = by_name(tmp_path / "runs")
    assert (found["good"].state, found["good"].env) == ("ended", "CartPole-v1")
    assert (found["bad"].state, found["bad"].env) == ("damaged", "")
    assert "is a link and is not followed" in found["bad"].problem
