"""Two workers and a learner in any order of operations, deaths included: no row is lost, repeated or without a credit."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from freewheel.core import Failure
from freewheel.pacing.lag_bound import LagBound
from freewheel.pacing.pacing import NO_VERSION, Grant
from freewheel.transport.shm.channel import Channel
from freewheel.transport.shm.permits import SharedPermits
from tests.support.fuse import Fuse, Killed, fused_writer
from tests.support.ring_rows import NO_TIME, CountingReader, Pen, episode, shape

WORKERS, LANES, STEPS, SLOTS = 2, 2, 3, 3
ALLOWANCE = 2 * 7  # (max_lag + 1) × S rows; odd, so that the last step of all lanes exceeds it

WHO = st.integers(0, WORKERS - 1)
ROW = st.sampled_from(
    [
        {},
        {},
        {"episodes": [episode(1)]},
        {"valid": [True, False]},
        {"valid": [False, True], "failures": [Failure(0, "nan", "a report")]},
        {"valid": [False, False], "failures": [Failure(0, "nan", ""), Failure(1, "env_error", "")]},
    ]
)


class Author:
    """A worker and its progress."""

    def __init__(self, channel: Channel, worker: int, incarnation: int, number: int) -> None:
        self.worker, self.incarnation, self.fuse = worker, incarnation, Fuse()
        self.writer = fused_writer(channel.ports[worker], self.fuse, worker, incarnation)
        self.pen = Pen(self.writer, number)
        self.grant: Grant | None = None
        self.written: int | None = None  # steps of the fragment that is open
        self.closed = False  # the fragment is, but its grant has not been given back
        self.revoked = False


class Machine(RuleBasedStateMachine):
    """Drives the real objects and keeps its own counts."""

    def __init__(self) -> None:
        super().__init__()
        self.channel = Channel(shape(WORKERS, SLOTS, STEPS, LANES))
        pacing = LagBound(workers=WORKERS, lanes=LANES, steps=STEPS, batch_rows=0, ahead=0, max_lag=1)
        self.permits = SharedPermits(pacing, WORKERS)  # a limit can be given as `done`
        self.cells = pacing.cells
        self.counted = CountingReader(self.channel)
        self.authors = [Author(self.channel, worker, 0, 0) for worker in range(WORKERS)]
        self.posted, self.limit = NO_VERSION, 0
        self.without_credit = 0  # rows written on grants that had been revoked

    def teardown(self) -> None:
        for author in self.authors:
            self.replace(author)
        self.counted.take_all()
        self.the_counts_balance()
        assert [len(steps) for steps in self.counted.steps] == [author.pen.number for author in self.authors]
        self.cells = {}
        self.permits.close()
        self.channel.close()

    @rule(who=WHO)
    def take_credit(self, who: int) -> None:
        author = self.authors[who]
        if (author.grant is not None and not author.closed) or author.writer.full():
            return
        reserved, tally = list(self.cells["reserved"]), author.writer.tally
        free = self.limit - (sum(reserved) - reserved[who] + tally.produced)
        author.grant = self.permits.take(who, tally)
        author.closed = author.revoked = False
        if free <= 0 or self.posted == NO_VERSION:
            assert author.grant is None
        else:
            assert author.grant == Grant(max(1, min(STEPS, free // LANES)), self.posted)

    def may_begin(self, author: Author) -> bool:
        return author.grant is not None and author.written is None and not author.closed

    def may_write(self, author: Author) -> bool:
        return author.grant is not None and author.written is not None and author.written < author.grant.steps

    @rule(who=WHO)
    def begin(self, who: int) -> None:
        author = self.authors[who]
        if self.may_begin(author):
            author.pen.begin(self.posted)  # the weights may be newer than the grant
            author.written = 0

    @rule(who=WHO, row=ROW)
    def write(self, who: int, row: dict[str, Any]) -> None:
        author = self.authors[who]
        if self.may_write(author):
            before = author.writer.tally.produced
            author.pen.step(**row)
            assert author.written is not None
            author.written += 1
            self.without_credit += (author.writer.tally.produced - before) * author.revoked

    @rule(who=WHO)
    def close(self, who: int) -> None:
        """Its grant is given back with the next `take`, or with `give_back`."""
        author = self.authors[who]
        if author.written:
            author.pen.commit(NO_TIME)
            author.written, author.closed = None, True

    @rule(who=WHO)
    def give_back(self, who: int) -> None:
        author = self.authors[who]
        if author.closed:
            self.permits.give_back(who, author.writer.tally)
            author.grant, author.closed, author.revoked = None, False, False

    @rule(who=WHO)
    def die(self, who: int) -> None:
        self.replace(self.authors[who])

    @rule(who=WHO, row=ROW, stores=st.integers(0, 25), what=st.sampled_from(["begin", "write", "commit"]))
    def die_inside(self, who: int, row: dict[str, Any], stores: int, what: str) -> None:
        """In the middle of an operation, or right after it."""
        author = self.authors[who]
        author.fuse.left = stores
        try:
            if what == "begin" and self.may_begin(author):
                author.pen.begin(self.posted)
            elif what == "write" and self.may_write(author):
                author.pen.step(**row)
            elif what == "commit" and author.written:
                author.pen.commit(NO_TIME)
        except Killed:
            pass
        author.fuse.left = math.inf
        self.replace(author)

    def replace(self, author: Author) -> None:
        before = self.cells["reserved"][author.worker]
        tally = self.counted.reader.settle(author.worker)
        self.without_credit += max(0, tally.produced - before)
        self.permits.settle(author.worker, tally, for_good=False)
        self.authors[author.worker] = Author(self.channel, author.worker, author.incarnation + 1, author.pen.number)
        assert self.authors[author.worker].writer.tally.produced == tally.produced

    @rule(who=WHO)
    def take(self, who: int) -> None:
        if who in self.counted.reader.ready():
            self.counted.take(who)

    @rule()
    def take_all(self) -> None:
        self.counted.take_all()

    @rule(who=WHO)
    def take_open(self, who: int) -> None:
        self.counted.take_open(who)

    def allowed(self) -> int:
        return ALLOWANCE + sum(self.counted.rows) + sum(self.counted.lost)

    @rule()
    def post(self) -> None:
        self.posted, self.limit = self.posted + 1, self.allowed()
        self.permits.publish(self.posted, self.limit)

    @precondition(lambda self: self.posted != NO_VERSION)
    @rule()
    def allow(self) -> None:
        self.limit = self.allowed()
        self.permits.allow(self.limit)

    @rule(who=WHO, late=st.booleans())
    def revoke(self, who: int, late: bool) -> None:
        author = self.authors[who]
        version = self.cells["announced"][who]
        self.counted.take_open(who)
        held = author.grant is not None and author.grant.version == version
        produced = self.counted.reader.account(who).produced
        if late and self.may_write(author):
            self.write(who, {})
            self.without_credit += LANES * (not author.revoked)
        assert self.permits.revoke(who, version, produced) is held
        author.revoked |= held

    @invariant()
    def the_counts_balance(self) -> None:
        for worker in range(WORKERS):
            self.counted.balance(worker)
        assert self.counted.reader.overflowed == 0

    @invariant()
    def rows_come_once_and_in_order(self) -> None:
        for worker, author in enumerate(self.authors):
            steps = self.counted.steps[worker]
            assert steps == list(range(len(steps)))
            assert len(steps) <= author.pen.number
            parts = [part for part in self.counted.fragments if part.worker == worker]
            signed = [(part.incarnation, part.version) for part in parts if len(part.data.valid)]
            assert signed == sorted(signed)
            assert all(version <= self.posted for _, version in signed)
            assert not any(part.gap for part in parts)

    @invariant()
    def every_row_has_a_credit(self) -> None:
        reserved = list(self.cells["reserved"])
        for author, rows in zip(self.authors, reserved, strict=True):
            produced = self.counted.reader.account(author.worker).produced
            assert rows >= produced or author.revoked
            assert author.grant is not None or rows == produced
        assert sum(reserved) <= self.limit + LANES - 1 + self.without_credit

    @invariant()
    def acting_workers_are_announced(self) -> None:
        acting = [
            author.grant.version if author.grant and not author.revoked else NO_VERSION for author in self.authors
        ]
        assert self.permits.pacing.announced() == acting


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("examples", "steps"), [(40, 50), pytest.param(600, 100, marks=pytest.mark.long)], ids=["briefly", "in depth"]
)
def test_any_order_of_operations(examples: int, steps: int) -> None:
    size = settings(deadline=None, max_examples=examples, stateful_step_count=steps)
    run_state_machine_as_test(Machine, settings=size)
