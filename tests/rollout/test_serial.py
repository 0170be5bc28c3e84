"""SerialCollector: acting whenever asked, in the caller's own process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from freewheel.collect.serial import SerialCollector
from freewheel.core import WORKER_TIME, RowCounts, Snapshot
from freewheel.rollout.runner import Runner

if TYPE_CHECKING:
    from tests.rollout.conftest import Stage

WAIT, LOAD = (WORKER_TIME.index(kind) for kind in ("wait-credit", "load"))


def test_it_acts_when_waited_for_with_what_was_published_last(stage: Stage) -> None:
    with SerialCollector(Runner(stage.recipe, range(2)), steps=3) as turns:
        turns.publish(Snapshot(4, {}), done=0)
        turns.publish(Snapshot(5, {}), done=0)
        assert turns.oldest() is None
        assert turns.collect(wait=False) == ()
        assert stage.world.steps == 0
        (first,) = turns.collect(wait=True)
        (second,) = turns.collect(wait=True)
    assert (first.version, first.rows, first.data.valid.shape) == (5, 6, (3, 2))
    assert [chunk.origin.sequence for chunk in (first, second)] == [0, 1]
    assert turns.rows() == RowCounts(produced=12)
    assert turns.stats() == {"queue_util": None}
    assert (turns.messages(), turns.summary()) == ((), {})


def test_time_between_turns_is_waiting_apart_from_loading(stage: Stage) -> None:
    with SerialCollector(Runner(stage.recipe, range(2)), steps=3) as turns:
        stage.clock.now += 4_000
        (first,) = turns.collect(wait=True)
        began = stage.clock.now
        stage.clock.now += 9_000
        turns.publish(Snapshot(1, {}), done=0)
        stage.clock.now += 500
        (second,) = turns.collect(wait=True)
    assert first.time[WAIT] == pytest.approx(4_000, abs=2)
    assert second.time[WAIT] == pytest.approx(9_500, abs=6)
    assert second.time[LOAD] == pytest.approx(30, abs=2)
    assert int(second.time.sum()) == pytest.approx(stage.clock.now - began, abs=6)


def test_leaving_closes_the_env(stage: Stage) -> None:
    with SerialCollector(Runner(stage.recipe, range(1)), steps=1):
        pass
    assert stage.world.closed == 1


def test_leaving_with_an_error_closes_the_env_and_keeps_the_books(stage: Stage) -> None:
    stage.tricks[(2, 0)] = {"raise": 1}
    turns = SerialCollector(Runner(stage.recipe, range(2)), steps=4)
    with pytest.raises(RuntimeError, match="broken"), turns:
        turns.collect(wait=True)
    assert stage.world.closed == 1
    assert turns.rows() == RowCounts(produced=4, open=4)
