"""Workers that are killed: nothing is lost or doubled, they are seen, named and replaced, and training goes on."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freewheel.seeding import tree
from tests.support.chaos import LONG, MODES, SEED, Killer, alive, every, finite, harms, kill, tokens, trial, world

WORKERS = 8
STORM_S, RATE = (60.0, 0.8) if LONG else (1.5, 6.0)  # seconds, kills a second
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("batch", {}),
    ("continuous", {}),
    ("episodes", {}),
    ("batch", {"num_envs": 24, "collection_batch_size": 5}),
    ("continuous", {"num_envs": 24, "max_lag": 0}),
    ("episodes", {"episodes_per_update": 6}),
    ("episodes", {"wave": True}),
    ("episodes", {"max_lag": 1, "collection_batch_size": 3}),
]


@pytest.mark.parametrize(("mode", "options"), KINDS if LONG else KINDS[:3])
def test_a_storm_of_kills_loses_and_doubles_nothing(mode: str, options: dict[str, Any]) -> None:
    with trial(world("Certified"), mode, **{"workers": WORKERS, "num_envs": WORKERS, **options}) as on:
        on.wait_for_workers()
        on.learn(1)
        twin = on.run_for(STORM_S) if LONG else 0
        on.longest_wait, before = 0.0, on.learner.version
        with Killer(on.supervisor, RATE) as killer:
            rows = on.run_for(STORM_S)
        ended = time.monotonic()
        assert on.learner.version > before + 10
        on.run(lambda: on.supervisor.restarts == len(killer.kills))
        on.run(lambda: len(on.audit.incarnations(since=ended)) == WORKERS)  # all of them act again
        assert len(killer.kills) >= RATE * STORM_S / 3
        assert on.collector.summary()["worker_restarts"] == len(killer.kills)
        assert on.collector.summary()["workers_lost"] == 0
        lost = {(loss.worker, loss.incarnation): loss for loss in on.supervisor.losses}
        assert lost.keys() == {(one.worker, one.incarnation) for one in killer.kills}
        assert all("was killed (SIGKILL" in loss.reason for loss in lost.values())
        late = [lost[one.worker, one.incarnation].seen - one.at for one in killer.kills]
        assert (np.quantile(late, 0.99) if LONG else max(late)) < (0.1 if LONG else 0.5)
        assert (
            on.dropped.keys() <= {"batch": set(), "continuous": {"stale"}, "episodes": {"stale", "worker_death"}}[mode]
        )
        assert on.dropped or not on.audit.gaps  # there is a gap where something was dropped, and nowhere else
        if LONG:
            assert rows > 0.7 * twin
            assert on.longest_wait < 2.0


@pytest.mark.parametrize("mode", MODES)
def test_after_the_death_of_all_workers_all_of_them_act_again(mode: str) -> None:
    with trial(world("Certified"), mode, workers=WORKERS, num_envs=WORKERS) as on:
        on.wait_for_workers()
        on.learn(3)
        killed = time.monotonic()
        for slot in on.supervisor.slots:
            assert kill(slot, [])
        on.run(lambda: on.audit.incarnations() == dict.fromkeys(range(WORKERS), 1))
        assert time.monotonic() - killed < 5.0
        assert len(on.supervisor.losses) == on.supervisor.restarts == WORKERS
        on.learn(3)


@pytest.mark.parametrize("mode", MODES if LONG else ["continuous"])
def test_after_the_death_of_the_server_that_workers_are_born_from_there_are_not_two_of_each(mode: str) -> None:
    """They outlive it; but nobody would hear of their deaths, so they are replaced."""
    with trial(world("Certified"), mode, workers=4, num_envs=4) as on:
        for turn in range(1, 11 if LONG else 2):
            on.wait_for_workers()
            workers = on.processes()
            server = workers[0].parent()
            assert server is not None
            server.kill()
            everyone = dict.fromkeys(range(4), turn)
            on.run(lambda everyone=everyone: on.audit.incarnations() == everyone)  # type: ignore[misc]
            assert not any(map(alive, workers))
        assert {loss.reason for loss in on.supervisor.losses} == {"lost its forkserver"}


@pytest.mark.parametrize(
    ("mode", "how", "reason"),
    every(("is killed", "was killed (SIGKILL"), ("crashes", "was killed (SIGSEGV)"), ("exits", "ended (exit code 7)")),
)
def test_an_env_that_ends_its_process_is_named_and_replaced(mode: str, how: str, reason: str, tmp_path: Path) -> None:
    """It takes its process along twice."""
    args = {"how": how, "only": 1, "at": 4, "folder": tokens(tmp_path, 2)}
    with trial(world("Mishap"), mode, workers=3, num_envs=3, env_args=args) as on:
        on.run(lambda: on.audit.incarnations().get(1) == 2)
        assert [loss.worker for loss in on.supervisor.losses] == [harm.worker for harm in harms(tmp_path)] == [1, 1]
        on.run(lambda: on.told.count(f"worker 1 {reason}") == on.told.count("and is replaced") == 2)


@pytest.mark.parametrize(("mode", "at"), every((4,), (15,)))
def test_an_episode_that_kills_whoever_plays_it_costs_no_worker(mode: str, at: int) -> None:
    """It is played again in case somebody else did it; then it is left alone."""
    deadly = next(seed for number in count() if (seed := tree(SEED, "env", 1, number)) % 20 > 12)
    with trial(
        world("Mishap"), mode, workers=3, num_envs=3, env_args={"how": "exits", "at": at, "in_seed": deadly}
    ) as on:
        deaths = 2 if mode == "episodes" else 1
        on.run(lambda: len(on.supervisor.losses) == deaths)
        on.learn(20)
        assert (len(on.supervisor.losses), on.supervisor.given_up) == (deaths, 0)
        worker = on.supervisor.losses[0].worker
        on.run(lambda: on.audit.incarnations().get(worker) == deaths)


@pytest.mark.parametrize("options", [{"episodes_per_update": 4}, *[{}] * LONG])
def test_a_wave_does_not_wait_for_a_worker_that_is_lost_for_good(options: dict[str, int]) -> None:
    args = {"how": "exits", "only": 1}
    with trial(world("Mishap"), "episodes", workers=4, num_envs=4, env_args=args, wave=True, **options) as on:
        on.run(lambda: on.supervisor.given_up == 1)
        on.learn(5)


@pytest.mark.parametrize("mode", MODES)
def test_everything_at_once(mode: str) -> None:
    """Envs that raise, lie, nap, crash and exit, in workers that are killed: no row that is not whole, none that comes twice."""
    lanes = 1 if mode == "episodes" else 2
    options: dict[str, Any] = {"workers": 4, "num_envs": 4 * lanes, "step_timeout": 5.0}
    with trial(world("Mishap"), mode, env_args={"how": "anything", "rate": 0.01}, **options) as on:
        on.wait_for_workers()
        with Killer(on.supervisor, rate=2.0):
            on.run_for(120.0 if LONG else 1.0)
        on.learn(1)
        assert on.dropped.keys() <= {"env_error", "nan", "shape", "stale", "worker_death"}
        assert {"nan", "shape"} & on.dropped.keys()
        assert finite(on.learner.snapshot())
        assert on.supervisor.losses
