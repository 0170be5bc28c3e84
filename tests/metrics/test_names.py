"""The names of metrics: each is described once, the page that lists them is up to date, and runs report no other."""

from __future__ import annotations

import itertools
import math
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from freewheel.core import LEARNER_TIME, WORKER_TIME
from freewheel.metrics.names import GROUPS, SHARES, describe, markdown
from tests.support.places import PACKAGE
from tests.support.runs import IDENTITY, rows_of, train

METRICS = [metric for group in GROUPS.values() for metric in group]
REPLAY = {"learning_starts": 32, "batch": 16, "updates_per_row": 2}
MODEL = {"members": 2, "elites": 1, "model_hidden": [8], "model_every": 32, "model_batch": 16, "max_epochs": 2}
ALGORITHMS = {"ppo": {"epochs": 1, "minibatch": 16}, "sac": REPLAY, "mbpo": REPLAY | MODEL}
OPTIONS: dict[str, dict[str, Any]] = {algo: {algo: options} for algo, options in ALGORITHMS.items()}


def test_no_name_is_described_twice() -> None:
    for one, other in itertools.permutations(METRICS, 2):
        assert not fnmatchcase(one.name, other.name), f"{one.name} is also described as {other.name}"
    assert describe("lag/share_3") is describe("lag/share_0") is not None
    assert describe("lag/shares") is None


def test_every_share_of_time_is_described_once() -> None:
    assert {party: tuple(kinds) for party, kinds in SHARES.items()} == {"worker": WORKER_TIME, "learner": LEARNER_TIME}


def test_the_page_lists_them() -> None:
    page = (PACKAGE.parent / "docs" / "metrics.md").read_text()
    assert page == markdown(), "write it again: python -m freewheel.metrics.names > docs/metrics.md"


@pytest.mark.parametrize(
    ("algo", "mode"), [("ppo", "lockstep"), ("ppo", "continuous"), ("sac", "batch"), ("mbpo", "sequential")]
)
def test_a_run_reports_no_other(tmp_path: Path, algo: str, mode: str) -> None:
    options = {"algo": algo, "mode": mode, "num_envs": 2, "steps": 192, "measures": ("count",), "policy.hidden": [8]}
    rows = rows_of(train(tmp_path, f"{IDENTITY}Box", **options, **OPTIONS[algo]))
    reported = {key for row in rows for key in row}
    assert {key for key in reported if describe(key) is None} == set()
    assert {"measure/count", "eval/count", "memory/workers_mb"} <= reported
    for row in rows:
        assert 0.0 <= row["buffer_util"] <= 1.0
        assert math.fsum([row[key] for key in row if key.startswith("time/learner_")]) == pytest.approx(1.0)


def test_a_buffer_of_episodes_is_never_more_than_full(tmp_path: Path) -> None:
    options: dict[str, Any] = {"mode": "episodes", "workers": 2, "episodes_per_update": 3, "num_envs": 2}
    trained = train(tmp_path, **options, num_steps_per_env=4, steps=400, evals=0)
    shares = [row["buffer_util"] for row in rows_of(trained)]
    assert 0.0 < max(shares) <= 1.0
    assert {round(3 * share, 6) for share in shares} <= {0, 1, 2, 3}
