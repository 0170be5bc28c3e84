"""EpisodeQueue: which episode is whose; every one is played once, to its end, by whoever is free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from freewheel.core import NDArray, SeedStream
from freewheel.seeding import training_episodes
from freewheel.transport.shm.channel import Tally
from freewheel.transport.shm.lock import ProcessLock
from freewheel.transport.shm.memory import SharedArrays
from freewheel.transport.shm.wakeup import Wakeups
from freewheel.transport.shm.worker import KEEP, Grant

NOBODY = NONE = -1
DEATHS = 2  # workers that may die of one episode: perhaps it kills whoever plays it


@dataclass(frozen=True)
class EpisodeOrder:
    """How ticket t becomes an episode: number t div lanes of lane t mod lanes."""

    seed: int
    lanes: int

    def episode(self, ticket: int) -> tuple[int, int]:
        """(lane, number)."""
        return ticket % self.lanes, ticket // self.lanes

    def episode_seed(self, ticket: int) -> int:
        lane, number = self.episode(ticket)
        return training_episodes(self.seed, lane).seed(number)


class EpisodeQueue:
    """One version an episode. A worker may begin one while less is under way than `limit` allows: in rows, an episode counting
    as `expected` until it has ended, or in episodes (`expected` = 1)."""

    def __init__(self, workers: int, steps: int, draw: EpisodeOrder, *, in_episodes: bool) -> None:
        one, each = ((1,), "i8"), ((workers,), "i8")
        self.memory = SharedArrays(
            {
                "limit": one,
                "posted": one,
                "expected": one,  # what an episode is likely to take
                "issued": one,  # tickets 0 .. issued - 1
                "wave": one,  # only tickets below this may be played
                "ticket": each,  # what a worker plays, or will play next; -1: none
                "base": each,  # rows it had produced when it began that
                "deaths": each,  # while it had this ticket
                "reserved": each,
                "announced": each,
                "revoked": each,
                "waiting": each,
                "gated": ((1,), "i8"),  # the learner has its rows and waits for older ones that are still under way
            }
        )
        for name in ("posted", "ticket", "announced"):
            self.memory[name][:] = NONE
        self.memory["expected"][0] = 1
        self.memory["wave"][0] = 2**62
        self.lock = ProcessLock()
        self.wakeups = Wakeups(workers)
        self._steps, self._draw, self._in_episodes = steps, draw, in_episodes

    # ------------------------------------------------------------------------------------------------------- the learner's

    def post(self, version: int, limit: int, expected: int) -> None:
        with self.lock:
            self.memory["posted"][0] = version
            self.memory["limit"][0], self.memory["expected"][0] = limit, expected
            waiting = self._waiting()
        self.wakeups.notify(waiting)

    def allow(self, limit: int) -> None:
        with self.lock:
            self.memory["limit"][0] = limit
            waiting = self._waiting()
        self.wakeups.notify(waiting)

    def release(self, wave: int) -> None:
        """Tickets below `wave` may be played."""
        with self.lock:
            self.memory["wave"][0] = wave
            waiting = self._waiting()
        self.wakeups.notify(waiting)

    def wave_is_over(self) -> bool:
        """Every ticket that was released has been played."""
        with self.lock:
            wave, tickets = self.memory["wave"][0], self.memory["ticket"]
            return bool(self.memory["issued"][0] >= wave and not ((tickets != NONE) & (tickets < wave)).any())

    def announced(self) -> NDArray:
        """[W] the version of the episode that each worker plays, -1 for none; those nobody waits for do not count."""
        announced = self.memory["announced"].copy()  # without the lock and in this order: see Credits.announced
        return np.where(self.memory["revoked"] > 0, NOBODY, announced)

    def revoke(self, worker: int, version: int) -> bool:
        """Wait no longer for this worker's episode."""
        with self.lock:
            held = version != NOBODY and bool(self.memory["announced"][worker] == version)
            self.memory["revoked"][worker] |= held
            return held

    def settle(self, worker: int, tally: Tally, *, for_good: bool) -> None:
        """A worker has died: who replaces it plays its ticket again, unless it was played to its end or several died of it."""
        with self.lock:
            memory = self.memory
            begun = memory["announced"][worker] != NOBODY
            memory["deaths"][worker] += 1
            if begun and tally.ended and tally.produced > memory["base"][worker]:
                memory["ticket"][worker] = NONE
            elif begun and self._in_episodes:
                memory["reserved"][worker] -= 1
            if for_good or memory["deaths"][worker] >= DEATHS:
                memory["ticket"][worker] = NONE
            self._end(worker, tally)
            memory["waiting"][worker] = 0
            waiting = self._waiting()
        self.wakeups.notify(waiting)

    def _end(self, worker: int, tally: Tally) -> None:
        if not self._in_episodes:
            self.memory["reserved"][worker] = tally.produced
        self.memory["announced"][worker] = NOBODY
        self.memory["revoked"][worker] = 0

    def _waiting(self) -> list[int]:
        """Whom to wake when the lock is free again: see Credits."""
        waiting: list[int] = np.flatnonzero(self.memory["waiting"]).tolist()
        if waiting:
            self.memory["waiting"][:] = 0
        return waiting

    # -------------------------------------------------------------------------------------------------------- a worker's

    def issue(self, worker: int) -> int:
        """The next ticket, for this worker to play."""
        with self.lock:
            held = int(self.memory["ticket"].max())  # perhaps by one who died before it could move `issued`
            ticket = max(int(self.memory["issued"][0]), held + 1)
            self.memory["ticket"][worker], self.memory["deaths"][worker] = ticket, 0
            self.memory["issued"][0] = ticket + 1
            return ticket

    def take(self, worker: int, tally: Tally) -> Grant | None:
        memory = self.memory.numbers
        if memory["announced"][worker] != NOBODY:  # in the middle of an episode; nobody else announces in its name
            return Grant(self._steps, KEEP)
        with self.lock:
            free = memory["limit"][0] - sum(memory["reserved"])
            posted = memory["posted"][0]
            if free <= 0 or posted == NONE or memory["ticket"][worker] >= memory["wave"][0]:
                memory["waiting"][worker] = 1
                return None
            memory["base"][worker] = tally.produced
            memory["announced"][worker] = posted
            begun = memory["reserved"][worker] if self._in_episodes else tally.produced
            memory["reserved"][worker] = begun + memory["expected"][0]
            memory["waiting"][worker] = 0
            return Grant(self._steps, posted)

    def over(self, worker: int, version: int, ended: bool) -> bool:
        return ended

    def give_back(self, worker: int, tally: Tally) -> None:
        if not tally.ended:
            return
        with self.lock:
            self.memory["ticket"][worker] = NONE
            self._end(worker, tally)
            waiting = self._waiting()
        self.wakeups.notify(waiting)

    @property
    def gated(self) -> bool:
        return bool(self.memory.numbers["gated"][0])

    def streams(self, worker: int) -> Sequence[SeedStream]:
        return [_Ticketed(self, worker, self._draw)]

    def close(self) -> None:
        self.memory.close()
        self.lock.close()
        self.wakeups.close()


class _Ticketed:
    """A worker's episodes as they are issued: the k-th reset takes the k-th ticket. Implements core.SeedStream."""

    def __init__(self, tickets: EpisodeQueue, worker: int, draw: EpisodeOrder) -> None:
        self._tickets, self._worker, self._draw = tickets, worker, draw
        self._issued: dict[int, int] = {}
        if (left := int(tickets.memory["ticket"][worker])) != NONE:
            self._issued[0] = left

    def number(self, k: int) -> int:
        if k not in self._issued:
            self._issued = {k - 1: self._issued.get(k - 1, NONE), k: self._tickets.issue(self._worker)}
        return self._issued[k]

    def seed(self, k: int) -> int:
        return self._draw.episode_seed(self.number(k))
