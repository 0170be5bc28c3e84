"""Queue the fragments from actors for the learner, in the order in which each worker wrote them, and count their rows."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from freewheel.core import TRANSITION_FIELDS, EnvSpec, Transitions
from freewheel.pacing.pacing import Tally
from freewheel.rollout.runner import empty_transitions
from freewheel.transport.shm.sync import Wakeup
from freewheel.transport.wire import Fragment, WorkerRows


@dataclass(eq=False)
class PendingFragment:
    """A fragment whose data may not have arrived yet."""

    fragment: Fragment
    complete: bool


class FragmentQueue:
    """A queue between two threads. Rows are counted when their number is known; their data may arrive later or never."""

    def __init__(self, workers: int, env: EnvSpec) -> None:
        """env: the envs of one worker."""
        self._nothing = empty_transitions(0, env)
        self._lock = threading.RLock()
        self._pending: list[deque[PendingFragment]] = [deque() for _ in range(workers)]
        self._closed: deque[Fragment] = deque()  # fragments that the learner may take
        self._parts: list[Fragment | None] = [None] * workers  # the finished rows of each worker's open fragment
        self._produced = [0] * workers
        self._failed = [0] * workers
        self._queued = [0] * workers  # rows
        self._fragments = [0] * workers
        self.ended = [True] * workers  # see Tally
        self.wakeup = Wakeup()  # wakes the learner

    def tally(self, worker: int) -> Tally:
        with self._lock:
            return Tally(self._produced[worker], self._failed[worker], self.ended[worker])

    def account(self, worker: int) -> WorkerRows:
        with self._lock:
            return WorkerRows(self._produced[worker], self._queued[worker], 0)

    def fragments(self, worker: int) -> int:
        """Return how many fragments of a worker the learner has not taken."""
        return self._fragments[worker]

    def waiting(self) -> int:
        return sum(self._fragments)

    def versions(self) -> list[int]:
        """Return the oldest version of each worker that has fragments in the queue."""
        oldest: dict[int, int] = {}
        with self._lock:
            pending = (entry.fragment for entries in self._pending for entry in entries)
            for fragment in (*self._closed, *pending):
                oldest[fragment.worker] = min(fragment.version, oldest.get(fragment.worker, fragment.version))
        return list(oldest.values())

    def put(self, fragment: Fragment, *, complete: bool = True) -> PendingFragment:
        """Add the next fragment of its worker. If it is not complete, call `arrived` when its data is there."""
        with self._lock:
            fragment = fragment._replace(data=writable(fragment.data)) if complete else fragment
            self.close_part(fragment.worker)
            self._count(fragment)
            entry = PendingFragment(fragment, complete)
            self._pending[fragment.worker].append(entry)
            self._move(fragment.worker)
        return entry

    def arrived(self, entry: PendingFragment, data: Transitions | None) -> None:
        """Add the data of a fragment, or None if the data is lost."""
        with self._lock:
            fragment = entry.fragment
            if data is not None:
                entry.fragment = fragment._replace(data=writable(data))
            else:
                lost = dict(fragment.lost)
                lost["worker_death"] = lost.get("worker_death", 0) + fragment.rows
                entry.fragment = fragment._replace(data=self._nothing, rows=0, lost=lost, gap=True, after=None)
            entry.complete = True
            self._move(fragment.worker)

    def put_part(self, part: Fragment) -> None:
        """Add the finished rows of a fragment that is still being written."""
        part = part._replace(data=writable(part.data))
        with self._lock:
            self._count(part)
            self._parts[part.worker] = part

    def take_part(self, worker: int) -> Fragment | None:
        with self._lock:
            part, self._parts[worker] = self._parts[worker], None
            if part is not None:
                self._taken(part)
            return part

    def close_part(self, worker: int) -> None:
        """Close a part of a fragment. The remaining rows arrive as a separate fragment or never."""
        with self._lock:
            part, self._parts[worker] = self._parts[worker], None
            if part is not None:
                self._pending[worker].append(PendingFragment(part, complete=True))
                self._move(worker)

    def take(self) -> list[Fragment]:
        with self._lock:
            taken = list(self._closed)
            self._closed.clear()
            for fragment in taken:
                self._taken(fragment)
        return taken

    def lose_the_rest(self) -> None:
        """Count all rows that have not arrived as lost."""
        with self._lock:
            for worker, entries in enumerate(self._pending):
                self.close_part(worker)
                for entry in list(entries):
                    if not entry.complete:
                        self.arrived(entry, None)

    def _count(self, fragment: Fragment) -> None:
        lost = sum(fragment.lost.values())
        self._produced[fragment.worker] += fragment.rows + lost
        self._failed[fragment.worker] += lost
        self._queued[fragment.worker] += fragment.rows + lost
        self._fragments[fragment.worker] += 1

    def _taken(self, fragment: Fragment) -> None:
        self._queued[fragment.worker] -= fragment.rows + sum(fragment.lost.values())
        self._fragments[fragment.worker] -= 1

    def _move(self, worker: int) -> None:
        """Release the fragments that are complete and have no incomplete fragment before them."""
        entries, moved = self._pending[worker], False
        while entries and entries[0].complete:
            self._closed.append(entries.popleft().fragment)
            moved = True
        if moved:
            self.wakeup.notify()

    def close(self) -> None:
        self.wakeup.close()


def writable(data: Transitions) -> Transitions:
    """Return a copy, because data from Ray is read-only."""
    return Transitions(*(getattr(data, name).copy() for name in TRANSITION_FIELDS))
