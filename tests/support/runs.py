"""Small runs and Python processes for tests, and what runs leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import freewheel
from freewheel.run.naming import Result
from tests.support.places import ROOT

IDENTITY = "tests.support.worlds:Identity"  # episodes of 16 steps, at most 1 a step
#: Lanes × steps = 32 everywhere; an episode worker has one lane.
MODES: Mapping[str, dict[str, Any]] = {
    "sequential": {"num_envs": 4, "num_steps_per_env": 8},
    "lockstep": {"num_envs": 4, "num_steps_per_env": 8, "placement": "inline"},
    "batch": {"workers": 2, "num_envs": 4, "num_steps_per_env": 8},
    "continuous": {"workers": 2, "num_envs": 4, "num_steps_per_env": 8},
    "episodes": {"workers": 2, "num_envs": 2, "num_steps_per_env": 16},
}


def train(tmp_path: Path, env: str | Callable[..., Any] = IDENTITY, **options: Any) -> Result:
    """Four lanes of 16 steps (S = 64), ten updates, a row of metrics for each, two evaluations."""
    small = {"num_envs": 4, "num_steps_per_env": 16, "log_every": 1e-9, "evals": 2, "eval_episodes": 3, "steps": 640}
    return freewheel.train(env, quiet=True, runs_dir=tmp_path, **small | options)


def good_run(folder: Path, **options: Any) -> Path:
    """A small one, to be harmed."""
    small = {"steps": 64, "num_envs": 2, "evals": 1, "eval_episodes": 1, "policy": {"hidden": [8, 8]}}
    return train(folder, "CartPole-v1", run="one", mode="sequential", **small | options).path


def rows_of(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (result.path / "metrics.jsonl").read_text().splitlines()]


class Kept:
    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.notes: list[str] = []

    def write(self, row: Mapping[str, Any]) -> None:
        self.rows.append(dict(row))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def close(self, summary: Mapping[str, Any]) -> None: ...


def assert_balanced(rows: Mapping[str, Any]) -> None:
    assert rows["produced"] == rows["trained"] + rows["queued"] + rows["open"] + sum(rows["dropped"].values())


def python(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """A process that has to succeed, with this package and these environment variables."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, *arguments]
    ended = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended
