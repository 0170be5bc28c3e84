"""What an environment was measured to cost: kept while its source is the same, read back as numbers only, and said."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freewheel.config.resolve import Config, from_options
from freewheel.rollout.probe import BRIEF, BUDGET
from freewheel.run.advice import measured_costs
from freewheel.run.advice.measured_costs import FOLDER, recall, remember
from freewheel.run.planning import plan
from tests.support.costs import cost
from tests.support.worlds import Counter

COUNTER = "tests.support.worlds:Counter"
COST = replace(cost(0.25, 0.01), fast=0.2, times=(0.2, 0.3), lengths=(7,))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    return tmp_path / "cache" / "measured"


def config(env: Any = COUNTER, **options: Any) -> Config:
    return from_options(env, options)


def test_an_env_that_was_measured_is_only_opened_and_that_is_said(tmp_path: Path, cache: Path) -> None:
    remember(config(), BUDGET, COST)
    (kept,) = cache.iterdir()
    assert (kept.stat().st_mode & 0o777, cache.stat().st_mode & 0o777) == (0o600, 0o700)
    said: list[str] = []
    found = plan(config(runs_dir=tmp_path), said.append).cost
    (line,) = said
    assert re.fullmatch(rf"opening {COUNTER}, measured here on 20\S+ \d\d:\d\d \(`freewheel check` .*\) \.\.\.", line)
    assert found is not None
    assert (found.wall, found.cpu, found.times, found.lengths) == (0.25, 0.01, (0.2, 0.3), (7,))
    assert found.spec.name == COUNTER  # what it is like is never remembered


def test_a_brief_measurement_does_not_stand_for_a_whole_one() -> None:
    remember(config(), BRIEF, COST)
    assert recall(config(), BRIEF)
    assert recall(config(), BUDGET) is None
    remember(config(), BUDGET, replace(COST, wall=0.5))
    assert (known := recall(config(), BRIEF))
    assert known.numbers["wall"] == 0.5


@pytest.mark.parametrize(
    "change",
    [{"failures": 1}, {"closed": False}, {"portable": False}, {"fast": 0.0}, {"stolen": 0.2}],
    ids=lambda change: next(iter(change)),
)
def test_what_failed_or_was_disturbed_is_measured_again(change: dict[str, Any]) -> None:
    remember(config(), BUDGET, replace(COST, **change))
    assert recall(config(), BUDGET) is None


@pytest.mark.parametrize("other", [{"env_args": {"limit": 3}}, {"max_episode_steps": 9}])
def test_other_arguments_are_another_env(other: dict[str, Any]) -> None:
    remember(config(), BUDGET, COST)
    assert recall(config(**other), BUDGET) is None


@pytest.mark.parametrize("changed", ["toy.py", "helper.py"])
def test_a_changed_source_is_measured_again(changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("toy.py", "helper.py"):
        (tmp_path / name).write_text("x = 1\n")
    own = config(f"{tmp_path}/toy.py:Toy")
    remember(own, BUDGET, COST)
    assert recall(own, BUDGET)
    (tmp_path / changed).write_text("x = 2\n")
    assert recall(own, BUDGET) is None


@pytest.mark.parametrize("env", [Counter, functools.partial(Counter)], ids=["class", "function"])
def test_code_without_a_file_of_its_name_is_not_remembered(env: Any, cache: Path) -> None:
    remember(config(env), BUDGET, COST)
    assert not cache.exists()


def test_another_machine_and_an_empty_variable_know_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(config(), BUDGET, COST)
    with monkeypatch.context() as patch:
        patch.setattr(measured_costs, "usable_cores", lambda: 1_000)
        assert recall(config(), BUDGET) is None
    monkeypatch.setenv(FOLDER, "")
    assert recall(config(), BUDGET) is None
    remember(config(), BUDGET, COST)
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    "damage",
    [
        *({"wall": value} for value in (-1.0, 1e300, "fast", None)), {"steps": 0}, {"steps": 0.5}, {"times": [0.1, "x"]},
        *({"when": value} for value in (-1.0, 1e12, "now")), "[]", '{"wall": NaN}', "[" * 5_000, "x" * 100_000,
    ],
    ids=lambda damage: str(damage)[:20],
)  # fmt: skip
def test_a_damaged_entry_is_as_if_there_were_none(damage: Any, cache: Path) -> None:
    remember(config(), BUDGET, COST)
    (kept,) = cache.iterdir()
    data = json.loads(kept.read_text())
    kept.write_text(damage if isinstance(damage, str) else json.dumps(data | damage))
    assert recall(config(), BUDGET) is None


def test_the_oldest_entries_go(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_costs, "MOST_FILES", 2)
    for limit in range(5):
        remember(config(env_args={"limit": limit}), BUDGET, COST)
    assert len(list(cache.iterdir())) == 2
    assert recall(config(env_args={"limit": 4}), BUDGET)


def test_a_disk_that_takes_nothing_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(FOLDER, str(tmp_path / "file"))
    remember(config(), BUDGET, COST)
    assert recall(config(), BUDGET) is None
