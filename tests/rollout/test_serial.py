"""SerialCollector: acts in the caller's process when the learner waits."""

from __future__ import annotations

import pytest

from freewheel.collect.quota import Quota
from freewheel.collect.serial import SerialCollector
from freewheel.core import WORKER_TIME, RowCounts, Snapshot
from freewheel.rollout.runner import Runner
from tests.rollout.conftest import FakeSetup

WAIT, LOAD = (WORKER_TIME.index(kind) for kind in ("wait-credit", "load"))


def test_it_acts_during_a_wait_with_the_last_weights(fake: FakeSetup) -> None:
    with SerialCollector(Runner(fake.factory, range(2)), Quota(3, 2)) as collector:
        collector.publish(Snapshot(4, {}), done=0)
        collector.publish(Snapshot(5, {}), done=0)
        assert collector.oldest() is None
        assert collector.collect(wait=False) == ()
        assert fake.env.steps == 0
        (first,) = collector.collect(wait=True)
        (second,) = collector.collect(wait=True)
    assert fake.env.closed == 1
    assert (first.version, first.rows, first.data.valid.shape) == (5, 6, (3, 2))
    assert [chunk.origin.sequence for chunk in (first, second)] == [0, 1]
    assert collector.rows() == RowCounts(produced=12)
    assert collector.stats() == {"queue_util": None}
    assert (collector.messages(), collector.summary()) == ((), {"out_of_space": 0})


def test_time_between_calls_is_waiting_except_loading(fake: FakeSetup) -> None:
    with SerialCollector(Runner(fake.factory, range(2)), Quota(3, 2)) as collector:
        fake.clock.now += 4_000
        (first,) = collector.collect(wait=True)
        began = fake.clock.now
        fake.clock.now += 9_000
        collector.publish(Snapshot(1, {}), done=0)
        fake.clock.now += 500
        (second,) = collector.collect(wait=True)
    assert first.time[WAIT] == pytest.approx(4_000, abs=2)
    assert second.time[WAIT] == pytest.approx(9_500, abs=6)
    assert second.time[LOAD] == pytest.approx(30, abs=2)
    assert int(second.time.sum()) == pytest.approx(fake.clock.now - began, abs=8)


def test_leaving_with_an_error_closes_the_env_and_keeps_the_counts(fake: FakeSetup) -> None:
    fake.faults[(2, 0)] = {"raise": 1}
    collector = SerialCollector(Runner(fake.factory, range(2)), Quota(4, 2))
    with pytest.raises(RuntimeError, match="broken"), collector:
        collector.collect(wait=True)
    assert fake.env.closed == 1
    assert collector.rows() == RowCounts(produced=4, open=4)


def test_the_steps_of_an_update_come_in_chunks_that_end_with_it(fake: FakeSetup) -> None:
    with SerialCollector(Runner(fake.factory, range(2)), Quota(10, 2, 4)) as collector:
        collector.publish(Snapshot(1, {}), done=0)
        chunks = [chunk for _ in range(6) for chunk in collector.collect(wait=True)]
    assert [len(chunk.data.reward) for chunk in chunks] == [4, 4, 2, 4, 4, 2]
    assert [chunk.origin.sequence for chunk in chunks] == list(range(6))
