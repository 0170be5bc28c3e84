"""Workers that hang or are stopped: detected in time, killed and replaced; the others continue."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np
import psutil
import pytest

from freewheel.seeding import training_episodes
from freewheel.transport.workers.worker_slots import WorkerLoss, WorkerSlot
from tests.support.chaos import Trial, every, idle, kill, modes, tokens, trial, used_tokens, world
from tests.support.places import LONG
from tests.support.trainers import SEED, wait_until

# A healthy step takes 1 ms, but the machine may be busy.
STEP_S, RESET_S = (1.0, 1.5) if LONG else (0.7, 0.8)
LIMITS = {"step_timeout": STEP_S, "reset_timeout": RESET_S, "construct_timeout": 60.0}


@pytest.mark.parametrize(("mode", "at", "limit"), every((3, STEP_S), (0, RESET_S)))
def test_an_env_that_hangs_is_replaced_in_time(mode: str, at: int, limit: float, tmp_path: Path) -> None:
    """Even if it ignores SIGTERM."""
    args = {"how": "hangs", "only": 1, "at": at, "folder": tokens(tmp_path, 0)}
    with trial(world("Faulty"), mode, workers=4, num_envs=4, env_args=args, **LIMITS) as on:
        on.wait_for_workers()
        on.learn(2)
        tokens(tmp_path, 1)
        on.run(lambda: bool(losses(on, 1)))
        (loss,), (used,) = losses(on, 1), used_tokens(tmp_path)
        assert limit <= loss.seen - used.at
        call = f"step {at} of the episode with seed" if at else "reset() with seed"
        told = rf"did not return within {limit:g} s from {re.escape(call)} (\d+) \(lane 1 of {re.escape(world('Faulty'))}\)"
        assert loss.worker == 1
        assert (found := re.fullmatch(told, loss.reason)), loss.reason
        seeds = (training_episodes(SEED, lane).seed(number) for number in range(3000) for lane in range(4))
        assert int(found[1]) in seeds
        on.run(lambda: on.audit.incarnations().get(1, 0) > 0)
        assert not psutil.pid_exists(used.pid)
        meanwhile = Counter(one.origin.worker for one in on.audit.deliveries if used.at + 0.2 < one.at < loss.seen)
        if mode != "batch":  # the next batch needs all workers
            assert meanwhile
            assert 1 not in meanwhile
        on.run(lambda: f"worker 1 {loss.reason} and is replaced" in on.messages)


def losses(on: Trial, worker: int) -> list[WorkerLoss]:
    return [loss for loss in on.supervisor.losses if loss.worker == worker]


def stopped(slot: WorkerSlot[ForkServerProcess]) -> psutil.Process:
    """The process of this slot, stopped."""
    assert slot.process is not None
    process = psutil.Process(slot.process.pid)
    process.suspend()
    return process


@pytest.mark.parametrize(("mode", "waiting"), every((True,), (False,)))
def test_a_worker_that_was_stopped_is_replaced(mode: str, waiting: bool) -> None:
    """While it acts; or while all wait for the learner, when nothing needs the stopped one. Its process is dead in the end."""
    with trial(world("Certified"), mode, workers=4, num_envs=4, **LIMITS) as on:
        on.wait_for_workers()
        if waiting:
            wait_until(lambda: idle(on))
        victim = stopped(on.supervisor.slots[2])
        on.run(lambda: bool(losses(on, 2)))
        assert not victim.is_running()
        with pytest.raises(psutil.NoSuchProcess):
            victim.resume()
        on.run(lambda: on.audit.incarnations().get(2, 0) > 0)
        on.learn(2)


@pytest.mark.parametrize("mode", modes("continuous"))
def test_a_worker_that_was_stopped_for_a_short_time_continues(mode: str) -> None:
    """At any moment, for less than the limit: no row is lost or repeated, and the counts always balance."""
    rng = np.random.default_rng(3)
    with trial(world("Certified"), mode, workers=4, num_envs=4, env_args={"seconds": 0.0}) as on:
        on.wait_for_workers()
        for _ in range(500 if LONG else 25):
            victim = stopped(on.supervisor.slots[rng.integers(4)])
            time.sleep(0.01)
            on.balance()
            victim.resume()
            on.tick()
        on.learn(2)
        assert on.supervisor.losses == []
        assert on.dropped.keys() <= {"stale"}


@pytest.mark.parametrize("mode", modes("continuous") if LONG else ["continuous"])
def test_a_worker_stopped_with_the_lock_does_not_block_the_others(mode: str, tmp_path: Path) -> None:
    """Even if another one dies in the meantime."""
    args = {"how": "stops with the lock", "only": 1, "folder": tokens(tmp_path, 0)}
    with trial(world("Faulty"), mode, workers=4, num_envs=4, env_args=args, step_timeout=600.0) as on:
        on.wait_for_workers()
        tokens(tmp_path, 1)
        killer = threading.Thread(target=kill_when_one_is_stopped, args=(on, tmp_path))
        killer.start()
        on.run(lambda: len(on.supervisor.losses) == 2)
        killer.join()
        assert {loss.worker for loss in on.supervisor.losses} == {1, 2}
        on.run(lambda: on.audit.incarnations().items() >= {1: 1, 2: 1}.items())


def kill_when_one_is_stopped(on: Trial, folder: Path) -> None:
    wait_until(lambda: bool(used_tokens(folder)))
    wait_until(lambda: psutil.Process(used_tokens(folder)[0].pid).status() == psutil.STATUS_STOPPED)
    assert kill(on.supervisor.slots[2], [])


@pytest.mark.parametrize(
    "where",
    [pytest.param("constructor", marks=pytest.mark.system), pytest.param("reset", marks=pytest.mark.system), "step"],
)
def test_each_env_of_a_worker_has_its_own_time(where: str) -> None:
    """Four envs in a worker, each of which takes a quarter of a second: less than the time-out, and all of them more."""
    limits = {f"{call}_timeout": 60.0 for call in ("construct", "reset", "step")}
    limits["construct_timeout" if where == "constructor" else f"{where}_timeout"] = 0.8
    with trial(world("Leisurely"), "continuous", workers=1, num_envs=4, env_args={"where": where}, **limits) as on:
        on.run(lambda: on.delivered > 0)
        assert on.supervisor.losses == []


def test_of_several_envs_the_one_that_hangs_is_named(tmp_path: Path) -> None:
    args = {"how": "hangs", "at": 3, "lane": 2, "folder": tokens(tmp_path, 1)}
    with trial(world("Faulty"), "continuous", workers=1, num_envs=4, env_args=args, step_timeout=STEP_S) as on:
        on.run(lambda: bool(on.supervisor.losses))
        seed = training_episodes(SEED, 2).seed(0)
        named = f"did not return within {STEP_S:g} s from step 3 of the episode with seed {seed} (lane 2 of {world('Faulty')})"
        assert on.supervisor.losses[0].reason == named
