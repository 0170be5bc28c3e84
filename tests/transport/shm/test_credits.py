"""Credits: so many rows and no more, whoever waits is woken, and whoever acts on a version can be seen to."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from freewheel.transport.shm.channel import Tally
from freewheel.transport.shm.credits import NOBODY, Credits
from freewheel.transport.shm.memory import SharedArrays
from freewheel.transport.shm.worker import Grant
from tests.support import children

if TYPE_CHECKING:
    from tests.transport.conftest import Start

LIMIT = 20.0
NEW = Tally(0, 0, ended=True)


def came(rows: int) -> Tally:
    return Tally(rows, 0, ended=False)


@pytest.fixture
def credits_() -> Iterator[Credits]:
    """Three workers of four lanes, fragments of five steps."""
    with closing(Credits(3, 4, 5)) as credits_:
        yield credits_


def rung(credits_: Credits) -> list[int]:
    """Whose wakeups were rung."""
    return [worker for worker in range(3) if credits_.wakeups[worker].wait(0.0)]


# ------------------------------------------------------------------------------------------------------------- the formula


def test_nobody_acts_before_the_first_version(credits_: Credits) -> None:
    credits_.allow(1000)
    assert credits_.take(0, NEW) is None
    assert credits_.announced().tolist() == [NOBODY] * 3


def test_grants_are_whole_steps_of_all_lanes_and_the_last_may_overdraw(credits_: Credits) -> None:
    credits_.post(0, 31)
    assert credits_.take(0, NEW) == Grant(5, 0), "a fragment has five steps: 20 rows"
    assert credits_.take(1, NEW) == Grant(2, 0), "two steps of four rows fit in the 11 that are left"
    assert credits_.take(2, NEW) == Grant(1, 0), "one row is left of 31"
    assert credits_.memory["reserved"].tolist() == [20, 8, 4]
    credits_.give_back(2, came(4))
    assert credits_.take(2, came(4)) is None, "32 of 31 are in use"
    credits_.allow(33)
    assert credits_.take(2, came(4)) == Grant(1, 0)


def test_written_rows_stay_reserved_and_unused_ones_flow_back(credits_: Credits) -> None:
    credits_.post(0, 40)
    assert credits_.take(0, NEW) == Grant(5, 0)
    credits_.give_back(0, came(8))
    assert credits_.memory["reserved"].tolist() == [8, 0, 0]
    assert credits_.take(1, NEW) == Grant(5, 0)
    assert credits_.take(0, came(8)) == Grant(3, 0)
    assert credits_.memory["reserved"].tolist() == [20, 20, 0]
    credits_.give_back(0, came(20))
    assert credits_.take(0, came(20)) is None
    credits_.allow(40 + 20)
    assert credits_.take(0, came(20)) == Grant(5, 0)


def test_who_takes_gives_back_in_the_same_breath(credits_: Credits) -> None:
    credits_.post(0, 32)
    assert credits_.take(0, NEW) == Grant(5, 0)
    assert credits_.take(1, NEW) == Grant(3, 0)
    assert credits_.take(2, NEW) is None
    credits_.post(1, 32)
    assert rung(credits_) == [2]
    assert credits_.take(2, NEW) is None
    assert credits_.revoke(0, 0, 4)
    assert rung(credits_) == [2], "16 rows came free"
    assert credits_.take(0, came(8)) == Grant(3, 1), "of 20 it had written 8, one step of them late"
    assert credits_.memory["reserved"].tolist() == [20, 12, 0]
    assert credits_.announced().tolist() == [1, 0, NOBODY], "and it counts again"
    assert credits_.take(2, NEW) is None
    assert credits_.take(1, came(0)) == Grant(3, 1)
    assert credits_.take(0, came(20)) is None
    assert credits_.announced().tolist() == [NOBODY, 1, NOBODY]
    assert rung(credits_) == [], "nothing came free"


def test_what_is_left_after_taking_anew_wakes_others(credits_: Credits) -> None:
    credits_.post(0, 20)
    assert credits_.take(0, NEW) == Grant(5, 0)
    assert credits_.take(1, NEW) is None
    credits_._steps = 1
    assert credits_.take(0, came(4)) == Grant(1, 0)
    assert rung(credits_) == [1], "12 of the 16 rows it gave back are for others"


def test_a_dead_worker_pays_for_what_it_wrote_and_no_more(credits_: Credits) -> None:
    credits_.post(0, 20)
    credits_.take(0, NEW)
    credits_.settle(0, came(4), for_good=False)
    assert credits_.memory["reserved"].tolist() == [4, 0, 0]
    assert credits_.announced().tolist() == [NOBODY] * 3
    assert credits_.take(1, NEW) == Grant(4, 0)


def test_lanes_play_their_own_episodes(credits_: Credits) -> None:
    assert credits_.streams(0) == ()


# ----------------------------------------------------------------------------------------------------------- announcements


def test_who_acts_is_announced_until_it_gives_back(credits_: Credits) -> None:
    credits_.post(3, 100)
    credits_.take(1, NEW)
    assert credits_.announced().tolist() == [NOBODY, 3, NOBODY]
    credits_.post(4, 100)
    credits_.take(0, NEW)
    assert credits_.announced().tolist() == [4, 3, NOBODY]
    credits_.give_back(1, came(4))
    assert credits_.announced().tolist() == [4, NOBODY, NOBODY]


def test_a_newer_version_closes_a_fragment(credits_: Credits) -> None:
    credits_.post(3, 100)
    credits_.take(1, NEW)
    assert not credits_.over(1, 3, ended=True)
    credits_.post(4, 100)
    assert credits_.over(1, 3, ended=False)
    assert not credits_.over(1, 4, ended=False), "it had loaded the newer one already"


def test_a_revoked_worker_closes_and_is_not_waited_for(credits_: Credits) -> None:
    credits_.post(3, 20)
    credits_.take(1, NEW)
    assert credits_.take(0, NEW) is None
    assert credits_.revoke(1, 3, produced=8)
    assert credits_.announced().tolist() == [NOBODY] * 3
    assert credits_.over(1, 3, ended=False)
    assert credits_.take(0, NEW) == Grant(3, 3), "12 of its 20 rows are free again"
    credits_.give_back(1, came(12))
    assert credits_.memory["reserved"].tolist() == [12, 12, 0], "the row that came late counts"
    assert not credits_.over(1, 3, ended=False)
    credits_.allow(100)
    credits_.take(1, came(12))
    assert credits_.announced().tolist() == [3, 3, NOBODY]


def test_a_grant_that_is_gone_cannot_be_revoked(credits_: Credits) -> None:
    credits_.post(3, 100)
    assert not credits_.revoke(1, NOBODY, produced=0), "nobody acts"
    credits_.take(1, NEW)
    credits_.give_back(1, came(20))
    assert not credits_.revoke(1, 3, produced=8)
    credits_.post(4, 100)
    credits_.take(1, came(20))
    assert not credits_.revoke(1, 3, produced=8)
    assert credits_.announced().tolist() == [NOBODY, 4, NOBODY]
    assert credits_.memory["reserved"].tolist() == [0, 40, 0]


# ------------------------------------------------------------------------------------------------------------------ waiting

EVENTS: dict[str, Callable[[Credits], object]] = {
    "post": lambda credits_: credits_.post(1, 40),
    "allow": lambda credits_: credits_.allow(40),
    "unused rows": lambda credits_: credits_.give_back(0, came(8)),
    "revoke": lambda credits_: credits_.revoke(0, 0, produced=8),
    "death": lambda credits_: credits_.settle(0, came(8), for_good=False),
}


@pytest.mark.parametrize("event", EVENTS)
def test_whoever_waits_is_woken_once(credits_: Credits, event: str) -> None:
    credits_.post(0, 20)
    credits_.take(0, NEW)
    assert credits_.take(1, NEW) is None
    assert credits_.take(2, NEW) is None
    assert rung(credits_) == []
    EVENTS[event](credits_)
    assert rung(credits_) == [1, 2]
    assert credits_.take(1, NEW) is not None
    EVENTS[event](credits_)
    assert rung(credits_) == [], "nobody waits any more"


def test_a_fragment_used_up_wakes_nobody(credits_: Credits) -> None:
    credits_.post(0, 20)
    credits_.take(0, NEW)
    credits_.take(1, NEW)
    credits_.give_back(0, came(20))
    assert rung(credits_) == []


def test_a_worker_that_died_waiting_is_not_rung_for(credits_: Credits) -> None:
    credits_.post(0, 0)
    credits_.take(0, NEW)
    credits_.take(1, NEW)
    credits_.settle(0, NEW, for_good=True)
    assert rung(credits_) == [1]


def test_processes_are_woken_by_a_post(credits_: Credits, start: Start) -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with ours, theirs:
        for worker in range(3):
            start(children.wait_for_grant, credits_, worker, theirs)
        assert [ours.recv() for _ in range(3) if ours.poll(LIMIT)] == ["waiting"] * 3
        credits_.post(7, 60)
        assert [ours.recv() for _ in range(3) if ours.poll(LIMIT)] == [(5, 7)] * 3


# --------------------------------------------------------------------------------------------------------------------- races


def test_nobody_who_acts_is_overlooked(credits_: Credits, start: Start) -> None:
    """Post and take race: a worker that a scan after the post does not show will never act on anything older."""
    grants = 3000
    with closing(SharedArrays({"log": ((2, grants), "i8"), "count": ((2,), "i8")})) as memory:
        processes = [start(children.act_again_and_again, credits_, worker, memory) for worker in range(2)]
        scans: list[tuple[int, int, int]] = []
        version, seen = 0, set[int]()
        while (memory["count"] < grants).any():
            version += 1
            credits_.post(version, 2**40)
            announced = credits_.announced()
            idle = [worker for worker in range(2) if announced[worker] == NOBODY]
            scans += [(worker, int(memory["count"][worker]), version) for worker in idle]
            seen.update(announced.tolist())
            assert all(process.is_alive() or process.exitcode == 0 for process in processes)
        for worker, count, posted in scans:
            assert (memory["log"][worker, count:] >= posted).all()
        for process in processes:
            process.join(LIMIT)
            assert process.exitcode == 0
        assert len(seen) > 10, "they were met in the act"
        assert len(scans) > 10, "and idle"
