"""The queue keeps each worker's fragments in order and counts every row once, even if its data is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from freewheel.core import WORKER_TIME, EnvSpec
from freewheel.envs.gym import GymConfig
from freewheel.rollout.runner import empty_transitions
from freewheel.transport.wire import Fragment, WorkerRows
from freewheel_ray.actors.queue import FragmentQueue


@pytest.fixture(scope="module")
def env() -> EnvSpec:
    with closing(GymConfig(id="tests.support.worlds:Drifting").make(range(1))) as made:
        return replace(made.spec, lanes=1)


@pytest.fixture
def queue(env: EnvSpec) -> Iterator[FragmentQueue]:
    with closing(FragmentQueue(2, env)) as queue:
        yield queue


def fragment(env: EnvSpec, worker: int, version: int, steps: int, **lost: int) -> Fragment:
    data = empty_transitions(steps, env)
    data.valid[:] = True
    time = np.zeros(len(WORKER_TIME), np.int64)
    return Fragment(worker, 0, version, data, np.zeros((1, 0)), (), steps, lost, False, time)


def test_rows_count_from_when_their_number_is_known(queue: FragmentQueue, env: EnvSpec) -> None:
    first = fragment(env, 0, 1, 4)
    coming = queue.put(first._replace(data=None), complete=False)  # type: ignore[arg-type]
    queue.put(fragment(env, 0, 2, 3))
    queue.put(fragment(env, 1, 3, 2, nan=1))
    assert queue.account(0) == WorkerRows(7, 7, 0)
    assert queue.account(1) == WorkerRows(3, 3, 0)
    assert sorted(queue.versions()) == [1, 3], "what has not arrived holds the gate"
    assert [one.version for one in queue.take()] == [3], "a worker's fragments stay in order"
    queue.arrived(coming, first.data)
    assert [one.version for one in queue.take()] == [1, 2]
    assert (queue.account(0), queue.waiting(), queue.versions()) == (WorkerRows(7, 0, 0), 0, [])


def test_data_that_is_lost_is_produced_and_dropped(queue: FragmentQueue, env: EnvSpec) -> None:
    queue.arrived(queue.put(fragment(env, 0, 1, 4, nan=2), complete=False), None)
    (found,) = queue.take()
    assert (found.rows, found.lost, found.gap, len(found.data.valid)) == (0, {"nan": 2, "worker_death": 4}, True, 0)
    assert queue.account(0) == WorkerRows(6, 0, 0)


def test_what_never_comes_is_lost_at_the_end(queue: FragmentQueue, env: EnvSpec) -> None:
    queue.put(fragment(env, 0, 1, 4), complete=False)
    queue.put_part(fragment(env, 1, 1, 2))
    queue.lose_the_rest()
    assert sorted((one.worker, one.rows, one.lost.get("worker_death", 0)) for one in queue.take()) == [
        (0, 0, 4),
        (1, 2, 0),
    ]


def test_the_first_rows_of_an_open_fragment_come_once_and_first(queue: FragmentQueue, env: EnvSpec) -> None:
    queue.put_part(fragment(env, 0, 1, 2))
    assert queue.take() == []
    assert queue.account(0) == WorkerRows(2, 2, 0)
    part = queue.take_part(0)
    assert part is not None
    assert (part.rows, queue.take_part(0), queue.account(0)) == (2, None, WorkerRows(2, 0, 0))
    queue.put_part(fragment(env, 0, 1, 3))
    queue.put(fragment(env, 0, 1, 1))  # the remaining rows arrived before the learner asked again
    assert [one.rows for one in queue.take()] == [3, 1]


def test_rows_may_be_changed(queue: FragmentQueue, env: EnvSpec) -> None:
    """Arrays from Ray are read-only."""
    came = fragment(env, 0, 1, 2)
    came.data.obs.flags.writeable = False
    queue.put(came)
    (found,) = queue.take()
    found.data.obs[:] = 1.0
