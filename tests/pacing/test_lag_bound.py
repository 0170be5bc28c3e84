"""LagBound: a bounded number of rows, waiting workers are woken, and the version of every acting worker is announced."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from freewheel.pacing.lag_bound import LagBound
from freewheel.pacing.pacing import NO_VERSION, Grant, Tally
from freewheel.transport.wire import Permits
from tests.pacing.conftest import Place, woken

NEW = Tally(0, 0, ended=True)


def tally(rows: int) -> Tally:
    return Tally(rows, 0, ended=False)


def bound(steps: int = 5, max_lag: int | None = 1) -> LagBound:
    """Three workers of four lanes. `batch_rows` and `ahead` are 0, so `done` is the limit."""
    return LagBound(workers=3, lanes=4, steps=steps, batch_rows=0, ahead=0, max_lag=max_lag)


@pytest.fixture
def permits(place: Place) -> Permits:
    return place(bound())


def woken_workers(permits: Permits) -> list[int]:
    return woken(permits, 3)


def reserved(permits: Permits) -> list[int]:
    return list(permits.pacing.cells["reserved"])


def announced(permits: Permits) -> list[int]:
    return permits.pacing.announced()


def closes(permits: Permits, worker: int, version: int) -> bool:
    return permits.pacing.closes(worker, version, ended=False)


# ------------------------------------------------------------------------------------------------------------- the formula


def test_no_worker_acts_before_the_first_version(permits: Permits) -> None:
    permits.allow(1000)
    assert permits.take(0, NEW) is None
    assert announced(permits) == [NO_VERSION] * 3


def test_grants_are_whole_steps_of_all_lanes_and_the_last_may_overdraw(permits: Permits) -> None:
    permits.publish(0, 31)
    assert permits.take(0, NEW) == Grant(5, 0), "a fragment has five steps: 20 rows"
    assert permits.take(1, NEW) == Grant(2, 0), "two steps of four rows fit in the 11 that are left"
    assert permits.take(2, NEW) == Grant(1, 0), "one row is left of 31"
    assert reserved(permits) == [20, 8, 4]
    permits.give_back(2, tally(4))
    assert permits.take(2, tally(4)) is None, "32 of 31 are in use"
    permits.allow(33)
    assert permits.take(2, tally(4)) == Grant(1, 0)


def test_written_rows_stay_reserved_and_unused_ones_are_freed(permits: Permits) -> None:
    permits.publish(0, 40)
    assert permits.take(0, NEW) == Grant(5, 0)
    permits.give_back(0, tally(8))
    assert reserved(permits) == [8, 0, 0]
    assert permits.take(1, NEW) == Grant(5, 0)
    assert permits.take(0, tally(8)) == Grant(3, 0)
    assert reserved(permits) == [20, 20, 0]
    permits.give_back(0, tally(20))
    assert permits.take(0, tally(20)) is None
    permits.allow(40 + 20)
    assert permits.take(0, tally(20)) == Grant(5, 0)


def test_take_gives_back_in_the_same_operation(permits: Permits) -> None:
    permits.publish(0, 32)
    assert permits.take(0, NEW) == Grant(5, 0)
    assert permits.take(1, NEW) == Grant(3, 0)
    assert permits.take(2, NEW) is None
    permits.publish(1, 32)
    assert woken_workers(permits) == [2]
    assert permits.take(2, NEW) is None
    assert permits.revoke(0, 0, 4)
    assert woken_workers(permits) == [2], "16 rows were freed"
    assert permits.take(0, tally(8)) == Grant(3, 1), "of 20 it had written 8, one step of them late"
    assert reserved(permits) == [20, 12, 0]
    assert announced(permits) == [1, 0, NO_VERSION], "it is announced again"
    assert permits.take(2, NEW) is None
    assert permits.take(1, tally(0)) == Grant(3, 1)
    assert permits.take(0, tally(20)) is None
    assert announced(permits) == [NO_VERSION, 1, NO_VERSION]
    assert woken_workers(permits) == [], "nothing was freed"


def test_rows_left_after_taking_again_wake_others(permits: Permits) -> None:
    permits.publish(0, 20)
    assert permits.take(0, NEW) == Grant(5, 0)
    assert permits.take(1, NEW) is None
    assert isinstance(permits.pacing, LagBound)
    permits.pacing.steps = 1
    assert permits.take(0, tally(4)) == Grant(1, 0)
    assert woken_workers(permits) == [1], "12 of the 16 rows it gave back are for others"


def test_a_dead_worker_keeps_only_its_written_rows_reserved(permits: Permits) -> None:
    permits.publish(0, 20)
    permits.take(0, NEW)
    permits.settle(0, tally(4), for_good=False)
    assert reserved(permits) == [4, 0, 0]
    assert announced(permits) == [NO_VERSION] * 3
    assert permits.take(1, NEW) == Grant(4, 0)


def test_lanes_play_their_own_episodes(permits: Permits) -> None:
    assert permits.streams(0) == ()


# ----------------------------------------------------------------------------------------------------------- announcements


def test_an_acting_worker_is_announced_until_it_gives_back(permits: Permits) -> None:
    permits.publish(3, 100)
    permits.take(1, NEW)
    assert announced(permits) == [NO_VERSION, 3, NO_VERSION]
    permits.publish(4, 100)
    permits.take(0, NEW)
    assert announced(permits) == [4, 3, NO_VERSION]
    permits.give_back(1, tally(4))
    assert announced(permits) == [4, NO_VERSION, NO_VERSION]


def test_a_newer_version_closes_a_fragment(permits: Permits) -> None:
    permits.publish(3, 100)
    permits.take(1, NEW)
    assert not closes(permits, 1, 3)
    permits.publish(4, 100)
    assert closes(permits, 1, 3)
    assert not closes(permits, 1, 4), "it had loaded the newer one already"


def test_a_revoked_worker_closes_its_fragment_and_is_not_announced(permits: Permits) -> None:
    permits.publish(3, 20)
    permits.take(1, NEW)
    assert permits.take(0, NEW) is None
    assert permits.revoke(1, 3, produced=8)
    assert announced(permits) == [NO_VERSION] * 3
    assert closes(permits, 1, 3)
    assert permits.take(0, NEW) == Grant(3, 3), "12 of its 20 rows are free again"
    permits.give_back(1, tally(12))
    assert reserved(permits) == [12, 12, 0], "the late row counts"
    assert not closes(permits, 1, 3)
    permits.allow(100)
    permits.take(1, tally(12))
    assert announced(permits) == [3, 3, NO_VERSION]


def test_a_grant_that_has_ended_cannot_be_revoked(permits: Permits) -> None:
    permits.publish(3, 100)
    assert not permits.revoke(1, NO_VERSION, produced=0), "no worker acts"
    permits.take(1, NEW)
    permits.give_back(1, tally(20))
    assert not permits.revoke(1, 3, produced=8)
    permits.publish(4, 100)
    permits.take(1, tally(20))
    assert not permits.revoke(1, 3, produced=8)
    assert announced(permits) == [NO_VERSION, 4, NO_VERSION]
    assert reserved(permits) == [0, 40, 0]


# ------------------------------------------------------------------------------------------------------------------ waiting

EVENTS: dict[str, Callable[[Permits], object]] = {
    "post": lambda permits: permits.publish(1, 40),
    "allow": lambda permits: permits.allow(40),
    "unused rows": lambda permits: permits.give_back(0, tally(8)),
    "revoke": lambda permits: permits.revoke(0, 0, produced=8),
    "death": lambda permits: permits.settle(0, tally(8), for_good=False),
}


@pytest.mark.parametrize("event", EVENTS)
def test_a_waiting_worker_is_woken_once(permits: Permits, event: str) -> None:
    permits.publish(0, 20)
    permits.take(0, NEW)
    assert permits.take(1, NEW) is None
    assert permits.take(2, NEW) is None
    assert woken_workers(permits) == []
    EVENTS[event](permits)
    assert woken_workers(permits) == [1, 2]
    assert permits.take(1, NEW) is not None
    EVENTS[event](permits)
    assert woken_workers(permits) == [], "no worker waits"


def test_a_full_fragment_wakes_no_worker(permits: Permits) -> None:
    permits.publish(0, 20)
    permits.take(0, NEW)
    permits.take(1, NEW)
    permits.give_back(0, tally(20))
    assert woken_workers(permits) == []


def test_a_worker_that_died_while_waiting_is_not_woken(permits: Permits) -> None:
    permits.publish(0, 0)
    permits.take(0, NEW)
    permits.take(1, NEW)
    permits.settle(0, NEW, for_good=True)
    assert woken_workers(permits) == [1]


# -------------------------------------------------------------------------------------------------------------------- blocks


@pytest.mark.parametrize(
    ("max_lag", "blocking"), [(0, [True, True, True, False]), (1, [True, True, False, False]), (None, [False] * 4)]
)
def test_old_versions_under_way_delay_the_next_batch(max_lag: int | None, blocking: list[bool]) -> None:
    pacing = bound(max_lag=max_lag)
    pacing.publish(2, 0)
    assert [pacing.blocks(version) for version in range(4)] == blocking
    assert not pacing.blocks(None), "nothing is under way"
