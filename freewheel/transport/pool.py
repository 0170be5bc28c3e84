"""The worker pool: a Collector over any wire, with one implementation of chunks, row counts, messages and summary."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from freewheel.core import CAUSES, WORKER_TIME, Array, Chunk, Collector, Origin, RowCounts, Snapshot
from freewheel.metrics.workers import WorkerState
from freewheel.pacing.control import Settings
from freewheel.pacing.pacing import NO_VERSION, CreditPacing
from freewheel.pacing.posted import Posted
from freewheel.rollout.factory import CollectSpec
from freewheel.timeline.recording import SpanRecording
from freewheel.transport.wire import Fragment, Wire

LOOK = 0.1  # seconds between two checks of the workers while the learner waits
SHORTEST_PATIENCE = 0.05  # seconds: a worker may lose the processor for this long, even if its steps are short
GATHER = 0.02  # after the first fragment, the learner gathers more for this fraction of a batch's time, ...
LONGEST_GATHER = 0.02  # ... and at most this many seconds
SPARE, SPARE_S = 0.25, 3.0  # the learner has spare time if it has waited for this share of at least SPARE_S seconds
LEND = 1.0, 10.0  # seconds without a row until a turn is lent: the minimum; the value while no step time is known


class Assembly(Protocol):
    """How fragments are delivered to the learner: one by one, as whole batches, or as whole episodes."""

    takes_parts: bool  # the finished rows of an open fragment can be used
    gathers: bool  # wait for several fragments, because waking up for each one costs too much
    only_waited_for: bool  # deliver in a wait only: what a run learns must not depend on when rows arrive

    # Returns the fragments to drop, each with its cause.
    def put(self, fragment: Fragment, *, late: bool) -> Iterable[tuple[Fragment, str]]: ...
    def ready(self) -> Iterable[Fragment]: ...  # the fragments to deliver now
    @property
    def rows(self) -> int: ...  # rows held here
    @property
    def oldest(self) -> int | None: ...  # the oldest version held here, if the gate has to wait for it
    @property
    def hurried(self) -> bool: ...  # the pool must call `wait` often
    def wait(self, wire: Wire) -> None: ...  # the pool calls this before every wait


class WorkerPool(Collector):
    """A Collector over any wire."""

    def __init__(self, wire: Wire, assembly: Assembly, spec: CollectSpec, patience: float = math.inf) -> None:
        self.wire, self._assembly, self._patience = wire, assembly, patience
        self._pacing, self._permits = wire.permits.pacing, wire.permits
        self._while_waiting, self._batch_steps = spec.while_waiting, spec.batch.steps
        self._recorder = spec.recorder
        self._trace = None if spec.trace is None else _CollectorTrack(spec.trace)
        self._late: set[int] = set()  # workers that the learner does not wait for: their open fragment will be too late
        self._time_to_spare: Callable[[], None] | None = spec.time_to_spare
        self._spare = 0.0, 0.0  # when the learner got its first rows; seconds that it has waited since then
        self._had_turn: dict[int, int] = {}  # rows of each worker that had a turn at the last check
        self._look_at_turns = 0.0  # by time.monotonic
        self._dropped: Counter[str] = Counter()
        self._done = 0  # rows of this run that the learner has trained on or dropped, ...
        self._done_before = 0  # ... and rows that it got in the earlier run that this one continues
        self._posted = Posted()
        self._signed = [(0, 0)] * wire.authors  # incarnation and next sequence number
        self._unsigned = np.zeros((wire.authors, len(WORKER_TIME)), np.int64)  # time of fragments without rows
        self._before = RowCounts()  # of the earlier run that this one continues

    def __enter__(self) -> Self:
        self.wire.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.wire.__exit__(kind, error, tb)

    def publish(self, snapshot: Snapshot, done: int) -> None:
        for posted in self._posted.post(snapshot):
            self.wire.post(posted)
        self._done = done - self._done_before  # negative while the learner has rows of the earlier run left
        self._permits.publish(snapshot.version, self._rows_done())

    def collect(self, wait: bool) -> Sequence[Chunk[Any]]:
        """Collect chunks. A wait ends with a chunk. With a bound on the lag, it also ends when `oldest` changes, because
        the learner stops waiting for a step that takes too long."""
        if not wait and self._assembly.only_waited_for:
            return []
        bounded, asked = self._pacing.max_lag is not None, time.monotonic()
        oldest, chunks = self.oldest(), self._take()  # in this order: dropping a fragment in `_take` changes `oldest`
        while wait and not chunks and not (bounded and self.oldest() != oldest):
            gated = self._pacing.blocks(oldest)
            if bounded:
                self._pacing.cells["gated"][0] = gated
            self._assembly.wait(self.wire)
            began, blocking = time.perf_counter_ns(), self._blocking(oldest) if gated else None
            patience = self._wait(hurried=gated or self._assembly.hurried)
            waited = time.perf_counter_ns()
            chunks = self._take()
            if self._trace is not None:
                self._trace.waited(began, waited, blocking)
            if gated and not chunks:
                chunks = self._pass_over(patience)
            if not chunks and isinstance(self._pacing, CreditPacing):
                self._pacing.go_on()
        if self._time_to_spare is not None:
            self._look_for_spare_time(asked, time.monotonic())
        return chunks

    def _blocking(self, version: int | None) -> int | None:
        """Return a worker that acts on this version, which delays the next update."""
        announced = list(self._pacing.announced())
        return announced.index(version) if version in announced else None

    def _look_for_spare_time(self, asked: float, now: float) -> None:
        first, waited = self._spare
        self._spare = (first, waited + now - asked) if first else (now, 0.0)
        if first and now > first + SPARE_S and waited > SPARE * (now - first) and self._time_to_spare is not None:
            self._time_to_spare()
            self._time_to_spare = None

    def oldest(self) -> int | None:
        announced = self._pacing.announced()  # before the queue: rows are queued, then an announcement is cleared
        versions = [version for version in announced if version != NO_VERSION]
        if self._pacing.max_lag is not None or announced:
            versions += self.wire.queued_versions()
        held = self._assembly.oldest
        return min(versions if held is None else [*versions, held], default=None)

    def rows(self) -> RowCounts:
        rows, before = self.wire.rows(), self._before
        dropped = Counter(rows.dropped) + self._dropped + Counter(before.dropped)
        return RowCounts(
            produced=rows.produced + before.produced,
            queued=rows.queued + self._assembly.rows,
            open=rows.open,
            dropped={cause: dropped[cause] for cause in CAUSES if dropped[cause]},
        )

    def stats(self) -> Mapping[str, float | None]:
        pacing, found = self._pacing, self.wire.stats()
        if not isinstance(pacing, CreditPacing) or self.wire.authors != pacing.workers:
            return found
        turns, steps = pacing.cells["turns"][0] or pacing.workers, pacing.cells["steps"][0]
        return {**found, "workers/turns": float(turns), "fragment/steps": float(steps)}

    def plant(self) -> tuple[Settings, Settings, Settings] | None:
        pacing, room = self._pacing, self.wire.slots
        if not isinstance(pacing, CreditPacing):
            return None
        turns, steps, slots = (pacing.cells[name][0] for name in ("turns", "steps", "slots"))
        present = Settings(turns or pacing.workers, steps, min(slots or room, room))
        return Settings(1, 1, min(2, room)), present, Settings(pacing.workers, pacing.steps, room)

    def adjust(self, settings: Settings) -> None:
        """Change settings from the next fragments on. The pacing's guarantees do not depend on these cells."""
        pacing = self._pacing
        assert isinstance(pacing, CreditPacing), "only a credit pacing has settings"
        pacing.cells["steps"][0], pacing.cells["slots"][0] = settings.fragment, settings.slots
        self._permits.wake(self._permits.locked(pacing.set_turns, settings.workers))

    def workers(self) -> Sequence[WorkerState]:
        return self.wire.workers()

    def messages(self) -> Sequence[str]:
        return self.wire.messages()

    def summary(self) -> Mapping[str, Any]:
        return self.wire.summary()

    def state_dict(self) -> dict[str, Array]:
        """Return the state after the delivered rows. A resumed run produces undelivered rows again: they do not count.
        If episodes are issued to workers, unfinished ones start again, and their rows count as dropped at shutdown."""
        rows = self.rows()
        under_way, dropped = rows.queued + rows.open, Counter(rows.dropped)
        if not self._pacing.own_episodes:
            dropped["shutdown"] += under_way
            under_way = 0
        counts = [rows.produced - under_way, *(dropped[cause] for cause in CAUSES)]
        state: dict[str, Array] = {"rows": np.array(counts, np.int64), **self._posted.state()}
        state |= {f"wire.{name}": value for name, value in self.wire.state().items()}
        pacing = self._pacing.state()
        return state | {f"pacing.{name}": np.array(value, np.int64) for name, value in pacing.items()}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Call it before entering the collector."""
        produced, *dropped = (int(count) for count in np.asarray(state["rows"]))
        causes = dict(zip(CAUSES, dropped, strict=True))
        self._before, self._done_before = RowCounts(produced=produced, dropped=causes), produced - sum(dropped)
        self._posted.restore(state)
        arrays = {name: np.asarray(value) for name, value in state.items()}
        self.wire.restore({name.removeprefix("wire."): own for name, own in arrays.items() if name.startswith("wire.")})
        numbers = {name.removeprefix("pacing."): np.asarray(value).tolist() for name, value in state.items()}
        self._pacing.restore(numbers)

    def _rows_done(self) -> int:
        return self._done + self._dropped.total() + self.wire.overflowed

    def _wait(self, *, hurried: bool) -> float:
        """Wait a short time for a closed fragment. Return how many seconds a step may take.

        A hurried wait is short enough to notice a step that takes longer. Another wait may gather several fragments.
        """
        mean = self.wire.mean_step()
        patience = max(SHORTEST_PATIENCE, self._patience * mean) if mean else math.inf
        self._while_waiting()
        closed = self.wire.wait(min(LOOK, patience / 4) if hurried else LOOK)
        if closed and not hurried and self._assembly.gathers and not self.wire.all_at_once:
            time.sleep(min(LONGEST_GATHER, GATHER * self._batch_steps * mean))
        return patience

    def _take(self) -> list[Chunk[Any]]:
        for fragment in self.wire.take():
            self._put(fragment)
        self._permits.allow(self._rows_done())
        self._lend_turns()
        return list(self._ready())

    def _lend_turns(self) -> None:
        """If only a few workers act at a time, lend the turn of a worker that has written no row for too long."""
        if (now := time.monotonic()) < self._look_at_turns:
            return
        mean = self.wire.mean_step()
        self._look_at_turns = now + (max(LEND[0], self._patience * mean) if mean else LEND[1])
        holding = {worker: self.wire.produced(worker) for worker in self._pacing.in_turn()}
        for worker, rows in holding.items():
            if self._had_turn.get(worker) == rows:
                self._permits.lend(worker)
        self._had_turn = holding

    def _put(self, fragment: Fragment, *, part: bool = False) -> None:
        if self._recorder is not None:
            for skipped in fragment.skipped:
                self._recorder.skipped(fragment.worker, *skipped)
            origin = fragment.worker, fragment.incarnation, fragment.version
            self._recorder.acted(*origin, fragment.data, fragment.tickets)
        if self._trace is not None:
            self._trace.came_from(fragment.worker)
        self._dropped.update(fragment.lost)
        self.wire.note_episodes(fragment)
        worker = fragment.worker
        late = worker in self._late and not part
        for dropped, cause in self._assembly.put(fragment, late=late):
            if late:
                self._permits.locked(self._pacing.drop_late, worker, dropped.rows)
            self._drop(dropped, cause)
            self._late.discard(worker)

    def _ready(self) -> Iterator[Chunk[Any]]:
        for fragment in self._assembly.ready():
            if (chunk := self._sign(fragment)) is not None:
                yield chunk

    def _pass_over(self, patience: float) -> list[Chunk[Any]]:
        """Stop waiting for workers that delay the next update with a step that takes longer than `patience` seconds."""
        ages = self.wire.step_ages()
        for worker, version in enumerate(self._pacing.announced()):
            if version != NO_VERSION and self._pacing.blocks(version) and ages[worker] > patience:
                self._revoke(worker, version)
        return list(self._ready())

    def _revoke(self, worker: int, version: int) -> None:
        part = self.wire.take_open(worker) if self._assembly.takes_parts else None
        if self._assembly.takes_parts and part is None:  # the worker has just closed it
            return
        if self._permits.revoke(worker, version, self.wire.produced(worker)):
            self._late.add(worker)
        if part is not None:
            self._put(part, part=True)

    def _sign(self, fragment: Fragment) -> Chunk[Any] | None:
        """Return the fragment as a chunk of its author; None if it has no steps."""
        worker = fragment.worker
        self.wire.note_delivered(fragment)
        self._unsigned[worker] += fragment.time
        if not len(fragment.data.valid):
            return None
        incarnation, sequence = self._signed[worker]
        if fragment.incarnation != incarnation:
            sequence = 0
        sequence += fragment.gap
        self._signed[worker] = (fragment.incarnation, sequence + 1)
        spent = self._unsigned[worker].copy()
        self._unsigned[worker] = 0
        origin = Origin(worker, fragment.incarnation, sequence, worker * self.wire.lanes)
        return Chunk(fragment.data, fragment.version, origin, fragment.episodes, fragment.state, spent, fragment.rows)

    def _drop(self, fragment: Fragment, cause: str) -> None:
        """Drop a fragment and count its rows; the sequence number shows the gap."""
        if self._recorder is not None:
            self._recorder.dropped(fragment.worker, fragment.data, cause)
        self.wire.note_delivered(fragment)
        self._unsigned[fragment.worker] += fragment.time
        if fragment.rows:
            self._dropped[cause] += fragment.rows
            incarnation, sequence = self._signed[fragment.worker]
            self._signed[fragment.worker] = (incarnation, sequence + 1)


class _CollectorTrack:
    """The collector in the timeline: how long it waits, and whose rows end the wait."""

    def __init__(self, trace: SpanRecording) -> None:
        self._trace, self._track = trace, trace.track("collector", "sync")

    def came_from(self, worker: int) -> None:
        self._trace.latest = self._number(worker)

    def waited(self, began: int, ended: int, worker: int | None) -> None:
        """Record a wait and the take after it. `worker`: the next update waits for it; None: any rows end the wait."""
        kind, party = "wait-data", self._trace.latest
        if worker is not None:
            kind, party = "wait-gate", self._number(worker)
        self._track.add(kind, began, ended, party)
        self._track.add("take", ended, time.perf_counter_ns())

    def _number(self, worker: int) -> int:
        return self._trace.number(f"worker {worker}", "envs")


class AsTheyCome:
    """Delivers every fragment as soon as it arrives, and drops late fragments. Implements Assembly."""

    takes_parts = gathers = True
    hurried = only_waited_for = False

    def __init__(self) -> None:
        self.waiting: list[Fragment] = []

    def put(self, fragment: Fragment, *, late: bool) -> Iterable[tuple[Fragment, str]]:
        if late:
            yield fragment, "stale"
        else:
            self.waiting.append(fragment)

    def ready(self) -> Iterable[Fragment]:
        ready, self.waiting = self.waiting, []
        return ready

    @property
    def rows(self) -> int:
        return sum(fragment.rows for fragment in self.waiting)

    @property
    def oldest(self) -> int | None:
        return min((fragment.version for fragment in self.waiting), default=None)

    def wait(self, wire: Wire) -> None:
        """Do nothing."""
