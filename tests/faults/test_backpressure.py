"""A learner that stops or is slow: workers wait at the configured limit, or the oldest rows are dropped and counted."""

from __future__ import annotations

import time

import psutil
import pytest

from tests.support.chaos import Killer, Trial, idle, trial, world
from tests.support.places import LONG
from tests.support.trainers import LIMIT, wait_until

WORKERS, STEPS, ROWS = 4, 16, 64  # ROWS = WORKERS x STEPS is S
PAUSE_S = 60.0 if LONG else 0.2


def standstill(on: Trial) -> int:
    """Rows produced when all workers wait; checks that they still wait some time later."""
    wait_until(lambda: idle(on), what="the workers do not stop")
    memory, produced = footprint(on), on.balance().produced
    time.sleep(PAUSE_S)
    assert on.balance().produced == produced
    assert footprint(on) < 1.05 * memory
    return produced


def footprint(on: Trial) -> int:
    """Bytes of private memory of the workers and this process."""
    return sum(process.memory_full_info().uss for process in (psutil.Process(), *on.processes()))


CAPACITIES: list[tuple[str, dict[str, int], int]] = [
    ("batch", {}, 2 * ROWS),  # one batch, and the next
    ("continuous", {"max_lag": 1}, 2 * ROWS),  # (max_lag + 1) x S credits
    ("continuous", {"max_lag": 50, "collection_batch_size": 8, "max_queue_size": 12}, 12 * 8),  # fragments
    ("batch", {"collection_batch_size": 5}, 2 * ROWS),
    ("continuous", {"max_lag": 0}, ROWS),
    ("continuous", {"max_lag": 2}, 3 * ROWS),
]


@pytest.mark.parametrize(
    ("mode", "options", "capacity"),
    [CAPACITIES[0], *(pytest.param(*one, marks=pytest.mark.system) for one in CAPACITIES[1:])],
)
def test_when_the_learner_stops_the_workers_stop(mode: str, options: dict[str, int], capacity: int) -> None:
    """Exactly at the configured limit; they continue when the learner continues."""
    with trial(world("Certified"), mode, workers=WORKERS, num_envs=WORKERS, **options) as on:
        on.publish()
        assert standstill(on) == capacity
        on.learn(5)
        assert on.dropped == {}
        assert on.audit.gaps == 0
        on.publish()  # the same weights again: this allows no more rows
        assert standstill(on) - on.delivered <= capacity


def test_the_last_step_may_exceed_the_limit_by_less_than_its_lanes() -> None:
    """Of 3 lanes a worker, by 2: 8 x 3 rows a worker would fit, but there are 7 x 12 in all."""
    with trial(world("Certified"), "continuous", workers=4, num_envs=12, num_steps_per_env=7, max_lag=0) as on:
        on.publish()
        assert 0 <= standstill(on) - 7 * 12 <= 2


@pytest.mark.parametrize("max_lag", [None, pytest.param(1, marks=pytest.mark.system)])
def test_when_the_learner_stops_no_more_episodes_are_begun(max_lag: int | None) -> None:
    """A number of batches; episodes under way are played to their end, of 25 steps at most."""
    options = {} if max_lag is None else {"max_lag": max_lag}
    with trial(world("Certified"), "episodes", workers=WORKERS, num_envs=WORKERS, **options) as on:
        on.publish()
        assert 2 * ROWS <= standstill(on) < 2 * ROWS + WORKERS * 25
        on.learn(5)
        assert on.dropped.keys() <= (set() if max_lag is None else {"stale"})  # of the last episodes begun


def test_no_worker_has_more_fragments_waiting_than_slots() -> None:
    """Long before the credits are used up: four fragments of two steps for each worker."""
    options = {"num_steps_per_env": 1000, "collection_batch_size": 2}
    with trial(world("Certified"), "episodes", workers=WORKERS, num_envs=WORKERS, **options) as on:
        on.publish()
        assert standstill(on) <= WORKERS * 4 * 2
        on.run(lambda: on.delivered > WORKERS * 4 * 2)
        assert on.dropped == {}


@pytest.mark.parametrize("kills", [False, pytest.param(True, marks=pytest.mark.system)])
def test_dropped_rows_of_a_full_queue_are_counted(kills: bool) -> None:
    """With a slow learner; and the same while workers are killed."""
    options = {"max_queue_size": 8, "collection_batch_size": 4, "max_lag": 30, "overflow": "drop-oldest"}
    args = {"seconds": 0.0002}
    with trial(world("Certified"), "continuous", workers=WORKERS, num_envs=WORKERS, env_args=args, **options) as on:
        on.wait_for_workers()
        with Killer(on.supervisor, rate=8.0 if kills else 1e-9) as killer:
            begun = time.monotonic()
            while on.dropped.get("overflow", 0) <= 100 or (kills and len(killer.kills) < (50 if LONG else 2)):
                assert time.monotonic() < begun + LIMIT
                time.sleep(0.02)  # a learner that is slow
                rows = on.balance()
                assert rows.queued + rows.open <= on.learner.rows().queued + WORKERS * 2 * 4
                on.tick()
        on.run(lambda: on.supervisor.restarts == len(killer.kills))
        on.learn(3)
        assert on.dropped.keys() <= {"overflow", "stale"}
        assert on.audit.gaps > 0  # the sequence shows the dropped fragments
