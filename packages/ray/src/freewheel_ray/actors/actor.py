"""The Ray actor: a worker as in the local modes, in a process somewhere else. A call brings a grant, its answer is a fragment."""

from __future__ import annotations

import copy
import multiprocessing
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from time import monotonic_ns, perf_counter_ns
from typing import Any, NamedTuple

from freewheel.core import TRANSITION_FIELDS, NDArray, SeedStream, Snapshot, Transitions
from freewheel.pacing.episode_queue import EpisodeQueue, Tickets, TicketStream
from freewheel.pacing.pacing import NO_TICKET, CreditPacing, Grant, Pacing
from freewheel.transport.shm.channel import Channel, Reader, Shape
from freewheel.transport.shm.memory import Mailbox
from freewheel.transport.shm.worker import Worker, WorkerId, WorkerResources, exit_code
from freewheel.transport.wire import Fragment, Permits
from freewheel.transport.workers.heartbeats import CONSTRUCT, Heartbeats
from freewheel_ray.actors.code_shipping import unpacked

INLINE = 64 << 10  # bytes of rows that come with the answer; more of them go into the object store
#: Between a ticket and one in its place, where an episode could not begin: no other ticket has that number.
APART = 2**32
COUNTS = ("steps", "lane", "out_of_space", "peak")  # of heartbeats: what is sent of them, ...
LANES = ("seed", "before", "begun")  # ... also of each lane
AGAIN = 0.5  # seconds until a worker asks again for questions, where that failed
ALONE = 0  # the place of a worker that has its memory for itself


class Hello(NamedTuple):  # of a worker's process
    pid: int
    host: str


class ActorHeartbeat(NamedTuple):
    """A worker's heartbeat, over all incarnations; without counts where it has no envs yet."""

    call: int  # that is under way
    phase: int
    age: float  # seconds since it began what it does
    counts: Sequence[int] = ()  # COUNTS
    lanes: Sequence[Sequence[int]] = ()  # LANES, of each lane


class Reply(NamedTuple):
    """The end of a call."""

    pulse: ActorHeartbeat
    reports: Sequence[str] = ()
    code: int = 0  # 0: the worker goes on; else as the exit code of a worker process
    over: bool = False  # an episode has ended: the next ones must begin before more is written
    ended: bool = False  # see pacing.Tally
    fragment: Fragment | None = None  # without `data` if that is stored
    stored: Any = None  # a reference to its data in the object store


@dataclass(frozen=True, kw_only=True)
class ActorSetup:
    """What a worker is, and where it begins."""

    worker: int
    incarnation: int
    lanes: range
    shape: Shape  # of one worker's channel
    pacing: Pacing  # without its cells: how fragments end
    weights: tuple[Mapping[str, tuple[int, ...]], tuple[int, int]]  # for its Mailbox
    context: NDArray  # [K, C]
    steps: int  # of earlier incarnations, ...
    out_of_space: int
    begun: Sequence[int]  # ... and the episodes of each lane that they have begun
    down_ns: int  # since the last one died; 0: it is the first
    ticket: int = NO_TICKET  # the first episode, where they are issued
    nice: int = 0
    inline: int = INLINE
    resume: Mapping[str, NDArray] | None = None


class WriteRequest(NamedTuple):
    """A grant, as it is sent."""

    number: int  # counts the worker's calls
    grant: Grant
    waited: int = -1  # what it waited for until now, as an index of WORKER_TIME; -1: nothing


class RayWorker:
    """Calls run in the main thread; `pulse` and `take_open` are asked by way of a switchboard and answered meanwhile by another.

    Calls are numbered by whoever makes them, so that an answer which comes late is not taken for one about the present call.
    """

    def __init__(self, board: Any, name: str) -> None:
        """board: a calls.Switchboard, where questions to the worker of this name are asked."""
        self._worker: Worker | None = None
        self._heartbeats: Heartbeats | None = None
        self._copying = threading.Lock()  # both `write` and `take_open` read fragments
        self._call, self._closed = 0, -1  # the present call, and the last one whose fragment is to be closed
        self._idle = 0  # ns, since when it has nothing to do
        self._told = 0  # reports that were sent
        threading.Thread(target=self._answer, args=(board, name), name="freewheel-answers", daemon=True).start()

    def _answer(self, board: Any, name: str) -> None:
        """Answer questions. A switchboard that is gone comes back, without those that it had."""
        import ray

        methods: dict[str, Callable[[int], Any]] = {"pulse": self.pulse, "take_open": self.take_open}
        while True:
            try:
                number, method, argument = ray.get(board.question.remote(name))
                board.answer.remote(number, methods[method](argument))
            except ray.exceptions.RayError:
                time.sleep(AGAIN)

    def hello(self) -> Hello:
        return Hello(os.getpid(), platform.node())

    def begin(self, job: ActorSetup, factory: bytes) -> Reply:
        """Make the envs and begin their first episodes."""
        from threadpoolctl import threadpool_limits

        threadpool_limits(1, user_api="blas")
        os.nice(job.nice)
        multiprocessing.current_process().name = f"freewheel-worker-{job.worker}"  # as those of other wires
        self._number, self._inline, self._pacing = job.worker, job.inline, private(job.pacing)
        self._mailbox, self._tickets = Mailbox(*job.weights), ReceivedTickets(job.pacing, job.ticket)
        self._channel = Channel(job.shape)
        self._reader = Reader(self._channel)
        self._heartbeats = heartbeats = Heartbeats(1, job.shape.spec.lanes, job.shape.spec.name)
        heartbeats.enter(ALONE, CONSTRUCT)
        memory = heartbeats.memory
        memory["steps"][ALONE], memory["out_of_space"][ALONE] = job.steps, job.out_of_space
        memory["begun"][ALONE] = job.begun
        memory["died"][ALONE] = monotonic_ns() - job.down_ns if job.down_ns else 0
        port, permits = self._channel.ports[ALONE], _ActorPermits(self._pacing, self._tickets)
        shared = WorkerResources(factory, port, self._mailbox, heartbeats, permits, job.context, resume=job.resume)

        def make() -> None:
            unpacked(factory)  # tells what this node lacks
            self._worker = Worker(shared, WorkerId(job.worker, job.incarnation, job.lanes, ALONE))
            self._worker.begin()

        return self._reply(make)

    def write(self, order: WriteRequest, weights: Snapshot | None) -> Reply:
        """Act within a grant. weights: where they are newer than those it has."""
        worker = self._begin_call(order.number)
        if order.waited >= 0:
            worker.waited(order.waited, self._idle)
        if weights is not None:
            self._mailbox.post(weights)
        reply = self._reply(lambda: worker.write(order.grant))
        ended = self._reader.settle(ALONE).ended  # closes what it wrote before it failed
        with self._copying:
            fragment = self._reader.take(ALONE)._replace(worker=self._number) if self._reader.ready() else None
        stored = None
        if fragment is not None and _bytes(fragment.data) > self._inline:
            import ray

            fragment, stored = fragment._replace(data=None), ray.put(fragment.data)  # type: ignore[arg-type]
        return reply._replace(ended=ended, fragment=fragment, stored=stored)

    def begin_next(self, number: int, ticket: int) -> Reply:
        """Begin the next episodes; ticket: which, where they are issued."""
        worker = self._begin_call(number)
        self._tickets.give(ticket)
        return self._reply(worker.begin_next)

    def close(self) -> Reply:
        """Close the envs."""
        assert self._worker is not None, "begin() comes first"
        return self._reply(self._worker.close)

    def _begin_call(self, number: int) -> Worker:
        assert self._worker is not None, "begin() comes first"
        self._call = number
        if isinstance(self._pacing, CreditPacing):
            self._pacing.cells["revoked"][ALONE] = self._closed >= number
        return self._worker

    def _reply(self, work: Callable[[], None]) -> Reply:
        """After this work."""
        assert self._heartbeats is not None, "begin() comes first"
        code = exit_code(work, self._heartbeats, ALONE)
        reports = tuple(self._heartbeats.reports(ALONE, self._told))
        self._told = int(self._heartbeats.memory["reported"][ALONE]) // 2
        self._idle = perf_counter_ns()
        return Reply(self.pulse(), reports, code, over=not code and self._worker is not None and self._worker.over)

    def pulse(self, close: int = -1) -> ActorHeartbeat:
        """How it is. close: the fragment of this call ends with the present step."""
        self._close(close)
        if self._heartbeats is None:
            return ActorHeartbeat(self._call, CONSTRUCT, 0.0)
        memory = self._heartbeats.memory
        phase, since = int(memory["phase"][ALONE]), int(memory["since"][ALONE])
        counts = [int(memory[name][ALONE]) for name in COUNTS]
        lanes = [memory[name][ALONE].tolist() for name in LANES]
        return ActorHeartbeat(self._call, phase, max(0.0, (monotonic_ns() - since) * 1e-9), counts, lanes)

    def take_open(self, call: int) -> tuple[ActorHeartbeat, Fragment | None]:
        """The finished rows of the fragment that this call writes, which then ends with the present step."""
        self._close(call)
        with self._copying:
            part = self._reader.take_open(ALONE) if self._call == call else None
        return self.pulse(), None if part is None else part._replace(worker=self._number)

    def _close(self, call: int) -> None:
        self._closed = max(self._closed, call)
        if self._closed >= self._call and self._worker is not None and isinstance(self._pacing, CreditPacing):
            self._pacing.cells["revoked"][ALONE] = 1


def private(pacing: Pacing) -> Pacing:
    """The same pacing for one worker that has its cells for itself."""
    own = copy.copy(pacing)
    own.workers = 1
    own.attach({name: [0] * count for name, count in own.layout.items()})
    return own


class ReceivedTickets:
    """Tickets that come with calls. Implements pacing.episode_queue.TicketSource."""

    def __init__(self, pacing: Pacing, first: int) -> None:
        self._given = [first]
        self._last = NO_TICKET
        if isinstance(pacing, EpisodeQueue):
            self.order, self.side_by_side = pacing.order, pacing.side_by_side

    def give(self, ticket: int) -> None:
        self._given = [ticket]

    def held(self, worker: int) -> int:
        return NO_TICKET

    def issue(self, worker: int) -> int:
        """The one that was given; where its episode could not begin, others that nobody else has."""
        self._last = self._given.pop() if self._given else self._last + APART
        return self._last


class _ActorPermits(Permits):
    """Of a worker whose grants come with calls."""

    def __init__(self, pacing: Pacing, tickets: ReceivedTickets) -> None:
        super().__init__(pacing, nullcontext(), lambda _: None)
        self._tickets = tickets

    def streams(self, worker: int) -> Sequence[SeedStream]:
        if self.pacing.own_episodes:
            return ()
        tickets = Tickets(self._tickets, worker, self.locked)
        return [TicketStream(tickets, place) for place in range(self._tickets.side_by_side)]


def _bytes(data: Transitions) -> int:
    return sum(getattr(data, name).nbytes for name in TRANSITION_FIELDS)
