"""A writer may die or be stopped at any store: every finished row is delivered once, and the counts balance."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import count
from typing import Any

import psutil
import pytest

from freewheel.core import CAUSES, WORKER_TIME, Failure
from freewheel.pacing.pacing import Tally
from freewheel.transport.shm.channel import Channel, Reader, Writer
from tests.support import children
from tests.support.fuse import Fuse, Killed, fused_writer
from tests.support.ring_rows import CountingReader, Pen, episode, shape
from tests.support.trainers import wait_until
from tests.transport.conftest import Start

LIMIT = 20.0
KILLS = 20


NAN, RAISED = (Failure(lane, cause, "a report") for lane, cause in ((0, "nan"), (1, "env_error")))
#: The steps of a writer: valid lanes, episodes ended, failures.
STEPS: list[dict[str, Any]] = [
    {}, {"valid": [False, True], "failures": [NAN]}, {"episodes": [episode(0), episode(1, lane=1)]}, {},
    {"valid": [False, False], "failures": [RAISED, NAN]}, {"valid": [True, False]}, {"episodes": [episode(2)]},
    {"valid": [True, False], "failures": [RAISED]},
]  # fmt: skip


def write_steps(author: Pen) -> Iterator[None]:
    """Eight steps in fragments of 3, 1, 3 and 1; yields after each operation."""
    steps = iter(STEPS)
    for length in (3, 1, 3, 1):
        assert not author.writer.full()
        author.begin(version=length)
        yield
        for _ in range(length):
            author.step(**next(steps))
            yield
        author.commit([1] * len(WORKER_TIME))
        yield


def read_nothing(counted: CountingReader) -> None:
    """The learner reads nothing."""


def read_all(counted: CountingReader) -> None:
    counted.take_all()
    counted.take_open()


def valid_rows(steps: list[dict[str, Any]]) -> int:
    return sum(sum(step.get("valid", (True, True))) for step in steps)


def lost_rows(steps: list[dict[str, Any]]) -> int:
    return sum(len(step.get("failures", ())) for step in steps)


@pytest.mark.parametrize("reads", [read_nothing, read_all])
def test_a_writer_may_die_before_any_store(reads: Callable[[CountingReader], None]) -> None:
    for stores in count():
        with closing(Channel(shape(slots=4, steps=3))) as channel:
            counted, fuse = CountingReader(channel), Fuse(stores)
            author = Pen(fused_writer(channel.ports[0], fuse))
            try:
                for _ in write_steps(author):
                    counted.balance()
                    reads(counted)
            except Killed:
                counted.balance()  # also correct before its death is known
                assert_complete(counted, finished=author.number)
            else:
                assert stores > 100, "the writer was never killed"
                return


def assert_complete(counted: CountingReader, finished: int) -> None:
    tally = counted.reader.settle(0)
    assert counted.reader.account(0).open == 0
    steps = STEPS[:finished]
    assert (tally.produced, tally.failed) == (valid_rows(steps) + lost_rows(steps), lost_rows(steps))
    assert counted.balance() == tally.produced
    counted.take_all()
    assert counted.steps == [list(range(finished))]
    assert (counted.rows, counted.lost) == ([valid_rows(steps)], [lost_rows(steps)])
    ended = [ended for fragment in counted.fragments for ended in fragment.episodes]
    assert ended == [ended for step in steps for ended in step.get("episodes", ())]
    causes = [cause for part in counted.fragments for cause, rows in part.lost.items() for _ in range(rows)]
    assert sorted(causes) == sorted(failure.cause for step in steps for failure in step.get("failures", ()))
    assert_the_replacement_continues(counted, finished, tally)


def assert_the_replacement_continues(counted: CountingReader, finished: int, tally: Tally) -> None:
    replacement = Writer(counted.channel.ports[0], 0, 1)
    assert replacement.tally == tally
    author, old = Pen(replacement, finished), len(counted.fragments)
    for length in (2, 3, 1, 3, 2):
        author.fragment(length, version=7)
        assert counted.balance() == tally.produced + 2 * (author.number - finished)
        counted.take_all()
    assert counted.steps == [list(range(finished + 11))]
    assert {(part.incarnation, part.version, part.gap) for part in counted.fragments[old:]} == {(1, 7, False)}


@pytest.mark.parametrize("seen", [False, True])
def test_a_death_during_a_drop_loses_nothing_else(seen: bool) -> None:
    """A full ring increments `taken` under its lock; the counts balance before and after that."""
    for stores in count():
        with closing(Channel(shape(slots=2, steps=3), drop_oldest=True)) as channel:
            counted, fuse = CountingReader(channel), Fuse(stores)
            author = Pen(fused_writer(channel.ports[0], fuse))
            try:
                for number, _ in enumerate(write_steps(author)):
                    counted.balance()
                    if seen and number == 2:
                        counted.take_open()
            except Killed:
                counted.balance()
            else:
                return
            counted.reader.settle(0)
            counted.take_all()
            produced = counted.balance()
            assert sum(counted.rows) + sum(counted.lost) + counted.reader.overflowed == produced
            assert counted.steps[0] == sorted(set(counted.steps[0]))
            assert produced == 0 or counted.steps[0][-1] == author.number - 1


@pytest.mark.parametrize(
    ("last", "ended"),
    [
        ({}, False),
        ({"episodes": [episode(0)]}, True),
        ({"valid": [True, False], "failures": [RAISED]}, True),
        ({"valid": [True, True], "failures": [Failure(0, CAUSES[4], "in reset", in_reset=True)]}, False),
    ],
)
@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("first", [{}, {"episodes": [episode(7)]}])
def test_settle_returns_whether_the_last_row_ended_an_episode(
    last: dict[str, Any], ended: bool, committed: bool, first: dict[str, Any]
) -> None:
    with closing(Channel(shape())) as channel:
        author, counted = Pen(Writer(channel.ports[0], 0, 0)), CountingReader(channel)
        assert counted.reader.settle(0) == Tally(0, 0, ended=True), "nothing was ever written"
        author.begin()
        author.step(**first)
        author.step(**last)
        assert author.writer.tally.ended is ended
        if committed:
            author.commit()
        assert counted.reader.settle(0).ended is ended
        assert counted.reader.settle(0).ended is ended, "settling twice changes nothing"


class Hooked:
    """A cell that calls a function after it is read for the first time."""

    def __init__(self, cell: memoryview, hook: Callable[[], None]) -> None:
        self._cell, self._hooks = cell, [hook]

    def __getitem__(self, index: int) -> Any:
        seen = self._cell[index]
        while self._hooks:
            self._hooks.pop()()
        return seen


CELLS = ("committed", "opened", "count", "tally")


@pytest.mark.parametrize(
    ("drop_oldest", "cell", "fragments"),
    [
        *((False, cell, fragments) for cell in CELLS for fragments in (0, 1, 2)),
        (True, "opened", 0),
        (True, "opened", 1),
    ],
)
def test_the_counts_balance_although_the_writer_continues(drop_oldest: bool, cell: str, fragments: int) -> None:
    """And rows written meanwhile are not taken for dropped ones."""
    with closing(Channel(shape(slots=2), drop_oldest=drop_oldest)) as channel:
        author, counted = Pen(Writer(channel.ports[0], 0, 0)), CountingReader(channel)
        author.fragment(3)
        counted.take()

        def run_ahead() -> None:
            for _ in range(fragments):
                author.fragment(2)
            if drop_oldest or not author.writer.full():
                author.begin()
                author.step()

        ring = counted.reader._rings[0]
        setattr(ring, cell, Hooked(getattr(ring, cell), run_ahead))
        assert counted.balance() >= 6
        assert counted.reader.overflowed == 0
        counted.balance()


def has_produced(counted: CountingReader, rows: int) -> bool:
    return counted.reader.account(0).produced >= rows


@pytest.mark.parametrize("drop_oldest", [False, True])
def test_a_process_may_be_killed_at_any_moment(start: Start, drop_oldest: bool) -> None:
    rng, seen = random.Random(5), 0
    with closing(Channel(shape(slots=4, steps=5, lanes=1), drop_oldest=drop_oldest)) as channel:
        counted = CountingReader(channel)
        for incarnation in range(KILLS):
            process = start(children.write_forever, channel.ports[0], incarnation)
            wait_until(partial(has_produced, counted, seen + 1))
            deadline = time.monotonic() + rng.uniform(0.0, 0.03)
            while time.monotonic() < deadline:
                counted.balance()
                for act in rng.choices((counted.take_all, counted.take_open, lambda: None), k=2):
                    act()
            process.kill()
            process.join(LIMIT)
            assert process.exitcode == -signal.SIGKILL
            counted.balance()
            tally = counted.reader.settle(0)
            counted.take_all()
            seen = counted.balance()
            assert tally.produced == seen
    delivered = counted.steps[0]
    assert sorted({fragment.incarnation for fragment in counted.fragments}) == list(range(KILLS))
    if drop_oldest:
        assert delivered == sorted(set(delivered))
        assert seen == len(delivered) + counted.reader.overflowed
        assert counted.reader.overflowed > 0
    else:
        assert delivered == list(range(seen)), "no number is missing, none is repeated"
    assert seen > 10 * KILLS


def test_the_counts_balance_while_a_writer_is_stopped(start: Start) -> None:
    with closing(Channel(shape(slots=8, steps=20, lanes=1))) as channel:
        reader, delivered = Reader(channel), 0
        process = psutil.Process(start(children.write_blanks_forever, channel.ports[0]).pid)
        for stop in range(1, 61):
            while delivered < 400 * stop:  # faster than the writer, which therefore hardly waits
                if reader.ready():
                    delivered += reader.take(0).rows
            process.suspend()
            wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
            account = reader.account(0)
            assert account.produced == delivered + account.queued + account.open
            process.resume()
