"""The channel: rows are delivered unchanged, once, in order, and counted; a full ring waits or drops its oldest slot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from freewheel.core import WORKER_TIME, Failure
from freewheel.pacing.pacing import Tally
from freewheel.transport.shm.channel import Channel, Writer
from freewheel.transport.wire import Fragment, WorkerRows
from tests.support.ring_rows import CountingReader, Pen, episode, numbers, shape


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


def opened(counted: CountingReader) -> Fragment:
    """The finished rows of the fragment that is being written."""
    fragment = counted.take_open()
    assert fragment is not None
    return fragment


def test_rows_are_delivered_unchanged(channel: Channel) -> None:
    author, counted = pen(channel, incarnation=6), CountingReader(channel)
    assert counted.reader.ready() == []
    author.begin(version=9)
    author.step()
    author.step(valid=[True, False])
    author.step()
    assert counted.reader.ready() == []
    author.commit(range(len(WORKER_TIME)))
    assert counted.reader.ready() == [0]
    assert counted.reader.queued_versions() == [9]
    fragment = counted.take()
    assert numbers(fragment) == [0, 1, 2]
    assert (fragment.worker, fragment.incarnation, fragment.version) == (0, 6, 9)
    assert fragment.data.valid.tolist() == [[True, True], [True, False], [True, True]]
    assert (fragment.rows, fragment.lost, fragment.gap, fragment.episodes) == (5, {}, False, ())
    assert fragment.time.tolist() == list(range(len(WORKER_TIME)))
    assert counted.reader.ready() == []


def test_an_episode_brings_its_context_and_its_measures() -> None:
    ended = replace(episode(3), context=(0.1, -2.0))
    with closing(Channel(replace(shape(), context=2))) as channel:
        author, counted = pen(channel), CountingReader(channel)
        author.begin()
        author.step(episodes=[ended])
        author.commit()
        assert counted.take().episodes == (ended,)


def test_what_was_taken_is_a_copy(channel: Channel) -> None:
    author, counted = pen(channel), CountingReader(channel)
    for _ in range(4):
        author.fragment(2)
        counted.take()
    assert [numbers(fragment) for fragment in counted.fragments] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_time_adds_up_over_fragments_and_incarnations(channel: Channel) -> None:
    counted, spent = CountingReader(channel), np.zeros(len(WORKER_TIME), np.int64)
    for incarnation in range(5):
        author = pen(channel, incarnation=incarnation)
        author.begin()
        author.step()
        author.commit([incarnation + 1] * len(WORKER_TIME))
        fragment = counted.take()
        assert fragment.incarnation == incarnation
        spent += fragment.time
        assert (fragment.time == incarnation + 1).all()
    assert (spent == 1 + 2 + 3 + 4 + 5).all()


def test_workers_have_rings_of_their_own() -> None:
    with closing(Channel(shape(workers=3))) as channel:
        counted, authors = CountingReader(channel), [pen(channel, worker) for worker in range(3)]
        authors[2].fragment(3, version=4)
        authors[0].number = 100
        authors[0].fragment(2, version=5)
        authors[0].fragment(1, version=6)
        authors[1].begin()
        authors[1].step()
        assert counted.reader.ready() == [0, 2]
        assert counted.reader.queued_versions() == [5, 4]
        counted.take_all()
        assert counted.steps == [[100, 101, 102], [], [0, 1, 2]]
        assert [counted.reader.account(worker) for worker in range(3)] == [(6, 0, 0), (2, 0, 2), (6, 0, 0)]


def test_notify_wakes_the_learner_and_take_wakes_the_worker(channel: Channel) -> None:
    author, counted = pen(channel), CountingReader(channel)
    author.fragment(1)
    assert not channel.wakeup.wait(0.0)
    author.writer.notify()
    assert channel.wakeup.wait(0.0)
    assert not channel.ports[0].slot_freed.wait(0.0)
    counted.take()
    assert channel.ports[0].slot_freed.wait(0.0)


def test_rows_of_an_open_slot_are_taken_once_and_the_rest_later(channel: Channel) -> None:
    author, counted = pen(channel), CountingReader(channel)
    assert counted.take_open() is None, "nothing was begun"
    author.begin(version=3)
    assert numbers(opened(counted)) == []
    author.step()
    author.step()
    part = opened(counted)
    assert (numbers(part), part.version, counted.reader.account(0)) == ([0, 1], 3, WorkerRows(4, 0, 0))
    author.step()
    assert counted.reader.account(0) == WorkerRows(6, 0, 2)
    author.commit()
    assert counted.reader.account(0) == WorkerRows(6, 2, 0)
    assert counted.take_open() is None, "it is closed"
    rest = counted.take()
    assert (numbers(rest), rest.version, rest.gap, counted.balance()) == ([2], 3, False, 6)


def test_closed_slots_come_before_open_ones(channel: Channel) -> None:
    author, counted = pen(channel), CountingReader(channel)
    author.fragment(1)
    author.begin()
    author.step()
    assert counted.take_open() is None
    counted.take()
    assert numbers(opened(counted)) == [1]


def test_episodes_belong_to_the_rows_that_ended_them(channel: Channel) -> None:
    author, counted = pen(channel), CountingReader(channel)
    for first in (0, 4):  # the second time into slots that are used again
        for _ in range(3):
            author.begin()
            author.step(episodes=[episode(first)])
            author.step()
            part = opened(counted)
            author.step(episodes=[episode(first + 1, lane=1), episode(first + 2)])
            author.step(episodes=[episode(first + 3)])
            author.commit()
            assert part.episodes == (episode(first),)
            assert counted.take().episodes == (episode(first + 1, lane=1), episode(first + 2), episode(first + 3))


def failure(lane: int, cause: str = "env_error", *, in_reset: bool = False) -> Failure:
    return Failure(lane, cause, "a report", in_reset)


def test_failures_become_lost_rows_by_cause(channel: Channel) -> None:
    author, counted = pen(channel), CountingReader(channel)
    for _ in range(5):  # several times over the same slots
        author.begin()
        author.step(valid=[False, False], failures=[failure(0, "nan"), failure(1, "env_error")])
        author.step(valid=[False, True], failures=[failure(0, "nan")])
        part = opened(counted)
        author.step(valid=[True, False], failures=[failure(1, "shape")])
        author.step()
        author.commit()
        rest = counted.take()
        assert (part.lost, part.rows) == ({"nan": 2, "env_error": 1}, 1)
        assert (rest.lost, rest.rows) == ({"shape": 1}, 3)
        author.fragment(4)
        assert counted.take().lost == {}
    assert counted.balance() == 5 * (8 + 8)
    assert author.writer.tally == Tally(80, 20, ended=False)


def test_lost_rows_of_a_reused_slot_are_not_counted_again() -> None:
    with closing(Channel(shape(slots=1))) as channel:
        author, counted = pen(channel), CountingReader(channel)
        for failing in ([0, 2], [1], [3], []):
            author.begin()
            for step in range(4):
                if step in failing:
                    author.step(valid=[True, False], failures=[failure(1, "nan")])
                else:
                    author.step()
            author.commit()
            assert counted.take().lost == ({"nan": len(failing)} if failing else {})
            counted.balance()


def test_a_failed_reset_and_a_lane_in_quarantine_lose_no_row(channel: Channel) -> None:
    author, counted = pen(channel), CountingReader(channel)
    author.begin()
    author.step(valid=[True, False], failures=[failure(0, in_reset=True), failure(1, "quarantine")])
    author.commit()
    fragment = counted.take()
    assert (fragment.lost, fragment.rows, counted.balance()) == ({}, 1, 1)
    assert author.writer.tally == Tally(1, 0, ended=False)


def test_a_full_ring_drops_exactly_the_oldest_slot(dropping: Channel) -> None:
    author, counted = pen(dropping), CountingReader(dropping)
    for _ in range(5):
        assert not author.writer.full()
        author.fragment(2)
        counted.balance()
    assert not author.writer.full(), "it drops its oldest slot"
    counted.balance()
    assert counted.reader.overflowed == 3 * 4
    counted.take_all()
    assert counted.steps == [[6, 7, 8, 9]]
    assert [fragment.gap for fragment in counted.fragments] == [True, False]
    author.fragment(1)
    assert (numbers(counted.take()), counted.fragments[-1].gap) == ([10], False)
    assert counted.balance() == 22


def test_a_slot_that_is_being_read_is_not_dropped(dropping: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    author, counted = pen(dropping), CountingReader(dropping)
    for _ in range(3):
        author.fragment(2)
    copy, full = counted.reader._copy, list[bool]()

    def slowly(worker: int, number: int) -> Fragment:
        full.append(author.writer.full())
        return copy(worker, number)

    monkeypatch.setattr(counted.reader, "_copy", slowly)
    assert numbers(counted.take()) == [0, 1]
    assert full == [True], "the writer had to wait"
    assert not author.writer.full()
    assert (counted.reader.overflowed, counted.balance()) == (0, 12)


def test_an_open_slot_that_is_read_is_not_dropped_later(dropping: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    author, counted = pen(dropping), CountingReader(dropping)
    author.begin()
    author.step()
    copy = counted.reader._copy

    def slowly(worker: int, number: int) -> Fragment:
        author.commit()
        author.fragment(1)
        author.fragment(1)
        assert author.writer.full()
        return copy(worker, number)

    monkeypatch.setattr(counted.reader, "_copy", slowly)
    assert numbers(opened(counted)) == [0]
    assert not author.writer.full()
    assert (counted.reader.account(0), counted.reader.overflowed) == (WorkerRows(6, 4, 0), 0)


def test_the_rest_of_a_partly_read_slot_may_be_dropped(dropping: Channel) -> None:
    author, counted = pen(dropping), CountingReader(dropping)
    author.begin()
    author.step()
    counted.take_open()
    author.step()
    author.commit()
    for _ in range(2):
        author.fragment(1)
    assert not author.writer.full()
    counted.balance()
    assert counted.reader.overflowed == 2
    fragment = counted.take()
    assert (numbers(fragment), fragment.gap) == ([2], True), "row 1 is missing between 0 and 2"
    assert not counted.take().gap
    counted.balance()


def test_a_missing_row_is_not_counted_as_dropped_where_rings_wait(channel: Channel) -> None:
    """A row that is lost by a bug must make the counts wrong."""
    author, counted = pen(channel), CountingReader(channel)
    author.fragment(2)
    author.fragment(2)
    channel.memory["taken"][0] += 1
    counted.take()
    assert counted.reader.overflowed == 0
    with pytest.raises(AssertionError):
        counted.balance()
