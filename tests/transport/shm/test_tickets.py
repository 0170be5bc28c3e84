"""EpisodeQueue: every episode is played once, by whoever is free, and again by the heir of who died at it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from freewheel.core import SeedStream
from freewheel.seeding import training_episodes
from freewheel.transport.shm.channel import Tally
from freewheel.transport.shm.tickets import NONE, EpisodeOrder, EpisodeQueue
from freewheel.transport.shm.wakeup import Wakeup
from freewheel.transport.shm.worker import KEEP, Grant
from tests.support import children

if TYPE_CHECKING:
    from tests.transport.conftest import Start

LIMIT = 20.0
STEPS, SEED, LANES = 4, 11, 3
DRAW = EpisodeOrder(SEED, LANES)


def tally(rows: int, *, ended: bool) -> Tally:
    return Tally(rows, 0, ended)


NEW = tally(0, ended=True)


@pytest.fixture
def in_rows() -> Iterator[EpisodeQueue]:
    """Two workers."""
    with closing(EpisodeQueue(2, STEPS, DRAW, in_episodes=False)) as tickets:
        yield tickets


@pytest.fixture
def in_episodes() -> Iterator[EpisodeQueue]:
    with closing(EpisodeQueue(2, STEPS, DRAW, in_episodes=True)) as tickets:
        yield tickets


def stream(tickets: EpisodeQueue, worker: int = 0) -> SeedStream:
    """The episodes of a worker's next incarnation."""
    (only,) = tickets.streams(worker)
    return only


def rung(tickets: EpisodeQueue) -> list[int]:
    """Whose wakeups were rung."""
    return [worker for worker in range(2) if tickets.wakeups[worker].wait(0.0)]


# --------------------------------------------------------------------------------------------------------------- the draw


def test_a_ticket_is_a_number_of_a_lane() -> None:
    assert [DRAW.episode(ticket) for ticket in range(7)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2)]
    for ticket in range(7):
        lane, number = DRAW.episode(ticket)
        assert DRAW.episode_seed(ticket) == training_episodes(SEED, lane).seed(number)


def test_a_stream_takes_the_next_ticket_at_every_episode(in_rows: EpisodeQueue) -> None:
    first, second = stream(in_rows, 0), stream(in_rows, 1)
    assert [first.number(0), first.number(0), second.number(0), first.number(1)] == [0, 0, 1, 2]
    assert [first.number(0), first.number(1)] == [0, 2], "asking again issues nothing"
    assert [first.seed(1), second.seed(0)] == [DRAW.episode_seed(2), DRAW.episode_seed(1)]
    assert in_rows.memory["issued"][0] == 3


def test_processes_never_get_the_same_ticket(in_rows: EpisodeQueue, start: Start) -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with ours, theirs, closing(Wakeup(each=True)) as go:
        for worker in range(2):
            start(children.issue_many, in_rows, worker, go, theirs)
        assert [ours.recv() for _ in range(2) if ours.poll(LIMIT)] == ["ready"] * 2
        go.notify(2)
        issued = [ticket for _ in range(2) if ours.poll(LIMIT) for ticket in ours.recv()]
    assert sorted(issued) == list(range(4000))


def test_who_dies_while_it_is_issued_a_ticket_shares_it_with_nobody(in_rows: EpisodeQueue) -> None:
    assert stream(in_rows).number(0) == 0
    in_rows.memory["ticket"][0] = 1  # killed before `issued` could move
    assert stream(in_rows, 1).number(0) == 2
    assert stream(in_rows, 0).number(0) == 1
    assert stream(in_rows, 0).number(1) == 3


# ------------------------------------------------------------------------------------------------------------- one version each


def test_an_episode_is_played_under_one_version_to_its_end(in_rows: EpisodeQueue) -> None:
    in_rows.post(5, limit=100, expected=10)
    stream(in_rows).number(0)
    assert in_rows.take(0, NEW) == Grant(STEPS, 5)
    in_rows.post(6, limit=100, expected=10)
    assert not in_rows.over(0, 5, ended=False)
    in_rows.give_back(0, tally(4, ended=False))
    assert in_rows.announced().tolist() == [5, NONE]
    assert in_rows.take(0, tally(4, ended=False)) == Grant(STEPS, KEEP)
    assert in_rows.over(0, 5, ended=True)
    in_rows.give_back(0, tally(6, ended=True))
    assert in_rows.announced().tolist() == [NONE, NONE]
    assert in_rows.take(0, tally(6, ended=True)) == Grant(STEPS, 6)


def test_nobody_plays_before_the_first_version(in_rows: EpisodeQueue) -> None:
    in_rows.allow(100)
    assert in_rows.take(0, NEW) is None


def test_a_revoked_episode_is_not_waited_for(in_rows: EpisodeQueue) -> None:
    in_rows.post(5, limit=100, expected=10)
    assert not in_rows.revoke(0, NONE), "nobody plays"
    in_rows.take(0, NEW)
    assert not in_rows.revoke(0, 4)
    assert in_rows.announced().tolist() == [5, NONE]
    assert in_rows.revoke(0, 5)
    assert in_rows.announced().tolist() == [NONE, NONE]
    in_rows.give_back(0, tally(6, ended=True))
    in_rows.take(0, tally(6, ended=True))
    assert in_rows.announced().tolist() == [5, NONE]


# ------------------------------------------------------------------------------------------------------------- how many at once


def test_in_rows_an_episode_counts_as_expected_until_it_has_ended(in_rows: EpisodeQueue) -> None:
    in_rows.post(0, limit=25, expected=10)
    assert in_rows.take(0, NEW) is not None
    assert in_rows.take(1, NEW) is not None
    assert in_rows.memory["reserved"].tolist() == [10, 10]
    in_rows.give_back(0, tally(4, ended=False))
    assert in_rows.memory["reserved"].tolist() == [10, 10], "it goes on"
    in_rows.give_back(0, tally(15, ended=True))
    assert in_rows.memory["reserved"].tolist() == [15, 10]
    assert in_rows.take(0, tally(15, ended=True)) is None
    in_rows.allow(26)
    assert in_rows.take(0, tally(15, ended=True)) == Grant(STEPS, 0)
    assert in_rows.memory["reserved"].tolist() == [25, 10]


def test_in_episodes_every_one_that_was_begun_counts(in_episodes: EpisodeQueue) -> None:
    in_episodes.post(0, limit=3, expected=1)
    for rows in (0, 7):
        assert in_episodes.take(0, tally(rows, ended=True)) == Grant(STEPS, 0)
        in_episodes.give_back(0, tally(rows + 7, ended=True))
    assert in_episodes.take(1, NEW) == Grant(STEPS, 0)
    assert in_episodes.memory["reserved"].tolist() == [2, 1]
    assert in_episodes.take(0, tally(14, ended=True)) is None
    in_episodes.post(1, limit=4, expected=1)
    assert in_episodes.take(0, tally(14, ended=True)) == Grant(STEPS, 1)


def test_whoever_waits_is_woken_once(in_rows: EpisodeQueue) -> None:
    events: list[Callable[[], None]] = [
        lambda: in_rows.post(1, limit=0, expected=1),
        lambda: in_rows.allow(0),
        lambda: in_rows.release(2**40),
        lambda: in_rows.give_back(0, tally(0, ended=True)),
        lambda: in_rows.settle(0, tally(0, ended=False), for_good=False),
    ]
    for event in events:
        assert in_rows.take(1, NEW) is None
        assert rung(in_rows) == []
        event()
        assert rung(in_rows) == [1]
        event()
        assert rung(in_rows) == []


# ------------------------------------------------------------------------------------------------------------------ waves


def test_a_wave_is_over_when_every_ticket_in_it_was_played(in_rows: EpisodeQueue) -> None:
    in_rows.release(3)
    in_rows.post(0, limit=1000, expected=1)
    assert not in_rows.wave_is_over(), "nothing was issued"
    streams = [stream(in_rows, worker) for worker in range(2)]
    for worker in range(2):
        streams[worker].number(0)
        assert in_rows.take(worker, NEW) is not None
    in_rows.give_back(0, tally(5, ended=True))
    streams[0].number(1)
    assert in_rows.take(0, tally(5, ended=True)) is not None, "ticket 2 is the last of the wave"
    in_rows.give_back(1, tally(5, ended=True))
    assert not in_rows.wave_is_over(), "ticket 2 is still being played"
    streams[1].number(1)
    assert in_rows.take(1, tally(5, ended=True)) is None, "ticket 3 has to wait for the next wave"
    in_rows.give_back(0, tally(9, ended=True))
    assert in_rows.wave_is_over()
    in_rows.release(6)
    assert not in_rows.wave_is_over()
    assert in_rows.take(1, tally(5, ended=True)) is not None


# ------------------------------------------------------------------------------------------------------------------- deaths


def play_until(tickets: EpisodeQueue, moment: str) -> Tally:
    """One worker plays ticket 0 of 6 rows in two fragments, then begins ticket 1, and dies at this moment: how far it came."""
    episodes = stream(tickets)
    middle, end = tally(4, ended=False), tally(6, ended=True)
    story: dict[str, tuple[Callable[[], object], Tally]] = {
        "issued": (lambda: episodes.number(0), NEW),
        "granted": (lambda: tickets.take(0, NEW), NEW),
        "in it": (lambda: None, tally(2, ended=False)),
        "between fragments": (lambda: tickets.give_back(0, middle), middle),
        "in it again": (lambda: tickets.take(0, middle), tally(5, ended=False)),
        "end written": (lambda: None, end),
        "given back": (lambda: tickets.give_back(0, end), end),
        "next issued": (lambda: episodes.number(1), end),
        "next granted": (lambda: tickets.take(0, end), end),
        "next begun": (lambda: None, tally(6, ended=False)),  # a slot without rows: none of them ended anything
    }
    for name, (act, came) in story.items():
        act()
        if name == moment:
            return came
    raise KeyError(moment)


@pytest.mark.parametrize(
    ("moment", "heir_plays", "paid"),
    [
        ("issued", 0, 0),
        ("granted", 0, 0),
        ("in it", 0, 0),
        ("between fragments", 0, 0),
        ("in it again", 0, 0),
        ("end written", 1, 1),
        ("given back", 1, 1),
        ("next issued", 1, 1),
        ("next granted", 1, 1),
        ("next begun", 1, 1),
    ],
)
@pytest.mark.parametrize("unit", ["rows", "episodes"])
def test_the_heir_plays_what_was_not_played_to_its_end(
    in_rows: EpisodeQueue, in_episodes: EpisodeQueue, moment: str, heir_plays: int, paid: int, unit: str
) -> None:
    tickets = in_rows if unit == "rows" else in_episodes
    tickets.post(3, limit=1000, expected=10 if unit == "rows" else 1)
    came = play_until(tickets, moment)
    tickets.settle(0, came, for_good=False)
    assert tickets.announced().tolist() == [NONE, NONE]
    assert tickets.memory["reserved"].tolist() == [came.produced if unit == "rows" else paid, 0]
    assert stream(tickets).number(0) == heir_plays
    assert stream(tickets, 1).number(0) == max(1, heir_plays + 1), "and nobody else does"
    assert tickets.take(0, came._replace(ended=True)) == Grant(STEPS, 3)
