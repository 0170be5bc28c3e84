"""Mode ray with actors and envs that die, hang or fail, under the same audit as the local modes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from freewheel_ray.actors.wire import RayWire
from tests.plugins.leaks import command_of
from tests.support.chaos import Killer, Trial, finite, kill, tokens, trial, used_tokens, world

FRAGMENTS: dict[str, Any] = {"unit": "fragments", "cpus_per_worker": 0.5}
EPISODES: dict[str, Any] = {"unit": "episodes", "cpus_per_worker": 0.5}
UNITS = {"fragments": FRAGMENTS, "episodes": EPISODES}
LIMIT = 40.0  # seconds, also on a busy machine: an actor's process takes a second to start
PLACE = r"episode \d+, seed \d+, step \d+, last action [01]"


def named(title: str) -> psutil.Process:
    """Return the process with this title that the cluster has started."""
    (found,) = (one for one in psutil.Process().children(recursive=True) if command_of(one).startswith(title))
    return found


def settled(on: Trial) -> bool:
    return all(slot.process is not None and not slot.pending for slot in on.supervisor.slots)


@pytest.mark.parametrize("unit", UNITS)
def test_all_actors_act_again_after_all_were_killed(unit: str) -> None:
    with trial(world("Certified"), "ray", workers=2, num_envs=2, **UNITS[unit]) as on:
        on.run(lambda: on.audit.incarnations() == {0: 0, 1: 0}, LIMIT)
        for slot in on.supervisor.slots:
            assert kill(slot, [])
        on.run(lambda: on.audit.incarnations() == {0: 1, 1: 1}, LIMIT)
        on.learn(3, LIMIT)
        assert len(on.supervisor.losses) == on.supervisor.restarts == 2
        assert on.dropped.keys() <= {"worker_death", "stale"}
    assert on.shown.count("ended unexpectedly and is replaced") == 2
    summary = on.collector.summary()
    assert (summary["worker_restarts"], summary["workers_lost"]) == (2, 0)
    assert summary["fragments_lost"] <= 2


def test_actors_are_killed_again_and_again() -> None:
    with trial(world("Certified"), "ray", workers=2, num_envs=4, **FRAGMENTS) as on:
        on.learn(1, LIMIT)
        with Killer(on.supervisor, rate=1.5) as killer:
            on.run(lambda: len(killer.kills) >= 3, LIMIT)
        on.run(lambda: on.supervisor.restarts == len(killer.kills) and settled(on), LIMIT)
        on.learn(2, LIMIT)
        assert on.max_lag is not None
        assert max(on.witness.lags) <= on.max_lag


def test_a_killed_relay_is_restarted(tmp_path: Path) -> None:
    args = {"how": "hangs", "only": 1, "at": 4, "folder": tokens(tmp_path, 1)}
    with trial(world("Faulty"), "ray", workers=2, num_envs=2, env_args=args, step_timeout=4.0, **FRAGMENTS) as on:
        on.learn(1, LIMIT)
        named("ray::QuestionRelay").kill()
        on.run(lambda: bool(on.supervisor.losses), LIMIT)
        (loss,) = on.supervisor.losses
        assert re.fullmatch(r"did not return within 4 s from step 4 of .* \(lane 1 of .*Faulty\)", loss.reason)
        on.run(lambda: on.audit.incarnations().get(1) == 1, LIMIT)


@pytest.mark.parametrize("unit", UNITS)
def test_an_env_that_hangs_is_killed_and_named(unit: str, tmp_path: Path) -> None:
    args = {"how": "hangs", "only": 1, "at": 4, "folder": tokens(tmp_path, 1)}
    with trial(world("Faulty"), "ray", workers=2, num_envs=2, env_args=args, step_timeout=1.5, **UNITS[unit]) as on:
        on.run(lambda: bool(on.supervisor.losses), LIMIT)
        (loss,) = on.supervisor.losses
        assert re.fullmatch(r"did not return within 1\.5 s from step 4 of .* \(lane 1 of .*Faulty\)", loss.reason)
        on.run(lambda: on.audit.incarnations().get(1) == 1, LIMIT)
        assert [used.worker for used in used_tokens(tmp_path)] == [1]


def test_an_env_that_ends_its_process_is_reported_and_replaced(tmp_path: Path) -> None:
    args = {"how": "exits", "only": 1, "at": 4, "folder": tokens(tmp_path, 1)}
    with trial(world("Faulty"), "ray", workers=2, num_envs=2, env_args=args, **FRAGMENTS) as on:
        on.run(lambda: on.audit.incarnations().get(1) == 1, LIMIT)
        assert [loss.worker for loss in on.supervisor.losses] == [1]


@pytest.mark.parametrize("unit", UNITS)
def test_invalid_answers_are_dropped_and_reported(unit: str, tmp_path: Path) -> None:
    args = {"how": "invalid answers", "at": 12, "folder": tokens(tmp_path, 8)}
    lanes = 2 if unit == "episodes" else 4
    with trial(world("Faulty"), "ray", workers=2, num_envs=lanes, env_args=args, **UNITS[unit]) as on:
        on.run(lambda: not list(tmp_path.glob("token-*")), LIMIT)
        each = 12 if unit == "episodes" else 1
        on.run(lambda: on.dropped == {"nan": 3 * each, "shape": 5 * each}, LIMIT)
        on.learn(2, LIMIT)
        assert on.supervisor.losses == []
        assert finite(on.learner.snapshot())
        on.run(
            lambda: bool(
                re.search(rf"lane \d of \S+:Faulty gave a reward that is not finite: inf \({PLACE}\)", on.shown)
            )
        )


def test_a_lane_that_fails_too_often_is_given_up() -> None:
    args = {"how": "raises", "only": 1, "envs": 1, "at": 4}
    with trial(world("Faulty"), "ray", workers=2, num_envs=4, env_args=args, **FRAGMENTS) as on:
        on.run(lambda: "given up" in on.shown, LIMIT)
        on.learn(5, LIMIT)
        assert on.dropped == {"env_error": 3}
        assert on.supervisor.losses == []


def test_a_worker_whose_only_lane_was_given_up_is_given_up() -> None:
    """Three actors try the env before the worker is given up."""
    args = {"how": "nan", "only": 1, "at": 4}
    with trial(world("Faulty"), "ray", workers=2, num_envs=2, env_args=args, **EPISODES) as on:
        on.run(lambda: on.supervisor.given_up == 1, LIMIT)
        on.learn(3, LIMIT)
        assert on.dropped == {"nan": 3 * 2 * 4, "worker_death": 2 * 3}
        assert on.shown.count("worker 1 failed and is replaced\nno lane of") == 2


def test_a_slow_step_does_not_hold_up_the_others(tmp_path: Path) -> None:
    """The learner continues: it uses the finished rows of the slow worker and drops the late one."""
    args = {"how": "hangs", "only": 1, "at": 5, "folder": tokens(tmp_path, 1)}
    with trial(world("Faulty"), "ray", workers=2, num_envs=2, env_args=args, **FRAGMENTS) as on:
        on.run(lambda: len(used_tokens(tmp_path)) == 1, LIMIT)
        on.learn(10, LIMIT)  # the time limit of a step is half a minute
        assert on.supervisor.losses == []
        assert on.max_lag is not None
        assert max(on.witness.lags) <= on.max_lag


def test_rows_that_are_stored_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fragments that are too large for a reply are fetched from the object store."""
    monkeypatch.setattr(RayWire, "inline", 0)
    with trial(world("Certified"), "ray", workers=2, num_envs=4, **FRAGMENTS) as on:
        on.learn(10, LIMIT)
        assert (on.dropped, on.audit.gaps) == ({}, 0)
