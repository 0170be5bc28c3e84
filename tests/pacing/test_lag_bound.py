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


def test_take_gives_back_in_the_same_operation(permits: Permits) -> None:
    permits.publish(0, 32)
    assert permits.take(0, NEW) == Grant(5, 0)
    assert permits.take(1, NEW) == Grant(3, 0)
    assert permits.take(2, NEW) is None
    permits.publish(1, 32)
    assert woken_workers(permits) == [], "a new version alone lets nobody act"
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
    permits.pacing.cells["steps"][0] = 1
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


EVENTS: dict[str, Callable[[Permits], object]] = {
    "post": lambda permits: permits.publish(1, 41),
    "allow": lambda permits: permits.allow(41),
    "unused rows": lambda permits: permits.give_back(0, tally(-1)),  # as if 21 of 20 rows had not been written
    "revoke": lambda permits: permits.revoke(0, 0, produced=-1),
    "death": lambda permits: permits.settle(0, tally(-1), for_good=False),
}


@pytest.mark.parametrize("event", EVENTS)
def test_a_waiting_worker_is_woken_once(permits: Permits, event: str) -> None:
    """21 rows are enough for a fragment of one and a step of the other."""
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


def test_no_more_workers_are_woken_than_can_act_and_each_in_its_turn(permits: Permits) -> None:
    permits.publish(0, 0)
    for worker in range(3):
        assert permits.take(worker, NEW) is None
    produced = [0, 0, 0]
    for limit, expected in ((20, 0), (40, 1), (60, 2), (80, 0)):
        permits.allow(limit)
        assert woken_workers(permits) == [expected], "20 rows are one fragment"
        assert permits.take(expected, tally(produced[expected])) == Grant(5, 0)
        produced[expected] += 20
        assert permits.take(expected, tally(produced[expected])) is None


@pytest.fixture
def in_turn(place: Place) -> Permits:
    """One of three workers may act at a time; there is credit for all."""
    pacing = bound()
    pacing.turns = 1
    pacing.attach({name: [0] * count for name, count in pacing.layout.items()})
    permits = place(pacing)
    permits.publish(0, 10_000)
    return permits


def test_one_acts_at_a_time_and_each_in_its_turn(in_turn: Permits) -> None:
    assert in_turn.take(0, NEW) == Grant(5, 0)
    assert in_turn.take(1, NEW) is None
    assert in_turn.take(2, NEW) is None
    written = [0, 0, 0]
    order = []
    acting = 0
    for _ in range(9):
        order.append(acting)
        written[acting] += 20
        assert in_turn.take(acting, tally(written[acting])) is None, "others wait"
        (following,) = woken_workers(in_turn)
        assert in_turn.take(following, tally(written[following])) == Grant(5, 0)
        acting = following
    assert order == [0, 1, 2] * 3


def test_a_worker_alone_keeps_its_turn_and_one_that_was_not_called_waits(in_turn: Permits) -> None:
    assert in_turn.take(0, NEW) == Grant(5, 0)
    assert in_turn.take(0, tally(20)) == Grant(5, 0), "nobody waits"
    assert in_turn.take(1, NEW) is None
    in_turn.give_back(0, tally(40))
    assert woken_workers(in_turn) == [1]
    assert in_turn.take(2, NEW) is None, "1 has been called"
    assert in_turn.take(0, tally(40)) is None
    assert in_turn.take(1, NEW) == Grant(5, 0)


@pytest.mark.parametrize("how", ["dies", "is revoked", "is late"])
def test_the_turn_of_a_worker_that_is_stuck_goes_to_another(in_turn: Permits, how: str) -> None:
    assert in_turn.take(0, NEW) == Grant(5, 0)
    assert in_turn.take(1, NEW) is None
    pacing = in_turn.pacing
    assert isinstance(pacing, LagBound)
    if how == "dies":
        in_turn.settle(0, tally(4), for_good=False)
    elif how == "is revoked":
        assert in_turn.revoke(0, 0, produced=4)
    else:
        in_turn.wake(in_turn.locked(pacing.lend, 0))
        assert announced(in_turn) == [0, NO_VERSION, NO_VERSION], "the learner still waits for it"
    assert woken_workers(in_turn) == [1]
    assert in_turn.take(1, NEW) == Grant(5, 0)
    assert in_turn.take(0, tally(4)) is None, "the turn is 1's now"


def test_a_call_that_is_not_heard_goes_to_another(in_turn: Permits) -> None:
    assert in_turn.take(0, NEW) == Grant(5, 0)
    assert [in_turn.take(worker, NEW) for worker in (1, 2)] == [None, None]
    in_turn.give_back(0, tally(20))
    assert woken_workers(in_turn) == [1]
    pacing = in_turn.pacing
    assert isinstance(pacing, LagBound)
    in_turn.wake(in_turn.locked(pacing.lend, 1))
    assert woken_workers(in_turn) == [2]
    assert in_turn.take(2, NEW) == Grant(5, 0)
    assert in_turn.take(1, NEW) is None


def test_more_turns_call_those_that_wait_and_fewer_hold_from_the_next_fragment_on(in_turn: Permits) -> None:
    assert [in_turn.take(worker, NEW) is None for worker in range(3)] == [False, True, True]
    pacing = in_turn.pacing
    assert isinstance(pacing, LagBound)
    in_turn.wake(in_turn.locked(pacing.set_turns, 3))
    assert woken_workers(in_turn) == [1, 2]
    assert [in_turn.take(worker, NEW) is None for worker in (1, 2)] == [False, False]
    in_turn.wake(in_turn.locked(pacing.set_turns, 2))
    assert in_turn.take(0, tally(20)) is None
    assert in_turn.take(1, tally(20)) is None, "0 comes first"


def test_a_worker_that_died_while_waiting_is_not_woken(permits: Permits) -> None:
    permits.publish(0, 0)
    permits.take(0, NEW)
    permits.take(1, NEW)
    permits.settle(0, NEW, for_good=True)
    permits.allow(40)
    assert woken_workers(permits) == [1]


@pytest.mark.parametrize(
    ("max_lag", "blocking"), [(0, [True, True, True, False]), (1, [True, True, False, False]), (None, [False] * 4)]
)
def test_old_versions_under_way_delay_the_next_batch(max_lag: int | None, blocking: list[bool]) -> None:
    pacing = bound(max_lag=max_lag)
    pacing.publish(2, 0)
    assert [pacing.blocks(version) for version in range(4)] == blocking
    assert not pacing.blocks(None), "nothing is under way"


def test_no_row_is_acted_that_the_run_does_not_need(place: Place) -> None:
    pacing = LagBound(workers=3, lanes=4, steps=5, batch_rows=40, ahead=2, max_lag=2, whole=80)
    permits = place(pacing)
    permits.publish(0, 0)
    assert pacing.free == 80, "not three batches: the run ends after two"
    assert permits.take(0, NEW) == Grant(5, 0)
    permits.publish(1, 40)
    assert permits.take(1, NEW) == Grant(1, 1), "the last batch comes in short fragments: nobody is waited for long"
    permits.publish(2, 80)
    assert pacing.free == 80 - 20 - 4
    pacing.go_on()
    assert pacing.whole == 80, "workers act"


def test_a_learner_that_takes_more_than_was_known_gets_it(place: Place) -> None:
    pacing = LagBound(workers=1, lanes=1, steps=40, batch_rows=20, ahead=0, max_lag=2, whole=20)
    permits = place(pacing)
    permits.publish(0, 0)
    permits.take(0, NEW)
    permits.give_back(0, tally(20))
    pacing.go_on()
    permits.allow(5)
    assert permits.take(0, tally(20)) == Grant(5, 0)
    permits.give_back(0, tally(25))
    permits.publish(1, 20)
    assert permits.take(0, tally(25)) is not None
