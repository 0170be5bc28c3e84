"""Credits: who may write how many rows, under which version; this is what bounds the lag, by pacing and not by discarding.

    free = limit - reserved,    limit = (max_lag + 1) × S + rows trained + rows dropped

A worker reserves rows and announces its version in one breath, under one lock, so that the learner, who posts a version and
scans the announcements under the same lock, can never overlook someone who is about to act on an old one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from freewheel.core import NDArray, SeedStream
from freewheel.transport.shm.channel import Tally
from freewheel.transport.shm.lock import ProcessLock
from freewheel.transport.shm.memory import SharedArrays
from freewheel.transport.shm.wakeup import Wakeups
from freewheel.transport.shm.worker import Grant

NOBODY = -1
UNLIMITED = 2**62


class Credits:
    """Shared by the learner and all workers. A worker that may write reserves rows; a row it has written stays reserved for
    ever, so whatever is trained or dropped has to raise the limit."""

    def __init__(self, workers: int, lanes: int, steps: int, *, fresh: bool = True) -> None:
        each = ((workers,), "i8")
        self.memory = SharedArrays(
            {
                "limit": ((1,), "i8"),
                "posted": ((1,), "i8"),
                "reserved": each,
                "announced": each,  # the version a worker acts on
                "revoked": each,  # nobody waits for the row this worker is stepping: close
                "waiting": each,
                "gated": ((1,), "i8"),  # the learner has its rows and waits for older ones that are still under way
            }
        )
        self.memory["announced"][:] = self.memory["posted"][:] = NOBODY
        self.lock = ProcessLock()
        self.wakeups = Wakeups(workers)
        self._fresh = fresh  # fragments are closed as soon as newer weights are there
        self._lanes, self._steps = lanes, steps  # a step of a worker is `lanes` rows; a fragment has at most `steps`

    # ------------------------------------------------------------------------------------------------------- the learner's

    def post(self, version: int, limit: int) -> None:
        """A new version, and what it allows."""
        with self.lock:
            self.memory["posted"][0] = version
            self.memory["limit"][0] = limit
            waiting = self._waiting()
        self.wakeups.notify(waiting)

    def allow(self, limit: int) -> None:
        """More rows under the same version."""
        with self.lock:
            self.memory["limit"][0] = limit
            waiting = self._waiting()
        self.wakeups.notify(waiting)

    def announced(self) -> NDArray:
        """[W] the version that each worker is acting on, -1 for nobody; those it was revoked from do not count.

        Without the lock: who takes it after a post sees what was posted, and who had it before has announced. Only the order
        matters, for an announcement that was revoked must not hide the next one.
        """
        announced = self.memory["announced"].copy()
        return np.where(self.memory["revoked"] > 0, NOBODY, announced)

    def revoke(self, worker: int, version: int, produced: int) -> bool:
        """Wait no longer for this worker: others may write what it had reserved. Whether it still was at this version."""
        with self.lock:
            if version == NOBODY or self.memory["announced"][worker] != version:
                return False
            self.memory["reserved"][worker] = produced
            self.memory["revoked"][worker] = 1
            waiting = self._waiting()
        self.wakeups.notify(waiting)
        return True

    def settle(self, worker: int, tally: Tally, *, for_good: bool) -> None:
        """A worker has died: what it had reserved beyond its produced rows flows back."""
        with self.lock:
            self._give_back(worker, tally)
            self.memory["waiting"][worker] = 0
            waiting = self._waiting()
        self.wakeups.notify(waiting)

    # -------------------------------------------------------------------------------------------------------- a worker's

    def take(self, worker: int, tally: Tally) -> Grant | None:
        """Steps and the version to act with, announced; None, and marked as waiting, if there are none. What it had before,
        closed and queued, is given back in the same breath.

        Rows come by steps of all lanes; the last one may overdraw, or an odd remainder would starve everyone.
        """
        memory, lanes, waiting = self.memory.numbers, self._lanes, list[int]()
        with self.lock:
            unused = self._give_back(worker, tally)
            free = memory["limit"][0] - sum(memory["reserved"])  # of plain numbers: numpy would be cold
            version = memory["posted"][0]
            if free <= 0 or version == NOBODY:
                memory["waiting"][worker] = 1
                return None
            steps = min(self._steps, max(1, free // lanes))
            memory["announced"][worker] = version
            memory["reserved"][worker] = tally.produced + steps * lanes
            memory["waiting"][worker] = 0
            if unused > steps * lanes:
                waiting = self._waiting()
        self.wakeups.notify(waiting)
        return Grant(steps, version)

    def give_back(self, worker: int, tally: Tally) -> None:
        """The fragment is closed and queued: its unused rows are free, and nobody acts on its version here any more."""
        with self.lock:
            waiting = self._waiting() if self._give_back(worker, tally) > 0 else []
        self.wakeups.notify(waiting)

    def _give_back(self, worker: int, tally: Tally) -> int:
        """The rows that come free."""
        memory = self.memory.numbers
        unused = memory["reserved"][worker] - tally.produced
        memory["reserved"][worker] = tally.produced
        memory["announced"][worker] = NOBODY
        memory["revoked"][worker] = 0
        return unused

    def over(self, worker: int, version: int, ended: bool) -> bool:
        """Whether to close now: newer weights are there, or nobody waits for more of these. Without the lock: a hint."""
        memory = self.memory.numbers
        return (self._fresh and memory["posted"][0] > version) or memory["revoked"][worker] > 0

    @property
    def gated(self) -> bool:
        return bool(self.memory.numbers["gated"][0])

    def streams(self, worker: int) -> Sequence[SeedStream]:
        return ()

    def _waiting(self) -> list[int]:
        """Whom to wake when the lock is free again: woken before, they would run into it. (If this process dies in between,
        they look for themselves within a turn.)"""
        waiting: list[int] = np.flatnonzero(self.memory["waiting"]).tolist()
        if waiting:
            self.memory["waiting"][:] = 0
        return waiting

    def close(self) -> None:
        self.memory.close()
        self.lock.close()
        self.wakeups.close()
