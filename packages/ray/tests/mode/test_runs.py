"""Complete runs in mode ray, with contexts, a replay buffer, a recorded schedule and a resume."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import freewheel
from freewheel.errors import SetupError, UsageError
from freewheel.run.schedule.replay import replay
from freewheel_ray.actors.driver import Driver
from tests.support.faulty_worlds import Certified
from tests.test_contexts import TABLE, assert_told
from tests.test_contexts import train as with_contexts

RAY: dict[str, Any] = {"mode": "ray", "workers": 2, "num_envs": 2, "cpus_per_worker": 0.5}
SMALL: dict[str, Any] = {"num_steps_per_env": 16, "evals": 0, "policy": {"hidden": [8]}, "quiet": True}


@pytest.mark.parametrize("unit", ["fragments", "episodes"])
def test_every_return_is_that_of_its_context_and_seed(tmp_path: Path, unit: str) -> None:
    result, episodes = with_contexts(tmp_path, **RAY, unit=unit)
    assert result.summary["ended"] == "enough"
    assert_told(episodes)
    assert {episode.context for episode in episodes} == set(map(tuple, TABLE))


@pytest.mark.parametrize("unit", ["fragments", "episodes"])
def test_a_recorded_schedule_is_replayed_bit_for_bit(tmp_path: Path, unit: str) -> None:
    options = {"steps": 300, "record_schedule": True, "runs_dir": tmp_path, "ppo": {"epochs": 1}}
    result = freewheel.train("tests.support.faulty_worlds:Certified", **RAY | SMALL | options | {"unit": unit})
    found = replay(result.path)
    assert found.identical, found.difference
    assert found.updates == result.summary["updates"]


def test_a_replay_buffer_is_filled_by_actors(tmp_path: Path) -> None:
    sac = {"learning_starts": 64, "batch": 16, "buffer": 1000}
    options = {"algo": "sac", "steps": 300, "runs_dir": tmp_path, "sac": sac}
    summary = freewheel.train("tests.support.worlds:IdentityBox", **RAY | SMALL | options).summary
    assert summary["ended"] == "steps"
    assert summary["produced"] == summary["trained"] + sum(summary["dropped"].values())
    assert set(summary["dropped"]) <= {"shutdown"}


def test_an_actor_has_not_imported_torch(tmp_path: Path) -> None:
    options = {"steps": 64, "runs_dir": tmp_path, "ppo": {"epochs": 1}}
    summary = freewheel.train("tests.support.faulty_worlds:WithoutTorch", **RAY | SMALL | options).summary
    assert (summary["ended"], summary["worker_restarts"]) == ("steps", 0)


def test_a_run_is_resumed(tmp_path: Path) -> None:
    options = {"runs_dir": tmp_path, "run": "it", "ppo": {"epochs": 1}}
    first = freewheel.train("tests.support.faulty_worlds:Certified", **RAY | SMALL | options, steps=100).summary
    again = freewheel.resume(tmp_path / "it", steps=200, quiet=True).summary
    assert again["env_steps"] >= 200 > first["env_steps"] >= 100
    assert again["produced"] == again["trained"] + sum(again["dropped"].values())


def test_the_start_of_the_cluster_is_no_part_of_the_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter = Driver.__enter__

    def slowly(self: Driver) -> Driver:
        time.sleep(4.0)  # like a busy machine
        return enter(self)

    monkeypatch.setattr(Driver, "__enter__", slowly)
    options = {"minutes": 0.05, "runs_dir": tmp_path}
    summary = freewheel.train("tests.support.faulty_worlds:Certified", **RAY | SMALL | options).summary
    assert (summary["ended"], summary["wall_s"] < summary["env_steps"]) == ("minutes", True)


class Held:
    """An object that another local process can unpickle, but an actor cannot."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _found, ()


def _found() -> Held:
    if "ray" in sys.modules:
        raise OSError("there is no such handle here")
    return Held()


def test_an_environment_that_no_actor_can_load_fails_with_its_reason(tmp_path: Path) -> None:
    held = Held()

    def make() -> gymnasium.Env[Any, Any]:
        assert held
        return Certified()

    reason = r"^the environment cannot be loaded in a Ray actor \(there is no such handle here\)$"
    with pytest.raises(SetupError, match=reason):
        freewheel.train(make, **RAY | SMALL, steps=64, runs_dir=tmp_path)
    (summary,) = tmp_path.glob("*/summary.json")
    assert json.loads(summary.read_text())["exit_code"] == 1


def test_without_ray_one_line_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"^[^\n]*pip install [^\n]*freewheel-ray\[ray\][^\n]*$"):
        freewheel.train("tests.support.worlds:Never", **RAY | SMALL, steps=64, runs_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
