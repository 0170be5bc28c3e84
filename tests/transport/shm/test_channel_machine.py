"""Two workers and a learner in any order of moves, deaths included: no row is lost, doubled or unpaid."""

from __future__ import annotations

import math
import os
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
from tests.support.ring_rows import NO_TIME, Books, Pen, episode, shape

WORKERS, LANES, STEPS, SLOTS = 2, 2, 3, 3
ALLOWANCE = 2 * 7  # (max_lag + 1) × S rows; odd, so that the last step of all lanes overdraws
LONG = bool(os.environ.get("FREEWHEEL_LONG"))

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


class Hand:
    """A worker: what it holds and how far it is."""

    def __init__(self, channel: Channel, worker: int, incarnation: int, number: int) -> None:
        self.worker, self.incarnation, self.fuse = worker, incarnation, Fuse()
        self.writer = fused_writer(channel.ports[worker], self.fuse, worker, incarnation)
        self.pen = Pen(self.writer, number)
        self.grant: Grant | None = None
        self.written: int | None = None  # steps of the fragment that is open
        self.closed = False  # the fragment is, but its grant has not been given back
        self.revoked = False


class Machine(RuleBasedStateMachine):
    """Moves the real thing and keeps its own books beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.channel = Channel(shape(WORKERS, SLOTS, STEPS, LANES))
        pacing = LagBound(workers=WORKERS, lanes=LANES, steps=STEPS, batch_rows=0, ahead=0, max_lag=1)
        self.permits = SharedPermits(pacing, WORKERS)  # a limit can be given as `done`
        self.cells = pacing.cells
        self.books = Books(self.channel)
        self.hands = [Hand(self.channel, worker, 0, 0) for worker in range(WORKERS)]
        self.posted, self.limit = NO_VERSION, 0
        self.unpaid = 0  # rows written on grants that had been revoked

    def teardown(self) -> None:
        for hand in self.hands:
            self.bury(hand)
        self.books.take_all()
        self.everything_adds_up()
        assert [len(steps) for steps in self.books.steps] == [hand.pen.number for hand in self.hands]
        self.cells = {}
        self.permits.close()
        self.channel.close()

    # ------------------------------------------------------------------------------------------------------------- a worker's

    @rule(who=WHO)
    def take_credit(self, who: int) -> None:
        hand = self.hands[who]
        if (hand.grant is not None and not hand.closed) or hand.writer.full():
            return
        reserved, tally = list(self.cells["reserved"]), hand.writer.tally
        free = self.limit - (sum(reserved) - reserved[who] + tally.produced)
        hand.grant = self.permits.take(who, tally)
        hand.closed = hand.revoked = False
        if free <= 0 or self.posted == NO_VERSION:
            assert hand.grant is None
        else:
            assert hand.grant == Grant(max(1, min(STEPS, free // LANES)), self.posted)

    def may_begin(self, hand: Hand) -> bool:
        return hand.grant is not None and hand.written is None and not hand.closed

    def may_write(self, hand: Hand) -> bool:
        return hand.grant is not None and hand.written is not None and hand.written < hand.grant.steps

    @rule(who=WHO)
    def begin(self, who: int) -> None:
        hand = self.hands[who]
        if self.may_begin(hand):
            hand.pen.begin(self.posted)  # the mail may be newer than the grant
            hand.written = 0

    @rule(who=WHO, row=ROW)
    def write(self, who: int, row: dict[str, Any]) -> None:
        hand = self.hands[who]
        if self.may_write(hand):
            before = hand.writer.tally.produced
            hand.pen.step(**row)
            assert hand.written is not None
            hand.written += 1
            self.unpaid += (hand.writer.tally.produced - before) * hand.revoked

    @rule(who=WHO)
    def close(self, who: int) -> None:
        """Its grant is given back with the next that it takes, or when it must not keep it for longer."""
        hand = self.hands[who]
        if hand.written:
            hand.pen.commit(NO_TIME)
            hand.written, hand.closed = None, True

    @rule(who=WHO)
    def give_back(self, who: int) -> None:
        hand = self.hands[who]
        if hand.closed:
            self.permits.give_back(who, hand.writer.tally)
            hand.grant, hand.closed, hand.revoked = None, False, False

    @rule(who=WHO)
    def die(self, who: int) -> None:
        self.bury(self.hands[who])

    @rule(who=WHO, row=ROW, stores=st.integers(0, 25), what=st.sampled_from(["begin", "write", "commit"]))
    def die_at_it(self, who: int, row: dict[str, Any], stores: int, what: str) -> None:
        """In the middle of a move, or right after it."""
        hand = self.hands[who]
        hand.fuse.left = stores
        try:
            if what == "begin" and self.may_begin(hand):
                hand.pen.begin(self.posted)
            elif what == "write" and self.may_write(hand):
                hand.pen.step(**row)
            elif what == "commit" and hand.written:
                hand.pen.commit(NO_TIME)
        except Killed:
            pass
        hand.fuse.left = math.inf
        self.bury(hand)

    def bury(self, hand: Hand) -> None:
        before = self.cells["reserved"][hand.worker]
        tally = self.books.reader.settle(hand.worker)
        self.unpaid += max(0, tally.produced - before)
        self.permits.settle(hand.worker, tally, for_good=False)
        self.hands[hand.worker] = Hand(self.channel, hand.worker, hand.incarnation + 1, hand.pen.number)
        assert self.hands[hand.worker].writer.tally.produced == tally.produced

    # ----------------------------------------------------------------------------------------------------------- the learner's

    @rule(who=WHO)
    def take(self, who: int) -> None:
        if who in self.books.reader.ready():
            self.books.take(who)

    @rule()
    def take_all(self) -> None:
        self.books.take_all()

    @rule(who=WHO)
    def take_open(self, who: int) -> None:
        self.books.take_open(who)

    def allowed(self) -> int:
        return ALLOWANCE + sum(self.books.rows) + sum(self.books.lost)

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
        hand = self.hands[who]
        version = self.cells["announced"][who]
        self.books.take_open(who)
        held = hand.grant is not None and hand.grant.version == version
        produced = self.books.reader.account(who).produced
        if late and self.may_write(hand):
            self.write(who, {})
            self.unpaid += LANES * (not hand.revoked)
        assert self.permits.revoke(who, version, produced) is held
        hand.revoked |= held

    # ---------------------------------------------------------------------------------------------------------- what must hold

    @invariant()
    def everything_adds_up(self) -> None:
        for worker in range(WORKERS):
            self.books.balance(worker)
        assert self.books.reader.overflowed == 0

    @invariant()
    def rows_come_once_and_in_order(self) -> None:
        for worker, hand in enumerate(self.hands):
            steps = self.books.steps[worker]
            assert steps == list(range(len(steps)))
            assert len(steps) <= hand.pen.number
            parts = [part for part in self.books.fragments if part.worker == worker]
            signed = [(part.incarnation, part.version) for part in parts if len(part.data.valid)]
            assert signed == sorted(signed)
            assert all(version <= self.posted for _, version in signed)
            assert not any(part.gap for part in parts)

    @invariant()
    def every_row_is_paid_for(self) -> None:
        reserved = list(self.cells["reserved"])
        for hand, rows in zip(self.hands, reserved, strict=True):
            produced = self.books.reader.account(hand.worker).produced
            assert rows >= produced or hand.revoked
            assert hand.grant is not None or rows == produced
        assert sum(reserved) <= self.limit + LANES - 1 + self.unpaid

    @invariant()
    def who_acts_is_announced(self) -> None:
        acting = [hand.grant.version if hand.grant and not hand.revoked else NO_VERSION for hand in self.hands]
        assert self.permits.pacing.announced() == acting


@pytest.mark.timeout(600 if LONG else 60)
def test_any_order_of_moves() -> None:
    size = (
        {"max_examples": 2000, "stateful_step_count": 100} if LONG else {"max_examples": 100, "stateful_step_count": 50}
    )
    run_state_machine_as_test(Machine, settings=settings(deadline=None, **size))  # type: ignore[arg-type]
