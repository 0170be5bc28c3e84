"""What a wire is: it carries weights to whoever acts and fragments back, and carries out what a pacing decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

from freewheel.core import Episode, NDArray, RowCounts, SeedStream, Snapshot, Transitions
from freewheel.pacing.pacing import Grant, Pacing, Tally, Woken

Value = TypeVar("Value")


class Fragment(NamedTuple):
    """Up to T steps of an author's lanes, taken off the wire."""

    worker: int
    incarnation: int
    version: int
    data: Transitions[Any]  # [t, M, ...], the receiver's own
    state: Any  # [M, H] the actor's memory before row 0
    episodes: tuple[Episode, ...]
    rows: int  # valid rows in data
    lost: dict[str, int]  # rows that an env failure took, by cause
    gap: bool  # fragments before it were dropped
    time: NDArray  # [len(WORKER_TIME)] ns


class Permits:
    """A pacing on a wire: one decision at a time, under the wire's lock; the workers it lets go on are woken after that."""

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

    def locked(self, decide: Callable[..., Value], *arguments: Any) -> Value:
        """Any other decision of this pacing."""
        with self._lock:
            return decide(*arguments)

    def wake(self, woken: Woken) -> None:
        self._wake(woken)

    def streams(self, worker: int) -> Sequence[SeedStream]:
        """The episodes that a worker's lanes play; none: each lane its own."""
        return self.pacing.streams(worker, self.locked)

    def _woken(self, decide: Callable[..., Woken], *arguments: Any) -> None:
        with self._lock:
            woken = decide(*arguments)
        self._wake(woken)


class Wire(AbstractContextManager["Wire"], Protocol):
    """Leaving the `with` block leaves nothing running; what is known of the workers can still be asked for."""

    @property
    def authors(self) -> int: ...  # who sign fragments: numbers 0 .. authors - 1
    @property
    def lanes(self) -> int: ...  # of each author
    @property
    def permits(self) -> Permits: ...
    def post(self, snapshot: Snapshot) -> None: ...  # the newest weights, for everyone
    def take(self) -> Iterator[Fragment]: ...  # every fragment that is closed by now
    def take_open(self, worker: int) -> Fragment | None: ...  # the finished rows of one that is still being written
    def wait(
        self, seconds: float
    ) -> bool: ...  # whether something was closed; raises when nobody is left to close anything
    def queued_versions(self) -> Sequence[int]: ...  # the oldest of each author that has closed fragments waiting
    def produced(self, worker: int) -> int: ...
    @property
    def overflowed(self) -> int: ...  # rows that full queues have dropped
    def rows(self) -> RowCounts: ...
    def step_ages(self) -> NDArray: ...  # [W] seconds since each worker began what it is doing
    def mean_step(self) -> float: ...  # seconds of a step over all workers; 0: not known
    def stats(self) -> Mapping[str, float | None]: ...
    def messages(self) -> Sequence[str]: ...
    def summary(self) -> Mapping[str, Any]: ...
    def note_episodes(self, fragment: Fragment) -> None: ...  # for the statistics about each worker
    def state(self) -> dict[str, NDArray]: ...  # how far lanes and workers have come
    def restore(self, state: Mapping[str, NDArray]) -> None: ...  # before it is entered
