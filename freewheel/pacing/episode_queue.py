"""Episode collection: which worker plays which episode. A free worker plays an episode to its end under one version.

Every episode is played once. Episode e is number e div lanes of lane e mod lanes, so it is the same in every worker. A
worker with B envs plays B episodes side by side, which begin and end together: ticket t is episodes t × B .. t × B +
B - 1. A worker may begin a ticket while less is under way than the limit allows. The limit counts episodes or rows; in
rows, an unfinished ticket counts as the mean of the finished ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from freewheel.core import SeedStream
from freewheel.pacing.pacing import (
    KEEP,
    NO_TICKET,
    NO_VERSION,
    WAITS,
    Cells,
    CreditPacing,
    Grant,
    Locked,
    Tally,
    Woken,
    fill,
)
from freewheel.seeding import training_episodes

DEATHS = 2  # workers that may die during one episode before it is given up
AHEAD = 1  # batches of finished episodes that may wait for the learner, if the lag is not bounded
RECENT = 16  # latest tickets named in a fragment: more than an env can take in resets before it is given up
NO_END = 2**62


@dataclass(frozen=True)
class EpisodeOrder:
    """Maps the index of an episode to its lane and number."""

    seed: int
    lanes: int
    first_lane: int = 0  # number of lane 0 in the whole run, if several learners share its lanes

    def episode(self, index: int) -> tuple[int, int]:
        """Return (lane, number)."""
        return index % self.lanes, index // self.lanes

    def episode_seed(self, index: int) -> int:
        lane, number = self.episode(index)
        return training_episodes(self.seed, self.first_lane + lane).seed(number)


@dataclass(kw_only=True)
class EpisodeQueue(CreditPacing):
    """Issues tickets."""

    ticket_columns: ClassVar[int] = 1 + RECENT
    order: EpisodeOrder
    side_by_side: int = 1  # B: envs of a worker, and episodes of a ticket
    batch_episodes: int | None = None  # an update learns from this many episodes instead of S rows
    wave: int = 0  # begin this many tickets together, and the next ones when all have ended; 0: no waves
    finished: int = 0  # tickets that ended
    finished_rows: int = 0  # rows of the tickets that ended
    cut: int = 0  # tickets that were dropped
    before: int = 0  # tickets that ended in the run that this one continues

    own_episodes: ClassVar[bool] = False

    @property
    def layout(self) -> dict[str, int]:
        """expected: the count of a ticket that has not ended; issued: number of tickets issued; released: tickets below
        this may be played; again: tickets to issue once more, plus one; ticket: each worker's current or next ticket;
        base: rows that the worker had produced when it began the ticket; deaths: workers that died playing it."""
        each = dict.fromkeys(("again", "ticket", "base", "deaths"), self.workers)
        return {**super().layout, "expected": 1, "issued": 1, "released": 1, **each}

    def attach(self, cells: Cells) -> None:
        super().attach(cells)
        fill(cells, NO_TICKET, "ticket")
        cells["expected"][0] = self.side_by_side
        cells["released"][0] = self.wave or NO_END

    def state(self) -> dict[str, list[int]]:
        """Tickets held by workers are saved as tickets to play again."""
        held = [ticket for ticket in self.cells["ticket"] if ticket != NO_TICKET]
        again = [ticket - 1 for ticket in self.cells["again"] if ticket]
        return {
            "issued": [self.cells["issued"][0]],
            "again": sorted([*held, *again]),
            "episodes": [self.finished, self.finished_rows],
        }

    def restore(self, state: Mapping[str, Sequence[int]]) -> None:
        self.cells["issued"][0] = issued = state["issued"][0]
        self.cells["released"][0] = issued + self.wave if self.wave else NO_END
        self.finished, self.finished_rows = state["episodes"]
        self.before = self.finished
        for place, ticket in zip(range(self.workers), state["again"], strict=False):
            self.cells["again"][place] = ticket + 1

    def publish(self, version: int, done: int) -> Woken:
        self.cells["expected"][0] = self._expected()
        return super().publish(version, done)

    def _expected(self) -> int:
        if self.batch_episodes or not self.finished:
            return self.side_by_side
        return max(1, self.finished_rows // self.finished)

    def _limit(self, done: int) -> int:
        """Allow one batch in training and `ahead` more. Without a bound on the lag, add the episodes under way, so that
        workers wait only if the learner is slower than they are."""
        unbounded = self.workers * self._expected() if self.max_lag is None else 0
        ahead = AHEAD if self.max_lag is None else self.max_lag
        if self.batch_episodes:
            counted = (self.cut - self.before) * self.side_by_side  # tickets of this run are counted from 0
            return (ahead + 1 + max(self.version, 0)) * self.batch_episodes + counted + unbounded
        return self._at_most((ahead + 1) * self.batch_rows + unbounded) + done

    @property
    def _share(self) -> int:
        return self.cells["expected"][0]

    def _ready(self, worker: int) -> bool:
        return super()._ready(worker) and self.cells["ticket"][worker] < self.cells["released"][0]

    def wave_is_over(self) -> bool:
        """Return whether every released ticket has been played."""
        released, tickets = self.cells["released"][0], self.cells["ticket"]
        return self.cells["issued"][0] >= released and not any(NO_TICKET < ticket < released for ticket in tickets)

    def release(self) -> Woken:
        """Let the next wave begin."""
        self.cells["released"][0] += self.wave
        return self.call()

    def settle(self, worker: int, tally: Tally, *, for_good: bool) -> Woken:
        """Let the replacement play the ticket again, unless the ticket has ended or too many workers died during it."""
        cells = self.cells
        begun = cells["announced"][worker] != NO_VERSION
        cells["deaths"][worker] += 1
        if begun and tally.ended and tally.produced > cells["base"][worker]:
            cells["ticket"][worker] = NO_TICKET
        elif begun and self.batch_episodes:
            cells["reserved"][worker] -= self.side_by_side
        if for_good or cells["deaths"][worker] >= DEATHS:
            cells["ticket"][worker] = NO_TICKET
        self._end(worker, tally)
        cells["waiting"][worker] = 0
        return self.call()

    def held(self, worker: int) -> int:
        """The ticket of a worker, or NO_TICKET."""
        return self.cells["ticket"][worker]

    def issue(self, worker: int) -> int:
        """Give this worker the next ticket."""
        cells = self.cells
        place = next((place for place, ticket in enumerate(cells["again"]) if ticket), None)
        if place is not None:
            ticket, cells["again"][place] = cells["again"][place] - 1, 0
        else:
            # A worker that died inside this method may hold a ticket that `issued` does not count yet.
            ticket = max(cells["issued"][0], max(cells["ticket"]) + 1)
        cells["ticket"][worker], cells["deaths"][worker] = ticket, 0
        cells["issued"][0] = max(cells["issued"][0], ticket + 1)
        return ticket

    def take(self, worker: int, tally: Tally) -> tuple[Grant | None, Woken]:
        cells = self.cells
        if cells["announced"][worker] != NO_VERSION:  # in the middle of an episode
            return Grant(cells["steps"][0], KEEP), []
        wait, woken = self._must_wait(worker)
        posted = cells["posted"][0]
        if wait or self.free <= 0 or not self._ready(worker):
            cells["waiting"][worker] = WAITS
            return None, woken
        cells["base"][worker] = tally.produced
        cells["announced"][worker] = posted
        begun = cells["reserved"][worker] if self.batch_episodes else tally.produced
        cells["reserved"][worker] = begun + cells["expected"][0]
        return Grant(cells["steps"][0], posted), woken

    def give_back(self, worker: int, tally: Tally) -> Woken:
        if not tally.ended:
            return []
        self.cells["ticket"][worker] = NO_TICKET
        self._end(worker, tally)
        return self.call()

    def _end(self, worker: int, tally: Tally) -> None:
        if not self.batch_episodes:
            self.cells["reserved"][worker] = tally.produced
        self._stop_acting(worker)

    def streams(self, worker: int, locked: Locked) -> Sequence[SeedStream]:
        tickets = Tickets(self, worker, locked)
        return [TicketStream(tickets, place) for place in range(self.side_by_side)]

    def closes(self, worker: int, version: int, *, ended: bool) -> bool:
        return ended


class TicketSource(Protocol):
    """The source of tickets: the queue, or a record of the tickets that it issued."""

    order: EpisodeOrder
    side_by_side: int

    def held(self, worker: int) -> int: ...
    def issue(self, worker: int) -> int: ...


class Tickets:
    """A worker's tickets: its k-th reset takes its k-th ticket."""

    def __init__(self, queue: TicketSource, worker: int, locked: Locked) -> None:
        self.queue, self._worker, self._locked = queue, worker, locked
        self._tickets: dict[int, int] = {}
        self._count, self._recent = 0, deque([NO_TICKET] * RECENT, RECENT)
        if (left := queue.held(worker)) != NO_TICKET:
            self._tickets[0] = left
            self._note(left)

    def number(self, k: int) -> int:
        if k not in self._tickets:
            ticket = self._locked(self.queue.issue, self._worker)
            self._tickets = {k - 1: self._tickets.get(k - 1, NO_TICKET), k: ticket}
            self._note(ticket)
        return self._tickets[k]

    def _note(self, ticket: int) -> None:
        self._count += 1
        self._recent.append(ticket)

    @property
    def history(self) -> list[int]:
        """The number of tickets that the worker's process has had, and the last RECENT of them."""
        return [self._count, *self._recent]


class TicketStream:
    """The episodes of one of a worker's envs. Implements core.SeedStream."""

    def __init__(self, tickets: Tickets, place: int) -> None:
        self.tickets, self._place = tickets, place

    def number(self, k: int) -> int:
        return self.tickets.number(k) * self.tickets.queue.side_by_side + self._place

    def seed(self, k: int) -> int:
        return self.tickets.queue.order.episode_seed(self.number(k))
