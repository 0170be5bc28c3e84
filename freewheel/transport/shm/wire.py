"""The shared-memory wire: supervised worker processes, a ring of fragments for each, and one mailbox for the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerProcess
from time import perf_counter_ns
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from freewheel.core import MOST_CONTEXTS, NDArray, RowCounts, Snapshot
from freewheel.errors import EnvError
from freewheel.metrics.workers import WorkerState
from freewheel.pacing.pacing import NO_VERSION, Pacing
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.rollout.runner import Author
from freewheel.seeding import Position
from freewheel.timeline.recording import Doing
from freewheel.transport import forkserver
from freewheel.transport.shm.channel import SKIPS, Channel, Reader, Shape
from freewheel.transport.shm.heartbeats import Heartbeats, Stragglers, kind
from freewheel.transport.shm.memory import NEVER, Mailbox, require_memory
from freewheel.transport.shm.permits import SharedPermits
from freewheel.transport.shm.progress import Progress
from freewheel.transport.shm.rings import Rings, doing
from freewheel.transport.shm.states import worker_states
from freewheel.transport.shm.worker import WorkerId, WorkerResources, work
from freewheel.transport.supervisor import Supervisor
from freewheel.transport.wire import Fragment, Wire

TABLES = 64  # of contexts that are kept: where each episode's came from is found by the version that it began under


@dataclass(frozen=True, kw_only=True)
class Size:
    """How many workers, and the size of their queues."""

    workers: int
    slots: int  # fragments of each worker that may wait
    steps: int  # of a fragment at most
    drop_oldest: bool = False  # a full ring drops its oldest fragment


class SharedMemoryWire(Wire):
    """Worker processes under a supervisor."""

    permits: SharedPermits

    def __init__(self, factory: RunnerFactory, spec: CollectSpec, pacing: Pacing, size: Size) -> None:
        self.authors, self.lanes, self.slots = size.workers, spec.env.lanes // size.workers, size.slots
        self._modules, self._nice = spec.workers.modules, spec.workers.nice
        self._newest = NO_VERSION, spec.context  # version and contexts posted last
        self._recorder, self._trace = spec.recorder, spec.trace
        self._rings: Rings | None = None  # where workers write their timeline
        self._stopped = 0  # ns, when they were told to end
        actor = factory.actor()
        shape = Shape(
            replace(spec.env, lanes=self.lanes),
            size.workers,
            size.slots,
            size.steps,
            spec.context.shape[1],
            actor.state_size,
            pacing.ticket_columns,
            SKIPS if spec.recorder is not None and size.drop_oldest else 0,
        )
        with ExitStack() as undo:
            require_memory(shape.size, f"a queue of {size.workers} x {size.slots} fragments")
            self._factory = forkserver.pickled(factory, "the environment")
            self.permits = _kept(undo, SharedPermits(pacing, size.workers))
            self.channel = _kept(undo, Channel(shape, drop_oldest=size.drop_oldest))
            rows, columns = spec.context.shape
            self.mailbox = _kept(undo, Mailbox(spec.weights, (max(rows, MOST_CONTEXTS) if rows else 0, columns)))
            self.heartbeats = _kept(undo, Heartbeats(size.workers, self.lanes, spec.env.name))
            if spec.trace is not None:
                self._rings = _kept(undo, Rings(size.workers))
            self._lifeline = _kept(undo, forkserver.Lifeline())
            self._resources = undo.pop_all()
        self.reader = Reader(self.channel)
        locks = [lock for lock in (self.permits.lock, self.channel.overflow) if lock is not None]
        timeouts = spec.workers.timeouts
        self.supervisor = Supervisor(size.workers, self.heartbeats, timeouts, self._spawn, self._settle, locks)
        self.stragglers = Stragglers(self.heartbeats, self.channel.memory["time"])
        self._losses_shown, self._reports_shown = 0, [0] * size.workers  # reports: of each worker
        self._reported: set[str] = set()
        self._progress = [
            Progress(
                self.lanes,
                actor.state_size,
                Position(Author(factory.seed, range(0), worker=worker).rng().bit_generator.state).packed(),
                spec.context,
                workers=size.workers,
            )
            for worker in range(size.workers if pacing.own_episodes else 0)
        ]
        self._tables = {NEVER: spec.context}  # contexts by the first version that was posted with them
        self._resume: dict[int, dict[str, NDArray]] = {}  # by worker: where it begins
        self._final: _FinalState | None = None

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.push(self)
            forkserver.prepare(self._modules)
            self._resources.callback(self._close_accounts)
            if self._trace is not None and self._rings is not None:
                self._trace.attach(self._rings.by_name(), "envs", self._doing)
            self._resources.callback(self._stop)
            self.supervisor.start()
            undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._resources.close()

    def post(self, snapshot: Snapshot) -> None:
        self.mailbox.post(snapshot)
        self._newest = snapshot.version, snapshot.context
        if snapshot.context is not self._tables[max(self._tables)]:
            self._tables = dict([*self._tables.items(), (snapshot.version, snapshot.context)][-TABLES:])

    def take(self) -> Iterator[Fragment]:
        committed, taken = self.channel.memory["committed"], self.channel.memory["taken"]
        for worker in self.reader.ready():
            end = int(committed[worker])
            while taken[worker] < end:  # a full ring may increment `taken` too
                yield self.reader.take(worker)

    def take_open(self, worker: int) -> Fragment | None:
        return self.reader.take_open(worker)

    def queued_versions(self) -> list[int]:
        return self.reader.queued_versions()

    def wait(self, seconds: float) -> bool:
        closed = self.channel.wakeup.wait(seconds)
        if not closed:
            self._check()
        return closed

    def _check(self) -> None:
        if self.supervisor.error is not None:
            raise self.supervisor.error
        if self.supervisor.given_up == self.authors:
            last = self.supervisor.losses[-1]
            raise EnvError(f"every worker was given up, the last one because it {last.reason}\n{last.report}".rstrip())

    def produced(self, worker: int) -> int:
        return self.reader.account(worker).produced

    @property
    def overflowed(self) -> int:
        return self.reader.overflowed

    def rows(self) -> RowCounts:
        if self._final is not None:
            return self._final.rows
        accounts = [self.reader.account(worker) for worker in range(self.authors)]
        produced, queued, opened = (sum(column) for column in zip(*accounts, strict=True))
        overflow = {"overflow": self.overflowed} if self.overflowed else {}
        return RowCounts(produced=produced, queued=queued, open=opened, dropped=overflow)

    def step_ages(self) -> NDArray:
        return self.heartbeats.age()

    def mean_step(self) -> float:
        return self.stragglers.mean_step()

    def note_episodes(self, fragment: Fragment) -> None:
        self.stragglers.take(fragment.worker, fragment.episodes)

    def note_delivered(self, fragment: Fragment) -> None:
        if self._progress:
            known = max((version for version in self._tables if version <= fragment.version), default=min(self._tables))
            self._progress[fragment.worker].add(fragment, self._tables[known])

    def stats(self) -> Mapping[str, float | None]:
        memory, shape = self.channel.memory, self.channel.shape
        waiting = int((memory["committed"] - memory["taken"]).sum())
        slots = min(self.permits.pacing.slots or shape.slots, shape.slots)
        used = min(waiting / (shape.workers * slots), 1.0)
        return {"queue_util": used, "queue/fragments": float(waiting), "queue/slots": float(slots)}

    def workers(self) -> list[WorkerState]:
        return [] if self._final is not None else worker_states(self.heartbeats, self.supervisor, self.lanes)

    def messages(self) -> list[str]:
        """Losses of workers, reports of environments, and stragglers, each once."""
        if self._final is not None:
            return self._final.messages()
        losses, self._losses_shown = self.supervisor.losses[self._losses_shown :], len(self.supervisor.losses)
        self._reported.update(kind(loss.report) for loss in losses)
        reports = []
        for worker, since in enumerate(self._reports_shown):
            for report in self.heartbeats.reports(worker, since):
                self._reports_shown[worker] += 1
                if (about := kind(report)) not in self._reported:
                    self._reported.add(about)
                    reports.append(report)
        return [*map(str, losses), *reports, *self.stragglers.slow()]

    def summary(self) -> Mapping[str, Any]:
        return self._final.summary if self._final is not None else {
            "worker_restarts": self.supervisor.restarts,
            "workers_lost": self.supervisor.given_up,
            "out_of_space": int(self.heartbeats.memory["out_of_space"].sum()),
            "episodes_produced": self.stragglers.produced(),
            "workers": self.stragglers.table(),
        }  # fmt: skip

    def state(self) -> dict[str, NDArray]:
        """Where each worker's lanes are, by what was delivered, and the next incarnation number."""
        state = {"incarnation": np.array([1 + max(slot.incarnation for slot in self.supervisor.slots)])}
        for worker, progress in enumerate(self._progress):
            state |= {f"{worker}.{name}": np.asarray(value) for name, value in progress.state().items()}
        return state

    def restore(self, state: Mapping[str, NDArray]) -> None:
        for slot in self.supervisor.slots:
            slot.incarnation = int(state["incarnation"][0]) - 1
        for worker, progress in enumerate(self._progress):
            own = f"{worker}."
            found = {name.removeprefix(own): value for name, value in state.items() if name.startswith(own)}
            progress.restore(found)
            self._resume[worker] = found
            # Where the worker dies before it is back, another one begins the episodes after these.
            self.heartbeats.memory["begun"][worker] = progress.numbers + progress.under_way

    def _spawn(self, worker: int, incarnation: int) -> ForkServerProcess:
        first = worker * self.lanes
        who = WorkerId(worker, incarnation, range(first, first + self.lanes))
        port, (version, context) = self.channel.ports[worker], self._newest
        if self._recorder is not None:
            self._recorder.started(worker, incarnation, self.heartbeats.memory["begun"][worker].tolist(), version)
        shared = WorkerResources(
            self._factory,
            port,
            self.mailbox,
            self.heartbeats,
            self.permits,
            context,
            self._nice,
            self._resume.pop(worker, None),
            self._rings,
        )
        return self._lifeline.process(work, shared, who, name=f"freewheel-worker-{worker}")

    def _doing(self) -> Doing:
        alive = [slot.process is not None for slot in self.supervisor.slots]
        return doing(self.heartbeats, alive, self._stopped or perf_counter_ns())

    def _settle(self, worker: int, for_good: bool) -> None:
        self.permits.settle(worker, self.reader.settle(worker), for_good=for_good)
        self.channel.wakeup.notify()

    def _stop(self) -> None:
        """Wake waiting workers, so that they notice the end."""
        self._stopped = perf_counter_ns()
        self.heartbeats.stop()
        self.permits.wakeups.notify(range(self.authors))
        for port in self.channel.ports:
            port.slot_freed.notify()
        self.supervisor.stop()

    def _close_accounts(self) -> None:
        """Keep the final counts and reports of the workers, because their shared memory is about to be freed."""
        if self._trace is not None and self._rings is not None:
            self._trace.detach(self._rings.by_name(), self._doing)
        for worker in range(self.authors):
            self.reader.settle(worker)
        rows = self.rows()
        for fragment in self.take():  # nobody learns from their rows, but their episodes were played
            self.note_episodes(fragment)
        self._final = _FinalState(rows, self.summary(), self.messages())


@dataclass
class _FinalState:
    """The final counts and reports of the workers."""

    rows: RowCounts
    summary: Mapping[str, Any]
    unread: list[str]

    def messages(self) -> list[str]:
        unread, self.unread = self.unread, []
        return unread


class _Closable(Protocol):
    def close(self) -> None: ...


Part = TypeVar("Part", bound=_Closable)


def _kept(stack: ExitStack, part: Part) -> Part:
    stack.callback(part.close)
    return part
