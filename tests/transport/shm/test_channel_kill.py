"""A writer that dies or is stopped, wherever it is: every finished row is delivered once, and the books balance."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from freewheel.core import CAUSES, WORKER_TIME, Failure
from freewheel.pacing.pacing import Tally
from freewheel.transport.shm.channel import Channel, Reader, Writer
from tests.support import children
from tests.support.fuse import Fuse, Killed, fused_writer
from tests.support.ring_rows import Books, Pen, episode, shape

if TYPE_CHECKING:
    from tests.transport.conftest import Eventually, Start

LIMIT = 20.0
KILLS = 20


NAN, RAISED = (Failure(lane, cause, "a report") for lane, cause in ((0, "nan"), (1, "env_error")))
#: What each step of a writer's life is: valid lanes, episodes ended, failures.
LIFE: list[dict[str, Any]] = [
    {},
    {"valid": [False, True], "failures": [NAN]},
    {"episodes": [episode(0), episode(1, lane=1)]},
    {},
    {"valid": [False, False], "failures": [RAISED, NAN]},
    {"valid": [True, False]},
    {"episodes": [episode(2)]},
    {"valid": [True, False], "failures": [RAISED]},
]


def live(author: Pen) -> Iterator[None]:
    """Eight steps in fragments of 3, 1, 3 and 1, a breath after each move."""
    steps = iter(LIFE)
    for length in (3, 1, 3, 1):
        assert not author.writer.full()
        author.begin(version=length)
        yield
        for _ in range(length):
            author.step(**next(steps))
            yield
        author.commit([1] * len(WORKER_TIME))
        yield


def nobody(books: Books) -> None:
    """The learner is busy."""


def everybody(books: Books) -> None:
    books.take_all()
    books.take_open()


def valid_rows(steps: list[dict[str, Any]]) -> int:
    return sum(sum(step.get("valid", (True, True))) for step in steps)


def lost_rows(steps: list[dict[str, Any]]) -> int:
    return sum(len(step.get("failures", ())) for step in steps)


@pytest.mark.parametrize("reads", [nobody, everybody])
def test_a_writer_may_die_before_any_store(reads: Callable[[Books], None]) -> None:
    for stores in count():
        with closing(Channel(shape(slots=4, steps=3))) as channel:
            books, fuse = Books(channel), Fuse(stores)
            author = Pen(fused_writer(channel.ports[0], fuse))
            try:
                for _ in live(author):
                    books.balance()
                    reads(books)
            except Killed:
                books.balance()  # stopped here, it would not be seen to have died
                assert_all_is_there(books, finished=author.number)
            else:
                assert stores > 100, "the fuse did not burn"
                return


def assert_all_is_there(books: Books, finished: int) -> None:
    tally = books.reader.settle(0)
    assert books.reader.account(0).open == 0
    steps = LIFE[:finished]
    assert (tally.produced, tally.failed) == (valid_rows(steps) + lost_rows(steps), lost_rows(steps))
    assert books.balance() == tally.produced
    books.take_all()
    assert books.steps == [list(range(finished))]
    assert (books.rows, books.lost) == ([valid_rows(steps)], [lost_rows(steps)])
    ended = [ended for fragment in books.fragments for ended in fragment.episodes]
    assert ended == [ended for step in steps for ended in step.get("episodes", ())]
    causes = [cause for part in books.fragments for cause, rows in part.lost.items() for _ in range(rows)]
    assert sorted(causes) == sorted(failure.cause for step in steps for failure in step.get("failures", ()))
    assert_the_next_one_goes_on(books, finished, tally)


def assert_the_next_one_goes_on(books: Books, finished: int, tally: Tally) -> None:
    heir = Writer(books.channel.ports[0], 0, 1)
    assert heir.tally == tally
    author, old = Pen(heir, finished), len(books.fragments)
    for length in (2, 3, 1, 3, 2):
        author.fragment(length, version=7)
        assert books.balance() == tally.produced + 2 * (author.number - finished)
        books.take_all()
    assert books.steps == [list(range(finished + 11))]
    assert {(part.incarnation, part.version, part.gap) for part in books.fragments[old:]} == {(1, 7, False)}


@pytest.mark.parametrize("seen", [False, True])
def test_dying_in_the_middle_of_a_drop_loses_nothing_else(seen: bool) -> None:
    """A full ring moves `taken` under its lock; whatever of that happened, the rest adds up."""
    for stores in count():
        with closing(Channel(shape(slots=2, steps=3), drop_oldest=True)) as channel:
            books, fuse = Books(channel), Fuse(stores)
            author = Pen(fused_writer(channel.ports[0], fuse))
            try:
                for number, _ in enumerate(live(author)):
                    books.balance()
                    if seen and number == 2:
                        books.take_open()
            except Killed:
                books.balance()
            else:
                return
            books.reader.settle(0)
            books.take_all()
            produced = books.balance()
            assert sum(books.rows) + sum(books.lost) + books.reader.overflowed == produced
            assert books.steps[0] == sorted(set(books.steps[0]))
            assert produced == 0 or books.steps[0][-1] == author.number - 1


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
def test_settling_tells_whether_the_last_row_ended_an_episode(
    last: dict[str, Any], ended: bool, committed: bool, first: dict[str, Any]
) -> None:
    with closing(Channel(shape())) as channel:
        author, books = Pen(Writer(channel.ports[0], 0, 0)), Books(channel)
        assert books.reader.settle(0) == Tally(0, 0, ended=True), "nothing was ever written"
        author.begin()
        author.step(**first)
        author.step(**last)
        assert author.writer.tally.ended is ended
        if committed:
            author.commit()
        assert books.reader.settle(0).ended is ended
        assert books.reader.settle(0).ended is ended, "settling twice is settling once"


class Hooked:
    """A cell; when it is read for the first time, something happens right after that."""

    def __init__(self, cell: memoryview, hook: Callable[[], None]) -> None:
        self._cell, self._hooks = cell, [hook]

    def __getitem__(self, index: int) -> Any:
        seen = self._cell[index]
        while self._hooks:
            self._hooks.pop()()
        return seen


@pytest.mark.parametrize("cell", ["committed", "opened", "count", "tally"])
@pytest.mark.parametrize("fragments", [0, 1, 2])
def test_the_books_balance_though_the_writer_goes_round_while_they_are_made_up(cell: str, fragments: int) -> None:
    with closing(Channel(shape(slots=2))) as channel:
        author, books = Pen(Writer(channel.ports[0], 0, 0)), Books(channel)
        author.fragment(3)
        books.take()

        def run_ahead() -> None:
            for _ in range(fragments):
                author.fragment(2)
            if not author.writer.full():
                author.begin()
                author.step()

        ring = books.reader._rings[0]
        setattr(ring, cell, Hooked(getattr(ring, cell), run_ahead))
        assert books.balance() >= 6
        books.balance()


# ---------------------------------------------------------------------------------------------------------- real processes


def has_produced(books: Books, rows: int) -> bool:
    return books.reader.account(0).produced >= rows


@pytest.mark.parametrize("drop_oldest", [False, True])
def test_a_process_may_be_killed_at_any_moment(start: Start, eventually: Eventually, drop_oldest: bool) -> None:
    rng, seen = random.Random(5), 0
    with closing(Channel(shape(slots=4, steps=5, lanes=1), drop_oldest=drop_oldest)) as channel:
        books = Books(channel)
        for incarnation in range(KILLS):
            process = start(children.write_for_ever, channel.ports[0], incarnation)
            eventually(partial(has_produced, books, seen + 1))
            deadline = time.monotonic() + rng.uniform(0.0, 0.03)
            while time.monotonic() < deadline:
                books.balance()
                for act in rng.choices((books.take_all, books.take_open, lambda: None), k=2):
                    act()
            process.kill()
            process.join(LIMIT)
            assert process.exitcode == -signal.SIGKILL
            books.balance()
            tally = books.reader.settle(0)
            books.take_all()
            seen = books.balance()
            assert tally.produced == seen
    delivered = books.steps[0]
    assert sorted({fragment.incarnation for fragment in books.fragments}) == list(range(KILLS))
    if drop_oldest:
        assert delivered == sorted(set(delivered))
        assert seen == len(delivered) + books.reader.overflowed
        assert books.reader.overflowed > 0
    else:
        assert delivered == list(range(seen)), "no number is missing, none came twice"
    assert seen > 10 * KILLS


def test_the_books_balance_while_a_writer_is_stopped(start: Start, eventually: Eventually) -> None:
    with closing(Channel(shape(slots=8, steps=20, lanes=1))) as channel:
        reader, delivered = Reader(channel), 0
        process = psutil.Process(start(children.write_blanks_for_ever, channel.ports[0]).pid)
        for stop in range(1, 151):
            while delivered < 400 * stop:  # faster than it is written, so that the writer is hardly ever waiting
                if reader.ready():
                    delivered += reader.take(0).rows
            process.suspend()
            eventually(lambda: process.status() == psutil.STATUS_STOPPED)
            account = reader.account(0)
            assert account.produced == delivered + account.queued + account.open
            process.resume()
