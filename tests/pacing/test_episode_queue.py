"""EpisodeQueue: every episode is played once by a free worker, and again by the replacement of a worker that died."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from freewheel.core import SeedStream
from freewheel.pacing.episode_queue import RECENT, EpisodeOrder, EpisodeQueue, TicketStream
from freewheel.pacing.pacing import KEEP, NO_TICKET, NO_VERSION, Grant, Tally
from freewheel.seeding import training_episodes
from freewheel.transport.wire import Permits
from tests.pacing.conftest import Place, woken

STEPS, SEED, LANES = 4, 11, 3
ORDER = EpisodeOrder(SEED, LANES)


def tally(rows: int, *, ended: bool) -> Tally:
    return Tally(rows, 0, ended)


NEW = tally(0, ended=True)


class Queue:
    """A queue of two workers, with a limit and an expected length set by the test."""

    def __init__(self, place: Place, *, in_episodes: bool = False, wave: int = 0) -> None:
        episodes = 1 if in_episodes else None
        self.queue = EpisodeQueue(
            order=ORDER, workers=2, steps=STEPS, batch_rows=0, batch_episodes=episodes, max_lag=0, wave=wave
        )
        self.permits: Permits = place(self.queue)
        self.take, self.give_back, self.settle = self.permits.take, self.permits.give_back, self.permits.settle

    def post(self, version: int, limit: int, expected: int) -> None:
        self.permits.publish(version, limit)
        self.queue.cells["limit"][0], self.queue.cells["expected"][0] = limit, expected

    def allow(self, limit: int) -> None:
        self.permits.wake(self.permits.locked(self.queue.allow, limit))
        self.queue.cells["limit"][0] = limit

    def release(self) -> None:
        self.permits.wake(self.permits.locked(self.queue.release))

    def revoke(self, worker: int, version: int) -> bool:
        return self.permits.revoke(worker, version, 0)

    def stream(self, worker: int = 0) -> SeedStream:
        """The episodes of a worker's next incarnation."""
        (only,) = self.permits.streams(worker)
        return only

    @property
    def announced(self) -> list[int]:
        return self.queue.announced()

    @property
    def reserved(self) -> list[int]:
        return list(self.queue.cells["reserved"])

    @property
    def woken(self) -> list[int]:
        return woken(self.permits, 2)


@pytest.fixture
def in_rows(place: Place) -> Queue:
    return Queue(place)


@pytest.fixture
def in_episodes(place: Place) -> Queue:
    return Queue(place, in_episodes=True)


def test_a_ticket_is_an_episode_of_a_lane() -> None:
    assert [ORDER.episode(ticket) for ticket in range(7)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2)]
    for ticket in range(7):
        lane, number = ORDER.episode(ticket)
        assert ORDER.episode_seed(ticket) == training_episodes(SEED, lane).seed(number)


def test_a_stream_takes_the_next_ticket_at_every_episode(in_rows: Queue) -> None:
    first, second = in_rows.stream(0), in_rows.stream(1)
    assert [first.number(0), first.number(0), second.number(0), first.number(1)] == [0, 0, 1, 2]
    assert [first.number(0), first.number(1)] == [0, 2], "asking again issues nothing"
    assert [first.seed(1), second.seed(0)] == [ORDER.episode_seed(2), ORDER.episode_seed(1)]
    assert in_rows.queue.cells["issued"][0] == 3


def test_a_worker_tells_which_tickets_its_process_has_had(in_rows: Queue) -> None:
    dead = in_rows.stream(0)
    assert isinstance(dead, TicketStream)
    assert [dead.number(k) for k in range(RECENT + 3)] == list(range(RECENT + 3))
    assert dead.tickets.history == [RECENT + 3, *range(3, RECENT + 3)]
    replacement = in_rows.stream(0)
    assert isinstance(replacement, TicketStream)
    assert [replacement.number(0), replacement.number(1)] == [RECENT + 2, RECENT + 3]
    assert replacement.tickets.history == [2, *[NO_TICKET] * (RECENT - 2), RECENT + 2, RECENT + 3]


def test_a_ticket_is_an_episode_of_every_env_of_a_worker(place: Place) -> None:
    queue = Queue(place).queue
    queue.side_by_side = 3
    left, middle, right = queue.streams(1, lambda decide, *words: decide(*words))
    assert [left.number(0), right.number(0), middle.number(0), middle.number(1)] == [0, 2, 1, 4]
    assert right.seed(1) == ORDER.episode_seed(5)
    assert queue.cells["issued"][0] == 2


def test_a_worker_that_dies_in_issue_does_not_share_its_ticket(in_rows: Queue) -> None:
    assert in_rows.stream().number(0) == 0
    in_rows.queue.cells["ticket"][0] = 1  # killed before `issued` was incremented
    assert in_rows.stream(1).number(0) == 2
    assert in_rows.stream(0).number(0) == 1
    assert in_rows.stream(0).number(1) == 3


def test_an_episode_is_played_under_one_version_to_its_end(in_rows: Queue) -> None:
    in_rows.post(5, limit=100, expected=10)
    in_rows.stream().number(0)
    assert in_rows.take(0, NEW) == Grant(STEPS, 5)
    in_rows.post(6, limit=100, expected=10)
    assert not in_rows.queue.closes(0, 5, ended=False)
    in_rows.give_back(0, tally(4, ended=False))
    assert in_rows.announced == [5, NO_VERSION]
    assert in_rows.take(0, tally(4, ended=False)) == Grant(STEPS, KEEP)
    assert in_rows.queue.closes(0, 5, ended=True)
    in_rows.give_back(0, tally(6, ended=True))
    assert in_rows.announced == [NO_VERSION, NO_VERSION]
    assert in_rows.take(0, tally(6, ended=True)) == Grant(STEPS, 6)


def test_no_worker_plays_before_the_first_version(in_rows: Queue) -> None:
    in_rows.allow(100)
    assert in_rows.take(0, NEW) is None


def test_the_learner_does_not_wait_for_a_revoked_episode(in_rows: Queue) -> None:
    in_rows.post(5, limit=100, expected=10)
    assert not in_rows.revoke(0, NO_VERSION), "no worker plays"
    in_rows.take(0, NEW)
    assert not in_rows.revoke(0, 4)
    assert in_rows.announced == [5, NO_VERSION]
    assert in_rows.revoke(0, 5)
    assert in_rows.announced == [NO_VERSION, NO_VERSION]
    in_rows.give_back(0, tally(6, ended=True))
    in_rows.take(0, tally(6, ended=True))
    assert in_rows.announced == [5, NO_VERSION]


def test_in_rows_an_episode_counts_as_expected_until_it_has_ended(in_rows: Queue) -> None:
    in_rows.post(0, limit=25, expected=10)
    assert in_rows.take(0, NEW) is not None
    assert in_rows.take(1, NEW) is not None
    assert in_rows.reserved == [10, 10]
    in_rows.give_back(0, tally(4, ended=False))
    assert in_rows.reserved == [10, 10], "it has not ended"
    in_rows.give_back(0, tally(15, ended=True))
    assert in_rows.reserved == [15, 10]
    assert in_rows.take(0, tally(15, ended=True)) is None
    in_rows.allow(26)
    assert in_rows.take(0, tally(15, ended=True)) == Grant(STEPS, 0)
    assert in_rows.reserved == [25, 10]


def test_in_episodes_every_begun_one_counts(in_episodes: Queue) -> None:
    in_episodes.post(0, limit=3, expected=1)
    for rows in (0, 7):
        assert in_episodes.take(0, tally(rows, ended=True)) == Grant(STEPS, 0)
        in_episodes.give_back(0, tally(rows + 7, ended=True))
    assert in_episodes.take(1, NEW) == Grant(STEPS, 0)
    assert in_episodes.reserved == [2, 1]
    assert in_episodes.take(0, tally(14, ended=True)) is None
    in_episodes.post(1, limit=4, expected=1)
    assert in_episodes.take(0, tally(14, ended=True)) == Grant(STEPS, 1)


def test_a_waiting_worker_is_woken_once(in_rows: Queue) -> None:
    events: list[Callable[[], None]] = [
        lambda: in_rows.post(1, limit=1, expected=1),
        lambda: in_rows.allow(1),
        in_rows.release,
        lambda: in_rows.give_back(0, tally(0, ended=True)),
        lambda: in_rows.settle(0, tally(0, ended=False), for_good=False),
    ]
    in_rows.post(0, limit=0, expected=1)
    for event in events:
        in_rows.queue.cells["limit"][0] = 0
        assert in_rows.take(1, NEW) is None
        assert in_rows.woken == []
        in_rows.queue.cells["limit"][0] = 1
        event()
        assert in_rows.woken == [1]
        event()
        assert in_rows.woken == []


def test_no_more_workers_are_woken_than_can_begin(in_rows: Queue) -> None:
    in_rows.post(0, limit=0, expected=10)
    assert [in_rows.take(worker, NEW) for worker in (0, 1)] == [None, None]
    in_rows.queue.cells["limit"][0] = 10
    in_rows.release()
    assert in_rows.woken == [0]
    in_rows.queue.cells["limit"][0] = 20
    in_rows.release()
    assert in_rows.woken == [1], "it is its turn"


def test_in_turn_an_episode_is_played_to_its_end_before_another_worker_begins_one(place: Place) -> None:
    queue = Queue(place)
    queue.queue.cells["turns"][0] = 1
    queue.post(0, limit=1_000, expected=10)
    assert queue.take(0, NEW) == Grant(STEPS, 0)
    assert queue.take(1, NEW) is None
    queue.give_back(0, tally(4, ended=False))
    assert queue.take(0, tally(4, ended=False)) == Grant(STEPS, KEEP)
    assert queue.woken == []
    queue.give_back(0, tally(8, ended=True))
    assert queue.woken == [1]
    assert queue.take(0, tally(8, ended=True)) is None
    assert queue.take(1, NEW) == Grant(STEPS, 0)


def test_a_wave_is_over_when_every_ticket_in_it_was_played(place: Place) -> None:
    in_rows = Queue(place, wave=3)
    in_rows.post(0, limit=1000, expected=1)
    assert not in_rows.queue.wave_is_over(), "nothing was issued"
    streams = [in_rows.stream(worker) for worker in range(2)]
    for worker in range(2):
        streams[worker].number(0)
        assert in_rows.take(worker, NEW) is not None
    in_rows.give_back(0, tally(5, ended=True))
    streams[0].number(1)
    assert in_rows.take(0, tally(5, ended=True)) is not None, "ticket 2 is the last of the wave"
    in_rows.give_back(1, tally(5, ended=True))
    assert not in_rows.queue.wave_is_over(), "ticket 2 is still being played"
    streams[1].number(1)
    assert in_rows.take(1, tally(5, ended=True)) is None, "ticket 3 has to wait for the next wave"
    in_rows.give_back(0, tally(9, ended=True))
    assert in_rows.queue.wave_is_over()
    in_rows.release()
    assert not in_rows.queue.wave_is_over()
    assert in_rows.take(1, tally(5, ended=True)) is not None


def play_until(tickets: Queue, moment: str) -> Tally:
    """A worker plays ticket 0 of 6 rows in two fragments and begins ticket 1; it dies at this moment. Returns its tally."""
    episodes = tickets.stream()
    middle, end = tally(4, ended=False), tally(6, ended=True)
    moments: dict[str, tuple[Callable[[], object], Tally]] = {
        "issued": (lambda: episodes.number(0), NEW),
        "granted": (lambda: tickets.take(0, NEW), NEW),
        "in it": (lambda: None, tally(2, ended=False)),
        "between fragments": (lambda: tickets.give_back(0, middle), middle),
        "in it again": (lambda: tickets.take(0, middle), tally(5, ended=False)),
        "end written": (lambda: None, end),
        "given back": (lambda: tickets.give_back(0, end), end),
        "next issued": (lambda: episodes.number(1), end),
        "next granted": (lambda: tickets.take(0, end), end),
        "next begun": (lambda: None, tally(6, ended=False)),  # a slot without rows: none ended an episode
    }
    for name, (act, reached) in moments.items():
        act()
        if name == moment:
            return reached
    raise KeyError(moment)


@pytest.mark.parametrize(
    ("moment", "next_ticket", "paid"),
    [
        ("issued", 0, 0), ("granted", 0, 0), ("in it", 0, 0), ("between fragments", 0, 0), ("in it again", 0, 0),
        ("end written", 1, 1), ("given back", 1, 1), ("next issued", 1, 1), ("next granted", 1, 1),
        ("next begun", 1, 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("unit", ["rows", "episodes"])
def test_the_replacement_plays_what_was_not_played_to_its_end(
    in_rows: Queue, in_episodes: Queue, moment: str, next_ticket: int, paid: int, unit: str
) -> None:
    tickets = in_rows if unit == "rows" else in_episodes
    tickets.post(3, limit=1000, expected=10 if unit == "rows" else 1)
    reached = play_until(tickets, moment)
    tickets.settle(0, reached, for_good=False)
    assert tickets.announced == [NO_VERSION, NO_VERSION]
    assert tickets.reserved == [reached.produced if unit == "rows" else paid, 0]
    assert tickets.stream().number(0) == next_ticket
    assert tickets.stream(1).number(0) == max(1, next_ticket + 1), "and no other worker does"
    assert tickets.take(0, reached._replace(ended=True)) == Grant(STEPS, 3)


@pytest.mark.parametrize("moment", ["issued", "granted", "in it", "between fragments", "end written", "next granted"])
def test_a_restored_queue_plays_what_was_not_played_to_its_end(place: Place, moment: str) -> None:
    first = Queue(place)
    first.post(3, limit=1000, expected=10)
    first.settle(0, play_until(first, moment), for_good=False)
    later = Queue(place)
    later.queue.restore(first.queue.state())
    expected = first.stream().number(0)
    assert [later.stream(worker).number(0) for worker in range(2)] == [expected, expected + 1]


def test_a_restored_queue_lets_no_more_episodes_be_under_way_than_before(place: Place) -> None:
    """Counted in episodes: those of the run before are done, and those that the learner holds are not."""

    def begun(queue: EpisodeQueue, version: int, most: int) -> int:
        permits = place(queue)
        if queue is not first:
            queue.restore(first.state())
        permits.publish(version, 0)
        count = 0
        while count < most and permits.take(0, tally(STEPS * count, ended=True)) is not None:
            queue.finished += 1  # the learner has got it
            queue.finished_rows += STEPS
            count += 1
            permits.give_back(0, tally(STEPS * count, ended=True))
        return count

    def made() -> EpisodeQueue:
        return EpisodeQueue(order=ORDER, workers=1, steps=STEPS, batch_rows=0, batch_episodes=4, max_lag=1)

    first = made()
    assert begun(first, 0, most=99) == 8, "two updates' worth"
    assert begun(made(), 2, most=99) == 8, "both have been trained on"
    assert begun(made(), 1, most=99) == 4, "the learner still holds four"
