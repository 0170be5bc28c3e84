"""The channel: rows come out as they went in, once, in order, and counted; a full ring waits or drops its oldest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from freewheel.core import WORKER_TIME, Failure
from freewheel.pacing.pacing import Tally
from freewheel.transport.shm.channel import Channel, WorkerRows, Writer
from freewheel.transport.wire import Fragment
from tests.support.ring_rows import Books, Pen, episode, numbers, shape


@pytest.fixture
def channel() -> Iterator[Channel]:
    """Three slots of four steps of two lanes."""
    with closing(Channel(shape())) as channel:
        yield channel


@pytest.fixture
def dropping() -> Iterator[Channel]:
    with closing(Channel(shape(), drop_oldest=True)) as channel:
        yield channel


def pen(channel: Channel, worker: int = 0, incarnation: int = 0) -> Pen:
    return Pen(Writer(channel.ports[worker], worker, incarnation))


def opened(books: Books) -> Fragment:
    """The finished rows of the fragment that is being written."""
    fragment = books.take_open()
    assert fragment is not None
    return fragment


# --------------------------------------------------------------------------------------------------------------- in and out


def test_rows_come_out_as_they_went_in(channel: Channel) -> None:
    author, books = pen(channel, incarnation=6), Books(channel)
    assert books.reader.ready() == []
    author.begin(version=9)
    author.step()
    author.step(valid=[True, False])
    author.step()
    assert books.reader.ready() == []
    author.commit(range(len(WORKER_TIME)))
    assert books.reader.ready() == [0]
    assert books.reader.queued_versions() == [9]
    fragment = books.take()
    assert numbers(fragment) == [0, 1, 2]
    assert (fragment.worker, fragment.incarnation, fragment.version) == (0, 6, 9)
    assert fragment.data.valid.tolist() == [[True, True], [True, False], [True, True]]
    assert (fragment.rows, fragment.lost, fragment.gap, fragment.episodes) == (5, {}, False, ())
    assert fragment.time.tolist() == list(range(len(WORKER_TIME)))
    assert books.reader.ready() == []


def test_an_episode_brings_its_context_and_its_measures() -> None:
    told = replace(episode(3), context=(0.1, -2.0))
    with closing(Channel(replace(shape(), context=2))) as channel:
        author, books = pen(channel), Books(channel)
        author.begin()
        author.step(episodes=[told])
        author.commit()
        assert books.take().episodes == (told,)


def test_what_was_taken_is_a_copy(channel: Channel) -> None:
    author, books = pen(channel), Books(channel)
    for _ in range(4):
        author.fragment(2)
        books.take()
    assert [numbers(fragment) for fragment in books.fragments] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_time_adds_up_over_fragments_and_incarnations(channel: Channel) -> None:
    books, spent = Books(channel), np.zeros(len(WORKER_TIME), np.int64)
    for incarnation in range(5):
        author = pen(channel, incarnation=incarnation)
        author.begin()
        author.step()
        author.commit([incarnation + 1] * len(WORKER_TIME))
        fragment = books.take()
        assert fragment.incarnation == incarnation
        spent += fragment.time
        assert (fragment.time == incarnation + 1).all()
    assert (spent == 1 + 2 + 3 + 4 + 5).all()


def test_workers_have_rings_of_their_own() -> None:
    with closing(Channel(shape(workers=3))) as channel:
        books, authors = Books(channel), [pen(channel, worker) for worker in range(3)]
        authors[2].fragment(3, version=4)
        authors[0].number = 100
        authors[0].fragment(2, version=5)
        authors[0].fragment(1, version=6)
        authors[1].begin()
        authors[1].step()
        assert books.reader.ready() == [0, 2]
        assert books.reader.queued_versions() == [5, 4]
        books.take_all()
        assert books.steps == [[100, 101, 102], [], [0, 1, 2]]
        assert [books.reader.account(worker) for worker in range(3)] == [(6, 0, 0), (2, 0, 2), (6, 0, 0)]


def test_a_commit_rings_for_the_learner_and_a_take_for_the_worker(channel: Channel) -> None:
    author, books = pen(channel), Books(channel)
    author.fragment(1)
    assert not channel.wakeup.wait(0.0)
    author.writer.notify()
    assert channel.wakeup.wait(0.0)
    assert not channel.ports[0].slot_freed.wait(0.0)
    books.take()
    assert channel.ports[0].slot_freed.wait(0.0)


def test_a_full_ring_waits(channel: Channel) -> None:
    author, books = pen(channel), Books(channel)
    for _ in range(10):
        while not author.writer.full():
            author.fragment(2)
        assert books.reader.account(0).queued == 3 * 4
        books.take()
        assert not author.writer.full()
    books.take_all()
    assert books.steps == [list(range(2 * 12))]
    assert not any(fragment.gap for fragment in books.fragments)


# -------------------------------------------------------------------------------------------------------- rows of an open slot


def test_rows_of_an_open_slot_are_taken_once_and_the_rest_later(channel: Channel) -> None:
    author, books = pen(channel), Books(channel)
    assert books.take_open() is None, "nothing was begun"
    author.begin(version=3)
    assert numbers(opened(books)) == []
    author.step()
    author.step()
    part = opened(books)
    assert (numbers(part), part.version, books.reader.account(0)) == ([0, 1], 3, WorkerRows(4, 0, 0))
    author.step()
    assert books.reader.account(0) == WorkerRows(6, 0, 2)
    author.commit()
    assert books.reader.account(0) == WorkerRows(6, 2, 0)
    assert books.take_open() is None, "it is closed"
    rest = books.take()
    assert (numbers(rest), rest.version, rest.gap, books.balance()) == ([2], 3, False, 6)


def test_the_rest_may_be_nothing(channel: Channel) -> None:
    author, books = pen(channel), Books(channel)
    author.begin()
    author.step()
    books.take_open()
    author.commit()
    rest = books.take()
    assert (rest.rows, len(rest.data.valid), books.balance()) == (0, 0, 2)
    author.fragment(2)
    assert numbers(books.take()) == [1, 2]


def test_closed_slots_come_before_open_ones(channel: Channel) -> None:
    author, books = pen(channel), Books(channel)
    author.fragment(1)
    author.begin()
    author.step()
    assert books.take_open() is None
    books.take()
    assert numbers(opened(books)) == [1]


def test_episodes_belong_to_the_rows_that_ended_them(channel: Channel) -> None:
    author, books = pen(channel), Books(channel)
    for first in (0, 4):  # the second time into a slot that held others
        for _ in range(3):
            author.begin()
            author.step(episodes=[episode(first)])
            author.step()
            part = opened(books)
            author.step(episodes=[episode(first + 1, lane=1), episode(first + 2)])
            author.step(episodes=[episode(first + 3)])
            author.commit()
            assert part.episodes == (episode(first),)
            assert books.take().episodes == (episode(first + 1, lane=1), episode(first + 2), episode(first + 3))


# -------------------------------------------------------------------------------------------------------------- lost rows


def failure(lane: int, cause: str = "env_error", *, in_reset: bool = False) -> Failure:
    return Failure(lane, cause, "a report", in_reset)


def test_failures_become_lost_rows_by_cause(channel: Channel) -> None:
    author, books = pen(channel), Books(channel)
    for _ in range(5):  # again and again over the same slots
        author.begin()
        author.step(valid=[False, False], failures=[failure(0, "nan"), failure(1, "env_error")])
        author.step(valid=[False, True], failures=[failure(0, "nan")])
        part = opened(books)
        author.step(valid=[True, False], failures=[failure(1, "shape")])
        author.step()
        author.commit()
        rest = books.take()
        assert (part.lost, part.rows) == ({"nan": 2, "env_error": 1}, 1)
        assert (rest.lost, rest.rows) == ({"shape": 1}, 3)
        author.fragment(4)
        assert books.take().lost == {}
    assert books.balance() == 5 * (8 + 8)
    assert author.writer.tally == Tally(80, 20, ended=False)


def test_what_was_lost_in_a_slot_before_is_not_lost_again() -> None:
    with closing(Channel(shape(slots=1))) as channel:
        author, books = pen(channel), Books(channel)
        for failing in ([0, 2], [1], [3], []):
            author.begin()
            for step in range(4):
                if step in failing:
                    author.step(valid=[True, False], failures=[failure(1, "nan")])
                else:
                    author.step()
            author.commit()
            assert books.take().lost == ({"nan": len(failing)} if failing else {})
            books.balance()


def test_a_failed_reset_and_a_lane_in_quarantine_lose_no_row(channel: Channel) -> None:
    author, books = pen(channel), Books(channel)
    author.begin()
    author.step(valid=[True, False], failures=[failure(0, in_reset=True), failure(1, "quarantine")])
    author.commit()
    fragment = books.take()
    assert (fragment.lost, fragment.rows, books.balance()) == ({}, 1, 1)
    assert author.writer.tally == Tally(1, 0, ended=False)


# ------------------------------------------------------------------------------------------------------------- drop the oldest


def test_a_ring_that_makes_room_drops_exactly_the_oldest(dropping: Channel) -> None:
    author, books = pen(dropping), Books(dropping)
    for _ in range(5):
        assert not author.writer.full()
        author.fragment(2)
        books.balance()
    assert not author.writer.full(), "it makes room by itself"
    books.balance()
    assert books.reader.overflowed == 3 * 4
    books.take_all()
    assert books.steps == [[6, 7, 8, 9]]
    assert [fragment.gap for fragment in books.fragments] == [True, False]
    author.fragment(1)
    assert (numbers(books.take()), books.fragments[-1].gap) == ([10], False)
    assert books.balance() == 22


def test_what_the_learner_is_reading_is_not_dropped(dropping: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    author, books = pen(dropping), Books(dropping)
    for _ in range(3):
        author.fragment(2)
    copy, full = books.reader._copy, list[bool]()

    def slowly(worker: int, number: int) -> Fragment:
        full.append(author.writer.full())
        return copy(worker, number)

    monkeypatch.setattr(books.reader, "_copy", slowly)
    assert numbers(books.take()) == [0, 1]
    assert full == [True], "the writer had to wait"
    assert not author.writer.full()
    assert (books.reader.overflowed, books.balance()) == (0, 12)


def test_an_open_slot_that_is_being_read_is_not_dropped_when_the_ring_comes_round(
    dropping: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    author, books = pen(dropping), Books(dropping)
    author.begin()
    author.step()
    copy = books.reader._copy

    def slowly(worker: int, number: int) -> Fragment:
        author.commit()
        author.fragment(1)
        author.fragment(1)
        assert author.writer.full()
        return copy(worker, number)

    monkeypatch.setattr(books.reader, "_copy", slowly)
    assert numbers(opened(books)) == [0]
    assert not author.writer.full()
    assert (books.reader.account(0), books.reader.overflowed) == (WorkerRows(6, 4, 0), 0)


def test_the_rest_of_a_slot_read_in_part_may_be_dropped_too(dropping: Channel) -> None:
    author, books = pen(dropping), Books(dropping)
    author.begin()
    author.step()
    books.take_open()
    author.step()
    author.commit()
    for _ in range(2):
        author.fragment(1)
    assert not author.writer.full()
    books.balance()
    assert books.reader.overflowed == 2
    fragment = books.take()
    assert (numbers(fragment), fragment.gap) == ([2], True), "row 1 is missing between 0 and 2"
    assert not books.take().gap
    books.balance()


def test_nothing_is_called_dropped_where_rings_wait(channel: Channel) -> None:
    """A row that vanished has to show in the books, not to be explained away."""
    author, books = pen(channel), Books(channel)
    author.fragment(2)
    author.fragment(2)
    channel.memory["taken"][0] += 1
    books.take()
    assert books.reader.overflowed == 0
    with pytest.raises(AssertionError):
        books.balance()
