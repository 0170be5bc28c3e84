"""WorkerPool: workers, their channel, their mail and their supervisor as one thing that the worker modes collect from."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerProcess
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import cloudpickle  # type: ignore[import-untyped]
import numpy as np

from freewheel.core import Chunk, Origin, RowCounts, Snapshot
from freewheel.errors import EnvError, SetupError
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.transport import forkserver
from freewheel.transport.shm.channel import Channel, Fragment, Reader, Shape, Tally
from freewheel.transport.shm.heartbeats import Heartbeats, kind
from freewheel.transport.shm.lock import ProcessLock
from freewheel.transport.shm.mailbox import Mailbox
from freewheel.transport.shm.memory import require_room
from freewheel.transport.shm.worker import Permits, Post, WorkerResources, work
from freewheel.transport.stragglers import Stragglers
from freewheel.transport.supervisor import Supervisor

LOOK = 0.1  # seconds between two looks at the workers while the learner waits
SHORTEST_PATIENCE = 0.05  # seconds: a worker may lose the processor for a while, whatever its steps take
GATHER = 0.02  # of the time that a batch takes: so long fragments are gathered for, once there is one ...
LONGEST_GATHER = 0.02  # ... or so many seconds


class Pacing(Permits, Protocol):
    """The learner's side of a mode's permits."""

    @property
    def lock(self) -> ProcessLock | None: ...
    def settle(self, worker: int, tally: Tally, *, for_good: bool) -> None: ...  # it died, having come so far
    def close(self) -> None: ...


@dataclass(frozen=True)
class Size:
    """How many workers, and what each can hold."""

    workers: int
    slots: int  # fragments a worker may have waiting
    steps: int  # of a fragment at most
    drop_oldest: bool = False


class WorkerPool:
    """Leaving the `with` block leaves nothing running."""

    def __init__(self, recipe: RunnerFactory, spec: CollectSpec, pacing: Pacing, size: Size) -> None:
        self.workers, self._pacing, self._modules = size.workers, pacing, spec.workers.modules
        self._waiting, self._batch_steps = spec.while_waiting, spec.batch.steps
        self._each = spec.env.lanes // size.workers
        self._context = spec.context  # the newest that was posted
        each = replace(spec.env, lanes=self._each)
        shape = Shape(each, size.workers, size.slots, size.steps, spec.context.shape[1])
        with ExitStack() as undo:
            undo.callback(pacing.close)
            require_room(shape.size, f"a queue of {size.workers} x {size.slots} fragments")
            self._recipe = _pickled(recipe)
            self.channel = _kept(undo, Channel(shape, drop_oldest=size.drop_oldest))
            self.mailbox = _kept(undo, Mailbox(spec.weights, spec.context.shape))
            self.heartbeats = _kept(undo, Heartbeats(size.workers, self._each))
            self._lifeline = _kept(undo, forkserver.Lifeline())
            self._resources = undo.pop_all()
        self.reader = Reader(self.channel)
        locks = [lock for lock in (pacing.lock, self.channel.overflow) if lock is not None]
        self.crew = Supervisor(size.workers, self.heartbeats, spec.workers.timeouts, self._spawn, self._settle, locks)
        self.stragglers = Stragglers(self.heartbeats, self.channel.memory["time"])
        self.dropped: Counter[str] = Counter()
        self._signed = [(0, 0)] * size.workers  # incarnation and next sequence
        self._unsigned = np.zeros_like(self.channel.memory["time"])  # time of fragments without rows
        self._last_rows: RowCounts | None = None
        self._last_report: Mapping[str, Any] = {}
        self._last_news: list[str] = []
        self._told, self._heard = 0, [0] * size.workers  # losses, and what each worker said
        self._complaints: set[str] = set()  # that were told
        self._no_state = np.zeros((self._each, 0), np.float32)

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.push(self)
            forkserver.prepare(self._modules)
            self._resources.callback(self._close_the_books)
            self._resources.callback(self._stop)
            self.crew.start()
            undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._resources.close()

    def post(self, snapshot: Snapshot) -> None:
        self.mailbox.post(snapshot)
        self._context = snapshot.context

    def wait(self, patience: float, *, hurried: bool) -> float:
        """Until something was committed, or it is time for a look around; raises when nobody is left to commit anything.

        Patience is in mean steps, and in seconds what comes back. In a hurry one looks around often enough to see it end; else
        fragments are gathered for a while once there is one, because being woken for each is dear.
        """
        mean = self.stragglers.mean_step()
        seconds = max(SHORTEST_PATIENCE, patience * mean) if mean else math.inf
        if self.listen(min(LOOK, seconds / 4) if hurried else LOOK) and not hurried:
            time.sleep(min(LONGEST_GATHER, GATHER * self._batch_steps * mean))
        return seconds

    def listen(self, seconds: float) -> bool:
        """Whether something was committed within this time."""
        self._waiting()
        heard = self.channel.wakeup.wait(seconds)
        if not heard:
            self.check()
        return heard

    def check(self) -> None:
        if self.crew.error is not None:
            raise self.crew.error
        if self.crew.given_up == self.workers:
            last = self.crew.losses[-1]
            raise EnvError(f"every worker was given up, the last one because it {last.reason}\n{last.report}".rstrip())

    def take(self) -> Iterator[Fragment]:
        """All fragments that are closed by now."""
        committed, taken = self.channel.memory["committed"], self.channel.memory["taken"]
        for worker in self.reader.ready():
            end = int(committed[worker])
            while taken[worker] < end:  # a full ring may move it too
                yield self.book(self.reader.take(worker))

    def book(self, fragment: Fragment) -> Fragment:
        self.dropped.update(fragment.lost)
        self.stragglers.take(fragment.worker, fragment.episodes)
        return fragment

    def sign(self, fragment: Fragment) -> Chunk | None:
        """The fragment as a chunk of its author; None if no step was taken in it."""
        worker = fragment.worker
        self._unsigned[worker] += fragment.time
        if not len(fragment.data.valid):
            return None
        incarnation, sequence = self._signed[worker]
        if fragment.incarnation != incarnation:
            sequence = 0
        sequence += fragment.gap
        self._signed[worker] = (fragment.incarnation, sequence + 1)
        time, self._unsigned[worker] = self._unsigned[worker].copy(), 0
        origin = Origin(worker, fragment.incarnation, sequence, worker * self._each)
        return Chunk(fragment.data, fragment.version, origin, fragment.episodes, self._no_state, time, fragment.rows)

    def drop(self, fragment: Fragment, cause: str) -> None:
        """Give a fragment up, counted; what comes after it does not follow from what came before."""
        self._unsigned[fragment.worker] += fragment.time
        if fragment.rows:
            self.dropped[cause] += fragment.rows
            incarnation, sequence = self._signed[fragment.worker]
            self._signed[fragment.worker] = (incarnation, sequence + 1)

    @property
    def done(self) -> int:
        """Rows dropped on this side."""
        return self.dropped.total() + self.reader.overflowed

    def _stop(self) -> None:
        """Whoever waits is woken to see that it is over."""
        self.heartbeats.stop()
        self._pacing.wakeups.notify(range(self.workers))
        for port in self.channel.ports:
            port.room.notify()
        self.crew.stop()

    def _close_the_books(self) -> None:
        """All workers have ended; what is known of them outlives their memory."""
        for worker in range(self.workers):
            self.reader.settle(worker)
        self._last_news = self.messages()
        self._last_report = self.summary()
        self._last_rows = self.rows()

    def rows(self) -> RowCounts:
        if self._last_rows is not None:
            return self._last_rows
        accounts = [self.reader.account(worker) for worker in range(self.workers)]
        produced, queued, opened = (sum(column) for column in zip(*accounts, strict=True))
        overflow = {"overflow": self.reader.overflowed} if self.reader.overflowed else {}
        return RowCounts(produced=produced, queued=queued, open=opened, dropped={**self.dropped, **overflow})

    def stats(self) -> Mapping[str, float | None]:
        memory, shape = self.channel.memory, self.channel.shape
        waiting = int((memory["committed"] - memory["taken"]).sum())
        return {"queue_util": waiting / (shape.workers * shape.slots), "queue/fragments": waiting}

    def messages(self) -> list[str]:
        """Deaths, complaints of envs, and stragglers, each once."""
        if self._last_rows is not None:
            news, self._last_news = self._last_news, []
            return news
        losses, self._told = self.crew.losses[self._told :], len(self.crew.losses)
        self._complaints.update(kind(loss.report) for loss in losses)
        complaints = []
        for worker, since in enumerate(self._heard):
            for report in self.heartbeats.heard(worker, since):
                self._heard[worker] += 1
                if (about := kind(report)) not in self._complaints:
                    self._complaints.add(about)
                    complaints.append(report)
        return [*map(str, losses), *complaints, *self.stragglers.slow()]

    def summary(self) -> Mapping[str, Any]:
        return self._last_report or {
            "worker_restarts": self.crew.restarts,
            "workers_lost": self.crew.given_up,
            "episodes_produced": self.stragglers.produced(),
            "workers": self.stragglers.table(),
        }

    def _spawn(self, worker: int, incarnation: int) -> ForkServerProcess:
        first = worker * self._each
        post = Post(worker, incarnation, range(first, first + self._each))
        desk = WorkerResources(
            self._recipe, self.channel.ports[worker], self.mailbox, self.heartbeats, self._pacing, self._context
        )
        return self._lifeline.process(work, desk, post, name=f"freewheel-worker-{worker}")

    def _settle(self, worker: int, for_good: bool) -> None:
        self._pacing.settle(worker, self.reader.settle(worker), for_good=for_good)
        self.channel.wakeup.notify()


def _pickled(recipe: RunnerFactory) -> bytes:
    try:
        blob: bytes = cloudpickle.dumps(recipe)
    except Exception as error:
        raise SetupError(
            f"the world cannot be sent to another process ({error}): pass an importable factory"
        ) from error
    return blob


class _Closable(Protocol):
    def close(self) -> None: ...


Part = TypeVar("Part", bound=_Closable)


def _kept(stack: ExitStack, part: Part) -> Part:
    stack.callback(part.close)
    return part
