"""The shared-memory wire: supervised worker processes, a ring of fragments for each, and one mailbox for the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from time import perf_counter_ns
from types import TracebackType
from typing import Protocol, Self, TypeVar

from freewheel.core import Snapshot
from freewheel.pacing.pacing import Pacing
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.timeline.recording import Doing
from freewheel.transport import forkserver
from freewheel.transport.shm.channel import SKIPS, Channel, Reader, Shape
from freewheel.transport.shm.memory import Mailbox, most_contexts, require_memory
from freewheel.transport.shm.permits import SharedPermits
from freewheel.transport.shm.rings import Rings, doing
from freewheel.transport.shm.supervisor import Supervisor
from freewheel.transport.shm.worker import WorkerId, WorkerResources, work
from freewheel.transport.wire import Fragment, WorkerRows
from freewheel.transport.workers.heartbeats import Heartbeats
from freewheel.transport.workers.wire import Size, SupervisedWire


class SharedMemoryWire(SupervisedWire):
    """Worker processes under a supervisor."""

    permits: SharedPermits

    def __init__(self, factory: RunnerFactory, spec: CollectSpec, pacing: Pacing, size: Size) -> None:
        super().__init__(factory, spec, pacing, size)
        self._modules, self._nice = spec.workers.modules, spec.workers.nice
        self._rings: Rings | None = None  # where workers write their timeline
        self._stopped = 0  # ns: when the workers were asked to end
        shape = Shape(
            replace(spec.env, lanes=self.lanes),
            size.workers,
            size.slots,
            size.steps,
            spec.context.shape[1],
            self.state_size,
            pacing.ticket_columns,
            SKIPS if spec.recorder is not None and size.drop_oldest else 0,
        )
        with ExitStack() as undo:
            require_memory(shape.size, f"a queue of {size.workers} x {size.slots} fragments")
            self._factory = forkserver.pickled(factory, "the environment")
            self.permits = _kept(undo, SharedPermits(pacing, size.workers))
            self.channel = _kept(undo, Channel(shape, drop_oldest=size.drop_oldest))
            self.mailbox = _kept(undo, Mailbox(spec.weights, most_contexts(spec.context)))
            heartbeats = _kept(undo, Heartbeats(size.workers, self.lanes, spec.env.name))
            if spec.trace is not None:
                self._rings = _kept(undo, Rings(size.workers))
            self._lifeline = _kept(undo, forkserver.Lifeline())
            self._resources = undo.pop_all()
        self.reader = _kept(self._resources, Reader(self.channel))
        locks = [lock for lock in (self.permits.lock, self.channel.overflow) if lock is not None]
        timeouts = spec.workers.timeouts
        self.supervisor = Supervisor(size.workers, heartbeats, timeouts, self._spawn, self._settle, locks)
        self._watch_over(self.supervisor, self.channel.memory["time"])

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
        super().post(snapshot)

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

    def account(self, worker: int) -> WorkerRows:
        return self.reader.account(worker)

    @property
    def overflowed(self) -> int:
        return self.reader.overflowed

    def waiting(self) -> int:
        return int((self.channel.memory["committed"] - self.channel.memory["taken"]).sum())

    def _spawn(self, worker: int, incarnation: int) -> ForkServerProcess:
        first = worker * self.lanes
        who = WorkerId(worker, incarnation, range(first, first + self.lanes), place=worker)
        port, (_, context) = self.channel.ports[worker], self._newest
        self._record_start(worker, incarnation)
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
        """End the workers. Waiting ones are woken, so that they notice the end."""
        self._stopped = perf_counter_ns()
        self.heartbeats.stop()
        self.permits.wakeups.notify(range(self.authors))
        for port in self.channel.ports:
            port.slot_freed.notify()
        self.supervisor.stop()

    def _settle_all(self) -> None:
        if self._trace is not None and self._rings is not None:
            self._trace.detach(self._rings.by_name(), self._doing)
        for worker in range(self.authors):
            self.reader.settle(worker)


class _Closable(Protocol):
    def close(self) -> None: ...


Part = TypeVar("Part", bound=_Closable)


def _kept(stack: ExitStack, part: Part) -> Part:
    stack.callback(part.close)
    return part
