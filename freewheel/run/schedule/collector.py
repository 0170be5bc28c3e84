"""The collector of a replay: it replays all worker processes and delivers the recorded chunks to the learner."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np

from freewheel.core import WORKER_TIME, Chunk, Episode, NDArray, Origin, RowCounts, Snapshot
from freewheel.errors import FreewheelError
from freewheel.loop import Source
from freewheel.pacing.episode_queue import EpisodeOrder
from freewheel.rollout.factory import RunnerFactory
from freewheel.run.schedule.answers import Answers
from freewheel.run.schedule.log import Act, Author, Delivery, Drop, LogLine, Schedule, WorkerStart, checksums
from freewheel.run.schedule.worker import FragmentRequest, Performed, ReplayedWorker, WorkerBeginning, joined
from freewheel.transport.executors import ProcessExecutor, SerialExecutor, wait_for_any

LOOK = 0.2  # seconds between two polls of all processes during a wait for one of them


class DifferenceError(FreewheelError):
    """The replay differs from the recording."""


class _Player:
    """One worker process of the recorded run."""

    def __init__(self, author: Author, acts: int) -> None:
        self.author, self.left = author, acts  # fragments that the collector has not taken yet
        self.start: WorkerStart | None = None
        self.orders: deque[Act] = deque()  # fragments to play that wait for their version
        self.done: deque[Performed | FreewheelError] = deque()
        self.loaded: int | None = None  # the version of its weights
        self.where: ProcessExecutor[FragmentRequest, Performed] | SerialExecutor | None = None
        self.end = ExitStack()

    def look(self) -> None:
        while self.where is not None and (found := self.where.result()) is not None:
            self.done.append(found)


class ReplayCollector:
    """Replays all workers, which act before the learner asks if their versions exist. Implements loop.Source."""

    def __init__(
        self, schedule: Schedule, factory: RunnerFactory, lanes: int, context: NDArray, order: EpisodeOrder | None
    ) -> None:
        """lanes: of each worker; context: the first table; order: of episodes, if workers are issued tickets."""
        self.inline = False
        self.modules: Sequence[str] = ()
        self.fragments = 0  # replayed and found equal
        self._factory, self._lanes, self._order = factory, lanes, order
        self._loads = schedule.outline.loads.copy()
        self._players = {author: _Player(author, acts) for author, acts in schedule.outline.acts.items()}
        self._playing: dict[Author, _Player] = {}
        self._snapshots: dict[int, Snapshot] = {}  # snapshots that workers still have to load
        self._contexts = [(-1, context)]  # (version with which it was published, table)
        self._waiting: dict[int, list[tuple[Act, Performed]]] = {}  # by worker: fragments not delivered yet
        self._produced, self._dropped = 0, Counter[str]()
        self.answers = Answers(schedule, self._foresee)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for player in self._playing.values():
            player.end.close()

    def publish(self, snapshot: Snapshot, done: int) -> None:
        if snapshot.context is not self._contexts[-1][1]:
            self._contexts.append((snapshot.version, snapshot.context))
        if self._loads[snapshot.version]:
            self._snapshots[snapshot.version] = snapshot
            for player in self._players.values():
                self._give_orders(player)

    def collect(self, wait: bool) -> Sequence[Chunk[Any]]:
        line = self.answers.collect()
        if line is None:
            return ()
        for player in self._playing.values():
            player.look()
        for event in line.events:
            if isinstance(event, Act):
                self._take(event)
            else:
                self._drop(event)
        return [self._deliver(one) for one in line.deliveries or ()]

    def oldest(self) -> int | None:
        return self.answers.oldest()

    def rows(self) -> RowCounts:
        """Return the counts of fragments taken so far; rows in flight at the end are not known."""
        queued = sum(done.rows for waiting in self._waiting.values() for _, done in waiting)
        return RowCounts(produced=self._produced, queued=queued, dropped=dict(self._dropped))

    def _foresee(self, line: LogLine) -> None:
        """Prepare for a line that will be needed soon."""
        for start in line.starts:
            if start.author in self._players:
                self._players[start.author].start = start
        for event in line.events:
            if isinstance(event, Act):
                player = self._players[event.author]
                player.orders.append(event)
                self._give_orders(player)

    def _give_orders(self, player: _Player) -> None:
        """Submit the fragments whose versions exist."""
        while player.orders:
            version = player.orders[0].version
            if version != player.loaded and version not in self._snapshots:
                return
            if player.where is None:
                self._begin(player)
            assert player.where is not None, "set by _begin"
            snapshot = None if version == player.loaded else self._snapshots[version]
            player.where.submit(FragmentRequest(player.orders.popleft(), snapshot))
            if snapshot is not None:
                player.loaded = version
                self._loads[version] -= 1
                if not self._loads[version]:
                    del self._snapshots[version]

    def _begin(self, player: _Player) -> None:
        worker, incarnation = player.author
        if player.start is None or len(player.start.first) != self._lanes:
            raise DifferenceError(
                f"the schedule is damaged: it does not say how process {incarnation} of worker {worker} began"
            )
        begun = player.start.version
        context = next(table for version, table in reversed(self._contexts) if version <= begun)
        lanes = range(worker * self._lanes, (worker + 1) * self._lanes)
        part = WorkerBeginning(worker, incarnation, lanes, player.start.first, context, self._order)
        build = partial(ReplayedWorker, self._factory, part)
        if self.inline:
            here = build()
            player.where = SerialExecutor(lambda: here, "worker")
            player.end.callback(here.close)
        else:
            where = ProcessExecutor[FragmentRequest, Performed](build, f"worker {worker}", nice=0, modules=self.modules)
            player.where = player.end.enter_context(where)
        self._playing[player.author] = player

    def _take(self, act: Act) -> None:
        """Take the worker's next fragment and compare it with the recorded one."""
        (worker, incarnation), player = act.author, self._players[act.author]
        who = f"worker {worker}" + (f" (process {incarnation + 1})" if incarnation else "")
        if player.orders and player.orders[0] is act:
            raise DifferenceError(f"{who} acted with version {act.version}, which does not exist at this point")
        while not player.done:
            if isinstance(player.where, ProcessExecutor):
                others = [one.where for one in self._playing.values() if isinstance(one.where, ProcessExecutor)]
                wait_for_any(others, LOOK)
            for one in self._playing.values():
                one.look()
        done = player.done.popleft()
        if isinstance(done, FreewheelError):
            raise DifferenceError(f"{who}: {done}") from done
        if done.difference:
            raise DifferenceError(f"{who}: {done.difference}")
        player.left -= 1
        if not player.left:
            player.end.close()
            del self._playing[player.author]
        self.fragments += 1
        self._produced += done.rows + done.lost.total()
        self._dropped.update(done.lost)
        if act.sums is None:
            self._dropped["overflow"] += done.rows
        else:
            self._waiting.setdefault(worker, []).append((act, done))

    def _drop(self, drop: Drop) -> None:
        waiting = self._waiting.get(drop.worker, [])
        if drop.place >= len(waiting):
            raise DifferenceError(
                f"the schedule is damaged: worker {drop.worker} has no fragment that could be dropped"
            )
        _, done = waiting.pop(drop.place)
        self._dropped[drop.cause] += done.rows

    def _deliver(self, delivery: Delivery) -> Chunk[Any]:
        waiting = self._waiting.get(delivery.worker, [])
        parts, waiting[: delivery.parts] = waiting[: delivery.parts], []
        if not 0 < len(parts) == delivery.parts:
            raise DifferenceError(f"the schedule is damaged: worker {delivery.worker} has nothing to deliver")
        act, done = parts[0][0], [one for _, one in parts]
        origin = Origin(*act.author, delivery.sequence, delivery.worker * self._lanes)
        episodes, time = self._named(done[-1].episodes), np.zeros(len(WORKER_TIME), np.int64)
        return Chunk(joined(done), act.version, origin, episodes, done[0].state, time, sum(one.rows for one in done))

    def _named(self, episodes: tuple[Episode, ...]) -> tuple[Episode, ...]:
        """Return the episodes with lane and number in place of the ticket."""
        if self._order is None:
            return episodes
        places = [(one, *self._order.episode(one.number)) for one in episodes]
        return tuple(replace(one, lane=lane, number=number) for one, lane, number in places)


class ComparedCollector:
    """Compares the chunks of a collector that acts in this process and therefore repeats without recorded answers.
    Implements loop.Source."""

    def __init__(self, collector: Source, answers: Answers) -> None:
        self._collector, self._answers = collector, answers
        self._steps = 0  # of each lane

    def publish(self, snapshot: Snapshot, done: int) -> None:
        self._collector.publish(snapshot, done)

    def collect(self, wait: bool) -> Sequence[Chunk[Any]]:
        line = self._answers.collect()
        if line is None:
            return ()
        chunks = self._collector.collect(wait=True)
        found = [(len(chunk.data.valid), checksums(chunk.data)) for chunk in chunks]
        end = self._steps + sum(steps for steps, _ in line.chunks)
        if found != list(line.chunks):
            where = f"within steps {self._steps + 1} to {end} of each lane"
            raise DifferenceError(f"the environments or the weights differ from the recorded ones {where}")
        self._steps = end
        return chunks

    def oldest(self) -> int | None:
        return self._answers.oldest()
