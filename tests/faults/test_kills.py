"""Workers that are killed or run out of memory: no row is lost or repeated, they are reported and replaced."""

from __future__ import annotations

import re
import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freewheel.seeding import tree
from tests.support.chaos import Killer, every, finite, kill, modes, tokens, trial, used_tokens, world
from tests.support.places import LONG
from tests.support.trainers import SEED, alive

WORKERS = 8
KILLING_S, RATE = 60.0, 0.8 if LONG else 12.0  # seconds in the long form, kills a second
KILLS = int(RATE * KILLING_S / 3) if LONG else 5
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


@pytest.mark.parametrize(
    ("mode", "options"), [*(pytest.param(*kind, marks=pytest.mark.system) for kind in KINDS[: None if LONG else 3])]
)
def test_many_kills_lose_and_repeat_no_row(mode: str, options: dict[str, Any]) -> None:
    with trial(world("Certified"), mode, **{"workers": WORKERS, "num_envs": WORKERS, **options}) as on:
        on.wait_for_workers()
        on.learn(1)
        undisturbed = on.run_for(KILLING_S) if LONG else 0
        on.longest_wait, before = 0.0, on.learner.version
        with Killer(on.supervisor, RATE) as killer:
            rows = on.run_for(KILLING_S) if LONG else 0
            on.run(lambda: len(killer.kills) >= KILLS and on.learner.version > before + 10)
        ended = time.monotonic()
        on.run(lambda: on.supervisor.restarts == len(killer.kills))
        on.run(lambda: len(on.audit.incarnations(since=ended)) == WORKERS)  # all workers act again
        assert on.collector.summary()["worker_restarts"] == len(killer.kills)
        assert on.collector.summary()["workers_lost"] == 0
        lost = {(loss.worker, loss.incarnation): loss for loss in on.supervisor.losses}
        assert lost.keys() == {(one.worker, one.incarnation) for one in killer.kills}
        assert all("was killed (SIGKILL" in loss.reason for loss in lost.values())
        expected = {"batch": set[str](), "continuous": {"stale"}, "episodes": {"stale", "worker_death"}}
        assert on.dropped.keys() <= expected[mode]
        assert on.dropped or not on.audit.gaps  # there is a gap only where a row was dropped
        if LONG:
            assert np.quantile([lost[one.worker, one.incarnation].seen - one.at for one in killer.kills], 0.99) < 0.1
            assert rows > 0.7 * undisturbed
            assert on.longest_wait < 2.0


@pytest.mark.parametrize("mode", modes("batch"))
def test_all_workers_act_again_after_all_were_killed(mode: str) -> None:
    with trial(world("Certified"), mode, workers=WORKERS, num_envs=WORKERS) as on:
        on.wait_for_workers()
        on.learn(3)
        for slot in on.supervisor.slots:
            assert kill(slot, [])
        on.run(lambda: on.audit.incarnations() == dict.fromkeys(range(WORKERS), 1))
        assert len(on.supervisor.losses) == on.supervisor.restarts == WORKERS
        on.learn(3)


@pytest.mark.parametrize("mode", modes("continuous") if LONG else ["continuous"])
def test_workers_are_replaced_if_the_forkserver_dies(mode: str) -> None:
    """They outlive it, but their deaths could not be detected, so they are killed and replaced."""
    with trial(world("Certified"), mode, workers=4, num_envs=4) as on:
        for turn in range(1, 11 if LONG else 2):
            on.wait_for_workers()
            workers = on.processes()
            server = workers[0].parent()
            assert server is not None
            server.kill()
            expected = dict.fromkeys(range(4), turn)
            on.run(lambda expected=expected: on.audit.incarnations() == expected)  # type: ignore[misc]
            assert not any(map(alive, workers))
        assert {loss.reason for loss in on.supervisor.losses} == {"lost its forkserver"}


@pytest.mark.parametrize(
    ("mode", "how", "reason"),
    every(
        ("is killed", "was killed (SIGKILL"),
        ("crashes", "was killed (SIGSEGV) in step"),
        ("exits", "ended (exit code 7) in step"),
    ),
)
def test_an_env_that_ends_its_process_is_told_and_replaced(mode: str, how: str, reason: str, tmp_path: Path) -> None:
    """It ends its process twice."""
    args = {"how": how, "only": 1, "at": 4, "folder": tokens(tmp_path, 2)}
    with trial(world("Faulty"), mode, workers=3, num_envs=3, env_args=args) as on:
        on.run(lambda: on.audit.incarnations().get(1) == 2)
        assert [loss.worker for loss in on.supervisor.losses] == [1, 1]
        assert [used.worker for used in used_tokens(tmp_path)] == [1, 1]
        on.run(lambda: on.shown.count(f"worker 1 {reason}") == on.shown.count("and is replaced") == 2)


@pytest.mark.parametrize(("mode", "at"), every((4,), (15,)))
def test_an_episode_that_kills_its_worker_is_skipped(mode: str, at: int) -> None:
    """In mode episodes it is played once more; then it is skipped."""
    deadly = next(seed for number in count() if (seed := tree(SEED, "env", 1, number)) % 20 > 12)
    args = {"how": "exits", "at": at, "in_seed": deadly}
    with trial(world("Faulty"), mode, workers=3, num_envs=3, env_args=args) as on:
        deaths = 2 if mode == "episodes" else 1
        on.run(lambda: len(on.supervisor.losses) == deaths)
        on.learn(10)
        assert (len(on.supervisor.losses), on.supervisor.given_up) == (deaths, 0)
        worker = on.supervisor.losses[0].worker
        on.run(lambda: on.audit.incarnations().get(worker) == deaths)


@pytest.mark.parametrize("options", [{"episodes_per_update": 4}, *[{}] * LONG])
def test_a_wave_does_not_wait_for_a_worker_that_was_given_up(options: dict[str, int]) -> None:
    args = {"how": "exits", "only": 1}
    with trial(world("Faulty"), "episodes", workers=4, num_envs=4, env_args=args, wave=True, **options) as on:
        on.run(lambda: on.supervisor.given_up == 1)
        on.learn(5)


@pytest.mark.system
@pytest.mark.parametrize("mode", modes("batch"))
def test_all_kinds_of_faults_together(mode: str) -> None:
    """Envs that raise, give invalid answers, sleep, crash and exit, in workers that are killed: no row is broken or repeated."""
    lanes = 1 if mode == "episodes" else 2
    options: dict[str, Any] = {"workers": 4, "num_envs": 4 * lanes, "step_timeout": 5.0}
    with trial(world("Faulty"), mode, env_args={"how": "anything", "rate": 0.01}, **options) as on:
        on.wait_for_workers()
        with Killer(on.supervisor, rate=2.0):
            on.run_for(120.0 if LONG else 0.5)
            on.run(lambda: bool(on.supervisor.losses and {"nan", "shape"} & on.dropped.keys()))
        on.learn(1)
        assert on.dropped.keys() <= {"env_error", "nan", "shape", "stale", "worker_death"}
        assert finite(on.learner.snapshot())


@pytest.mark.parametrize(("mode", "at"), every((12,), (0,)))
def test_a_worker_that_ran_out_of_memory_is_reported_and_replaced(mode: str, at: int, tmp_path: Path) -> None:
    args = {"how": "grows", "only": 1, "at": at, "folder": tokens(tmp_path, 0)}
    with trial(world("Faulty"), mode, workers=3, num_envs=3, env_args=args) as on:
        on.wait_for_workers()
        on.learn(2)
        tokens(tmp_path, 1)
        on.run(lambda: bool(on.supervisor.losses))
        (loss,) = on.supervisor.losses
        assert (loss.worker, loss.given_up) == (1, False)
        told = r"^worker 1 ended \(exit code 1\) and is replaced\nout of memory, peak (\d+) MB$"
        found = re.search(told, str(loss), re.M)
        assert found is not None, str(loss)
        assert 64 < int(found[1]) < 1024
        on.run(lambda: on.audit.incarnations().get(1) == 1)
        on.learn(2)
        assert len(on.supervisor.losses) == on.supervisor.restarts == 1


def test_a_worker_that_was_killed_may_have_been_out_of_memory() -> None:
    """The kernel sends SIGKILL in that case."""
    args = {"how": "is killed", "only": 0, "at": 15}
    with trial(world("Faulty"), "continuous", workers=2, num_envs=2, env_args=args) as on:
        on.run(lambda: len(on.supervisor.losses) > 0)
        told = r"was killed \(SIGKILL; out of memory\? its peak was \d+ MB\)"
        assert re.fullmatch(told, on.supervisor.losses[0].reason)
