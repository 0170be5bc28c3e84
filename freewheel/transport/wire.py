"""The base of every wire: it carries weights to the actors and fragments back, and executes a pacing's decisions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from freewheel.core import Episode, NDArray, RowCounts, SeedStream, Snapshot, Transitions
from freewheel.metrics.workers import WorkerState
from freewheel.pacing.pacing import CreditPacing, Grant, Pacing, Tally, Woken

Value = TypeVar("Value")


class After(NamedTuple):
    """The state of an author after the last row of a fragment."""

    numbers: list[int]  # [M] the number of each lane's present or next episode
    memory: NDArray  # [M, H] the actor's memory
    rng: NDArray | None  # seeding.Position.packed, if a later run has to draw the same numbers


class Skipped(NamedTuple):
    """A fragment that a full queue dropped before it was read."""

    incarnation: int
    version: int
    steps: int | None  # steps that had not been read; None: not known


class Fragment(NamedTuple):
    """Up to T steps of an author's lanes, received from a wire."""

    worker: int
    incarnation: int
    version: int
    data: Transitions[Any]  # [t, M, ...], a copy
    state: Any  # [M, H] the actor's memory before row 0
    episodes: tuple[Episode, ...]
    rows: int  # valid rows in data
    lost: dict[str, int]  # rows lost to environment failures, by cause
    gap: bool  # fragments before this one were dropped
    time: NDArray  # [len(WORKER_TIME)] ns
    tickets: Sequence[int] = ()  # the tickets of issued episodes; see pacing.episode_queue.Tickets.history
    after: After | None = None  # None: not known
    skipped: Sequence[Skipped] = ()  # fragments of this worker before this one, if they are recorded


class WorkerRows(NamedTuple):
    """Counts of one worker's rows at one moment."""

    produced: int
    queued: int
    open: int


class Permits:
    """A pacing on a wire: it makes one decision at a time, under the wire's lock, then wakes the allowed workers."""

    def __init__(self, pacing: Pacing, lock: AbstractContextManager[Any], wake: Callable[[Woken], None]) -> None:
        self.pacing, self._lock, self._wake = pacing, lock, wake

    def publish(self, version: int, done: int) -> None:
        self._woken(self.pacing.publish, version, done)

    def allow(self, done: int) -> None:
        if self.pacing.allows_more(done):
            self._woken(self.pacing.allow, done)

    def revoke(self, worker: int, version: int, produced: int) -> bool:
        with self._lock:
            held, woken = self.pacing.revoke(worker, version, produced)
        self._wake(woken)
        return held

    def settle(self, worker: int, tally: Tally, *, for_good: bool) -> None:
        with self._lock:
            woken = self.pacing.settle(worker, tally, for_good=for_good)
        self._wake(woken)

    def take(self, worker: int, tally: Tally) -> Grant | None:
        with self._lock:
            grant, woken = self.pacing.take(worker, tally)
        if woken:
            self._wake(woken)
        return grant

    def give_back(self, worker: int, tally: Tally) -> None:
        self._woken(self.pacing.give_back, worker, tally)

    def lend(self, worker: int) -> None:
        if isinstance(self.pacing, CreditPacing):
            self._woken(self.pacing.lend, worker)

    def locked(self, decide: Callable[..., Value], *arguments: Any) -> Value:
        """Make any other decision of this pacing."""
        with self._lock:
            return decide(*arguments)

    def wake(self, woken: Woken) -> None:
        self._wake(woken)

    def streams(self, worker: int) -> Sequence[SeedStream]:
        """Return the episodes that a worker's lanes play; (): each lane plays its own."""
        return self.pacing.streams(worker, self.locked)

    def _woken(self, decide: Callable[..., Woken], *arguments: Any) -> None:
        with self._lock:
            woken = decide(*arguments)
        self._wake(woken)


class Wire(AbstractContextManager["Wire"]):
    """Connects actors and learner. After the `with` block nothing runs; counts, summary and state stay available.

    Members with a default are for wires with several workers.
    """

    authors: int  # number of authors of fragments
    lanes: int  # of each author
    started_s: float = 0.0  # seconds that its platform took to start, such as a cluster: not part of a run
    slots: int = 1  # the most fragments of each author that may wait
    # All authors write together, so there is nothing to gather after the first fragment.
    all_at_once: ClassVar[bool] = False
    permits: Permits

    @abstractmethod
    def post(self, snapshot: Snapshot) -> None: ...  # the newest weights, for all actors
    @abstractmethod
    def take(self) -> Iterator[Fragment]: ...  # every closed fragment
    @abstractmethod
    def wait(self, seconds: float) -> bool: ...  # whether a fragment was closed; raises when no worker is left
    @abstractmethod
    def queued_versions(self) -> Sequence[int]: ...  # the oldest version of each author with closed fragments
    @abstractmethod
    def produced(self, worker: int) -> int: ...
    @abstractmethod
    def rows(self) -> RowCounts: ...
    @abstractmethod
    def stats(self) -> Mapping[str, float | None]: ...
    @abstractmethod
    def messages(self) -> Sequence[str]: ...

    def take_open(self, worker: int) -> Fragment | None:  # the finished rows of an open fragment
        return None

    @property
    def overflowed(self) -> int:  # rows dropped by full queues
        return 0

    def step_ages(self) -> NDArray:  # [W] seconds since each worker entered its phase
        return np.zeros(1)

    def mean_step(self) -> float:  # seconds of a step over all workers; 0: unknown
        return 0.0

    def workers(self) -> Sequence[WorkerState]:  # what they are doing now; for any thread
        return ()

    def note_episodes(self, fragment: Fragment) -> None:
        """Count the fragment's episodes in the statistics of its worker."""

    def note_delivered(self, fragment: Fragment) -> None:
        """Note a fragment, delivered or dropped: `state` continues after it. Call it in the order of writing."""

    def summary(self) -> Mapping[str, Any]:
        return {}

    def state(self) -> dict[str, NDArray]:  # the progress of lanes and workers
        return {}

    def restore(self, state: Mapping[str, NDArray]) -> None:
        """Call it before entering the wire."""
