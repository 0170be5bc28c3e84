"""Decisions under any order of events: the lag stays bounded, no credit is lost, no worker waits forever, every row counts once.

A simulated run without processes: workers write rows one by one; a learner takes fragments, trains on batches with the oldest
version first, publishes, and stops waiting for late workers; workers die at any moment and are replaced; the run may be saved
and restored.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from freewheel.pacing.episode_queue import EpisodeOrder, EpisodeQueue
from freewheel.pacing.lag_bound import LagBound
from freewheel.pacing.pacing import CALLED, KEEP, NO_VERSION, CreditPacing, Grant, Pacing, Tally
from freewheel.transport.shm.permits import SharedPermits
from tests.pacing.conftest import ListPermits

WORKERS, STEPS, S = 3, 3, 4
WHO = st.integers(0, WORKERS - 1)


@dataclass
class Worker:
    produced: int = 0
    grant: Grant | None = None
    version: int = NO_VERSION
    rows: int = 0  # of the open fragment
    taken: int = 0  # of these, taken by the learner while it was open
    late: bool = False  # the learner does not wait for it
    ended: bool = True  # its last row ended an episode
    ticket: int = NO_VERSION


@dataclass
class Queued:
    """A fragment, or a part of one."""

    worker: int
    version: int
    rows: int
    ended: bool


@dataclass
class LearnerState:
    version: int = 0
    held: list[Queued] = field(default_factory=list)
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    lags: set[int] = field(default_factory=set)


class Run(RuleBasedStateMachine):
    """One lane a worker; fragments of at most STEPS rows."""

    max_lag: int | None = 1
    shared = False

    def __init__(self) -> None:
        super().__init__()
        pacing = self.pacing()
        self.permits = SharedPermits(pacing, WORKERS) if self.shared else ListPermits(pacing)
        self.workers = [Worker() for _ in range(WORKERS)]
        self.queue: list[Queued] = []
        self.learner = LearnerState()
        self.began_before = 0  # when the number of turns was last changed
        self.permits.publish(0, 0)

    def pacing(self) -> Pacing:
        return LagBound(workers=WORKERS, lanes=1, steps=STEPS, batch_rows=S, ahead=1, max_lag=self.max_lag)

    def tally(self, who: int) -> Tally:
        return Tally(self.workers[who].produced, 0, self.workers[who].ended)

    def done(self) -> int:
        return self.learner.trained + self.learner.dropped.total()

    @rule(who=WHO)
    def take(self, who: int) -> None:
        worker = self.workers[who]
        if worker.grant is None:
            worker.grant = self.permits.take(who, self.tally(who))
            if worker.grant is not None and worker.grant.version != KEEP:
                worker.version = self.learner.version  # the newest weights, at least those of the grant
                assert worker.version >= worker.grant.version

    @rule(who=WHO, ends=st.booleans())
    def write(self, who: int, ends: bool) -> None:
        worker = self.workers[who]
        if worker.grant is None or worker.rows >= worker.grant.steps:
            return
        worker.rows += 1
        worker.produced += 1
        worker.ended = ends
        if worker.rows == worker.grant.steps or self.permits.pacing.closes(who, worker.version, ended=ends):
            self.close(who)

    def close(self, who: int) -> None:
        worker = self.workers[who]
        self.queue.append(Queued(who, worker.version, worker.rows - worker.taken, worker.ended))
        worker.grant, worker.rows, worker.taken = None, 0, 0

    @rule(who=WHO)
    def give_back(self, who: int) -> None:
        """As a worker does before a reset, which may take long; its closed fragment is queued."""
        if self.workers[who].grant is None:
            self.permits.give_back(who, self.tally(who))

    @rule(turns=st.integers(0, WORKERS), steps=st.integers(1, STEPS))
    def adapt(self, turns: int, steps: int) -> None:
        """Another number of workers may act at a time, in fragments of another length."""
        assert isinstance(self.permits.pacing, CreditPacing)
        self.permits.pacing.cells["steps"][0] = steps
        self.began_before = sum(version != NO_VERSION for version in self.permits.pacing.cells["announced"])
        self.began_before += sum(state == CALLED for state in self.permits.pacing.cells["waiting"])
        self.permits.wake(self.permits.locked(self.permits.pacing.set_turns, turns))

    @rule(who=WHO)
    def lend(self, who: int) -> None:
        """A worker is late, or was called and does not come."""
        assert isinstance(self.permits.pacing, CreditPacing)
        self.permits.wake(self.permits.locked(self.permits.pacing.lend, who))

    @rule(who=WHO)
    def write_a_fragment(self, who: int) -> None:
        self.take(who)
        for _ in range(STEPS):
            self.write(who, ends=False)
        self.give_back(who)

    @rule(who=WHO)
    def the_others_continue(self, who: int) -> None:
        """While one of them is inside a step."""
        for other in range(WORKERS):
            if other != who:
                self.write_a_fragment(other)
        self.collect()
        self.update()

    @rule(who=WHO, in_a_row=st.booleans())
    def die(self, who: int, in_a_row: bool) -> None:
        """Killed: the supervisor closes its fragment, gives its reservation back, and starts the next incarnation."""
        worker = self.workers[who]
        if in_a_row and worker.grant is not None and worker.rows < worker.grant.steps:
            worker.rows += 1
            worker.produced += 1
            worker.ended = False
        if worker.grant is not None:
            self.close(who)
        self.permits.settle(who, self.tally(who), for_good=False)
        worker.grant = None

    @rule()
    def collect(self) -> None:
        for fragment in self.queue:
            self.arrive(fragment)
        self.queue.clear()
        self.permits.allow(self.done())

    def arrive(self, fragment: Queued) -> None:
        worker = self.workers[fragment.worker]
        if worker.late:
            worker.late = False
            self.permits.locked(self.permits.pacing.drop_late, fragment.worker, fragment.rows)
            self.learner.dropped["stale"] += fragment.rows
        elif fragment.rows:
            self.learner.held.append(fragment)

    @rule(who=WHO)
    def pass_over(self, who: int) -> None:
        """The learner stops waiting for a step that delays the next batch; the finished rows are taken."""
        worker, version = self.workers[who], self.permits.pacing.announced()[who]
        if worker.grant is None or not self.permits.pacing.blocks(version):
            return
        self.collect()
        part = Queued(who, worker.version, worker.rows - worker.taken, ended=False)
        if self.permits.revoke(who, version, worker.produced):
            assert self.permits.pacing.announced()[who] == NO_VERSION, "the learner does not wait for it"
            worker.taken = worker.rows
            if part.rows and not worker.late:
                self.learner.held.append(part)
            else:
                self.learner.dropped["stale"] += part.rows
            worker.late = True

    @rule()
    def update(self) -> None:
        """Train on exactly S rows, oldest version first, if nothing blocks; then publish."""
        learner = self.learner
        if sum(part.rows for part in learner.held) < S or self.permits.pacing.blocks(self.oldest()):
            return
        missing = S
        for part in sorted(learner.held, key=lambda part: part.version):
            used = min(missing, part.rows)
            part.rows -= used
            missing -= used
            if used:
                learner.lags.add(learner.version - part.version)
        learner.held = [part for part in learner.held if part.rows]
        learner.trained += S
        learner.version += 1
        self.permits.publish(learner.version, self.done())

    def oldest(self) -> int | None:
        announced = [version for version in self.permits.pacing.announced() if version != NO_VERSION]
        return min([*announced, *(part.version for part in self.queue)], default=None)

    @invariant()
    def no_more_act_than_may(self) -> None:
        """But for those that had begun before, and those whose turn was lent."""
        assert isinstance(self.permits.pacing, CreditPacing)
        cells = self.permits.pacing.cells
        begun = sum(version != NO_VERSION for version in cells["announced"])
        assert begun <= max(cells["turns"][0] or WORKERS, self.began_before) + sum(cells["lent"]) + sum(
            cells["revoked"]
        )

    @invariant()
    def every_row_counts_once(self) -> None:
        produced = sum(worker.produced for worker in self.workers)
        opened = sum(worker.rows - worker.taken for worker in self.workers)
        queued = sum(part.rows for part in (*self.queue, *self.learner.held))
        assert produced == self.learner.trained + self.learner.dropped.total() + queued + opened

    @invariant()
    def the_lag_is_bounded(self) -> None:
        assert self.max_lag is None or max(self.learner.lags, default=0) <= self.max_lag

    @invariant()
    def no_credit_is_lost(self) -> None:
        """Without a grant, exactly the written rows are reserved."""
        for who, worker in enumerate(self.workers):
            reserved, announced = (self.permits.pacing.cells[name][who] for name in ("reserved", "announced"))
            if announced == NO_VERSION:
                assert reserved == worker.produced

    def teardown(self) -> None:
        """The run can always continue: the next updates happen."""
        target = self.learner.version + 2
        for _ in range(400):
            if self.learner.version >= target:
                break
            for who in range(WORKERS):
                self.take(who)
                self.write(who, ends=True)
                self.give_back(who)
            self.collect()
            self.update()
        assert self.learner.version >= target, "the run does not continue"
        if isinstance(self.permits, SharedPermits):
            with closing(self.permits):
                pass


class SharedRun(Run):
    shared = True


class NoLag(Run):
    """max_lag 0: the learner and the workers take turns."""

    max_lag = 0

    def pacing(self) -> Pacing:
        return LagBound(workers=WORKERS, lanes=1, steps=STEPS, batch_rows=S, ahead=0, max_lag=0)


class Unbounded(Run):
    """For a replay buffer: the learner never waits, new weights do not close fragments."""

    max_lag = None

    def pacing(self) -> Pacing:
        return LagBound(workers=WORKERS, lanes=1, steps=STEPS, batch_rows=S, ahead=2, max_lag=None, close_on_new=False)


class Episodes(RuleBasedStateMachine):
    """Whole episodes: a ticket is played to its end once, and given up only after two workers died during it."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = self.fresh()
        self.permits = ListPermits(self.queue)
        self.workers = [Worker() for _ in range(WORKERS)]
        self.begun = [False] * WORKERS  # in the middle of an episode
        self.ended: list[int] = []  # tickets played to their end
        self.deaths: Counter[int] = Counter()
        self.given_up: set[int] = set()  # before the last restore
        self.version = 0
        self.permits.publish(0, 0)

    @staticmethod
    def fresh() -> EpisodeQueue:
        return EpisodeQueue(order=EpisodeOrder(0, WORKERS), workers=WORKERS, steps=STEPS, batch_rows=S, max_lag=1)

    def tally(self, who: int) -> Tally:
        return Tally(self.workers[who].produced, 0, self.workers[who].ended)

    @rule(who=WHO)
    def take(self, who: int) -> None:
        worker = self.workers[who]
        if worker.grant is None:
            if self.queue.held(who) == NO_VERSION:
                self.permits.locked(self.queue.issue, who)
            worker.ticket = self.queue.held(who)
            worker.grant = self.permits.take(who, self.tally(who))
            if worker.grant is not None:
                assert (worker.grant.version == KEEP) is self.begun[who], "an episode has one version"
                self.begun[who] = True

    @rule(who=WHO, ends=st.booleans())
    def write(self, who: int, ends: bool) -> None:
        worker = self.workers[who]
        if worker.grant is not None:
            worker.produced += 1
            worker.ended = ends
            worker.grant = None
            if ends:
                self.ended.append(worker.ticket)
                self.begun[who] = False
            self.permits.give_back(who, self.tally(who))

    @rule(who=WHO)
    def die(self, who: int) -> None:
        worker = self.workers[who]
        if self.queue.held(who) != NO_VERSION:
            self.deaths[self.queue.held(who)] += 1
        self.permits.settle(who, self.tally(who), for_good=False)
        worker.grant, self.begun[who], worker.ended = None, False, True

    @rule(turns=st.integers(0, WORKERS))
    def adapt(self, turns: int) -> None:
        self.permits.wake(self.permits.locked(self.queue.set_turns, turns))

    @rule()
    def learn(self) -> None:
        self.version += 1
        self.queue.finished, self.queue.finished_rows = len(self.ended), sum(one.produced for one in self.workers)
        self.permits.publish(self.version, sum(one.produced for one in self.workers))

    @rule()
    def save_and_restore(self) -> None:
        """Episodes under way are lost; their tickets are played again."""
        state, self.given_up = self.queue.state(), self.missing()
        self.queue = self.fresh()
        self.permits = ListPermits(self.queue)
        self.queue.restore(state)
        self.workers, self.begun = [Worker() for _ in range(WORKERS)], [False] * WORKERS
        self.deaths.clear()
        self.permits.publish(self.version, 0)

    @invariant()
    def every_ticket_is_played_once(self) -> None:
        assert len(set(self.ended)) == len(self.ended)

    def missing(self) -> set[int]:
        """Tickets that were issued and will not be played to their end."""
        under_way = {ticket for ticket in self.queue.cells["ticket"] if ticket != NO_VERSION}
        again = {ticket - 1 for ticket in self.queue.cells["again"] if ticket}
        return set(range(self.queue.cells["issued"][0])) - set(self.ended) - under_way - again

    @invariant()
    def no_ticket_is_skipped(self) -> None:
        assert all(self.deaths[ticket] >= 2 for ticket in self.missing() - self.given_up)

    def teardown(self) -> None:
        before = len(self.ended)
        for _ in range(50):
            for who in range(WORKERS):
                self.take(who)
                self.write(who, ends=True)
            self.learn()
        assert len(self.ended) > before, "the run does not continue"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("examples", "steps"), [(40, 50), pytest.param(600, 120, marks=pytest.mark.long)], ids=["briefly", "in depth"]
)
@pytest.mark.parametrize("kind", [Run, SharedRun, NoLag, Unbounded, Episodes])
def test_any_order_of_events(kind: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
    size = settings(deadline=None, max_examples=examples, stateful_step_count=steps)
    run_state_machine_as_test(kind, settings=size)
