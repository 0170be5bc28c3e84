"""The Ray actor runs the same worker as the local modes. Each call brings it a grant, and its reply is a fragment."""

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

INLINE = 64 << 10  # replies hold at most this many bytes of rows; larger ones go into the object store
#: Added to a ticket whose episode could not begin, to get a replacement that no other ticket equals.
APART = 2**32
COUNTS = (
    "steps",
    "lane",
    "out_of_space",
    "peak",
)  # columns of the heartbeats that are sent, one number for each worker
LANES = ("seed", "before", "begun")  # columns that are sent with one number for each env
AGAIN = 0.5  # seconds before a worker asks for questions again after an error
ALONE = 0  # the index of a worker in memory that it does not share


class Hello(NamedTuple):
    """Identifies the process of an actor."""

    pid: int
    host: str


class ActorHeartbeat(NamedTuple):
    """The state of a worker. Its counts cover all restarts and are empty until the envs exist."""

    call: int  # number of the present call
    phase: int
    age: float  # seconds since the present phase began
    counts: Sequence[int] = ()  # the values of COUNTS
    lanes: Sequence[Sequence[int]] = ()  # the values of LANES, one for each env


class Reply(NamedTuple):
    """The result of a call."""

    pulse: ActorHeartbeat
    reports: Sequence[str] = ()
    code: int = 0  # 0: the worker continues; otherwise the exit code that a worker process would have
    over: bool = False  # an episode has ended; the next episodes must begin before the worker writes more
    ended: bool = False  # see pacing.Tally
    fragment: Fragment | None = None  # has no `data` if that is in the object store
    stored: Any = None  # a reference to the fragment's data in the object store


@dataclass(frozen=True, kw_only=True)
class ActorSetup:
    """The settings of an actor and the state from which it starts."""

    worker: int
    incarnation: int
    lanes: range
    shape: Shape  # the channel of one worker
    pacing: Pacing  # decides how fragments end; has no cells
    weights: tuple[Mapping[str, tuple[int, ...]], tuple[int, int]]  # shapes for the Mailbox
    context: NDArray  # [K, C]
    steps: int  # steps before this start
    out_of_space: int
    begun: Sequence[int]  # episodes of each env that were begun before this start
    down_ns: int  # time since the previous actor died; 0: this is the first one
    ticket: int = NO_TICKET  # the first episode, in modes that assign episodes
    nice: int = 0
    inline: int = INLINE
    resume: Mapping[str, NDArray] | None = None


class WriteRequest(NamedTuple):
    """A grant with the number of the call that carries it."""

    number: int  # counts the worker's calls
    grant: Grant
    waited: int = -1  # why the worker has waited until now, as an index of WORKER_TIME; -1: it has not waited


class RayWorker:
    """The actor class. Its main thread runs the calls, and a second thread answers `pulse` and `take_open` during a call.

    Those questions come through a relay. The caller numbers its calls, so it does not mistake a late answer for one about the
    present call.
    """

    def __init__(self, board: Any, name: str) -> None:
        """board: a calls.QuestionRelay that passes on the questions to the worker of this name."""
        self._worker: Worker | None = None
        self._heartbeats: Heartbeats | None = None
        self._copying = threading.Lock()  # both `write` and `take_open` read fragments
        self._call = 0  # the present call
        self._closed = -1  # the last call whose fragment must be closed
        self._idle = 0  # time in ns at which the worker became idle
        self._sent = 0  # number of reports that were sent
        threading.Thread(target=self._answer, args=(board, name), name="freewheel-answers", daemon=True).start()

    def _answer(self, board: Any, name: str) -> None:
        """Answer questions. Ray restarts a relay that has died; the questions that it held are lost."""
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
        """Create the envs and begin their first episodes."""
        from threadpoolctl import threadpool_limits

        threadpool_limits(1, user_api="blas")
        os.nice(job.nice)
        multiprocessing.current_process().name = f"freewheel-worker-{job.worker}"  # the same name as in the local modes
        self._number = job.worker
        self._inline = job.inline
        self._pacing = private(job.pacing)
        self._mailbox = Mailbox(*job.weights)
        self._tickets = ReceivedTickets(job.pacing, job.ticket)
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
            unpacked(factory)  # reports what this node lacks
            self._worker = Worker(shared, WorkerId(job.worker, job.incarnation, job.lanes, ALONE))
            self._worker.begin()

        return self._reply(make)

    def write(self, order: WriteRequest, weights: Snapshot | None) -> Reply:
        """Act within a grant. `weights` are given if they are newer than those of the worker."""
        worker = self._begin_call(order.number)
        if order.waited >= 0:
            worker.waited(order.waited, self._idle)
        if weights is not None:
            self._mailbox.post(weights)
        reply = self._reply(lambda: worker.write(order.grant))
        ended = self._reader.settle(ALONE).ended  # closes the fragment of a worker that has failed
        with self._copying:
            fragment = self._reader.take(ALONE)._replace(worker=self._number) if self._reader.ready() else None
        stored = None
        if fragment is not None and _bytes(fragment.data) > self._inline:
            import ray

            fragment, stored = fragment._replace(data=None), ray.put(fragment.data)  # type: ignore[arg-type]
        return reply._replace(ended=ended, fragment=fragment, stored=stored)

    def begin_next(self, number: int, ticket: int) -> Reply:
        """Begin the next episodes. `ticket` selects the episode in modes that assign episodes."""
        worker = self._begin_call(number)
        self._tickets.give(ticket)
        return self._reply(worker.begin_next)

    def close(self) -> Reply:
        """Close the envs."""
        assert self._worker is not None, "call begin() first"
        return self._reply(self._worker.close)

    def _begin_call(self, number: int) -> Worker:
        assert self._worker is not None, "call begin() first"
        self._call = number
        if isinstance(self._pacing, CreditPacing):
            self._pacing.cells["revoked"][ALONE] = self._closed >= number
        return self._worker

    def _reply(self, work: Callable[[], None]) -> Reply:
        """Do this work and return the reply."""
        assert self._heartbeats is not None, "call begin() first"
        code = exit_code(work, self._heartbeats, ALONE)
        reports = tuple(self._heartbeats.reports(ALONE, self._sent))
        self._sent = int(self._heartbeats.memory["reported"][ALONE]) // 2
        self._idle = perf_counter_ns()
        return Reply(self.pulse(), reports, code, over=not code and self._worker is not None and self._worker.over)

    def pulse(self, close: int = -1) -> ActorHeartbeat:
        """Return the state of the worker. `close` is a call whose fragment shall end with the present step."""
        self._close(close)
        if self._heartbeats is None:
            return ActorHeartbeat(self._call, CONSTRUCT, 0.0)
        memory = self._heartbeats.memory
        phase, since = int(memory["phase"][ALONE]), int(memory["since"][ALONE])
        counts = [int(memory[name][ALONE]) for name in COUNTS]
        lanes = [memory[name][ALONE].tolist() for name in LANES]
        return ActorHeartbeat(self._call, phase, max(0.0, (monotonic_ns() - since) * 1e-9), counts, lanes)

    def take_open(self, call: int) -> tuple[ActorHeartbeat, Fragment | None]:
        """Return the finished rows of the fragment that this call writes, and end the fragment with the present step."""
        self._close(call)
        with self._copying:
            part = self._reader.take_open(ALONE) if self._call == call else None
        return self.pulse(), None if part is None else part._replace(worker=self._number)

    def _close(self, call: int) -> None:
        self._closed = max(self._closed, call)
        if self._closed >= self._call and self._worker is not None and isinstance(self._pacing, CreditPacing):
            self._pacing.cells["revoked"][ALONE] = 1


def private(pacing: Pacing) -> Pacing:
    """Return a copy of the pacing for a single worker, with cells that no other worker shares."""
    own = copy.copy(pacing)
    own.workers = 1
    own.attach({name: [0] * count for name, count in own.layout.items()})
    return own


class ReceivedTickets:
    """Tickets that arrive with calls. Implements pacing.episode_queue.TicketSource."""

    def __init__(self, pacing: Pacing, first: int) -> None:
        self._given = [first]
        self._last = NO_TICKET
        if isinstance(pacing, EpisodeQueue):
            self.order = pacing.order
            self.side_by_side = pacing.side_by_side

    def give(self, ticket: int) -> None:
        self._given = [ticket]

    def held(self, worker: int) -> int:
        return NO_TICKET

    def issue(self, worker: int) -> int:
        """Return the ticket of the call. If its episode could not begin, return further tickets that no other worker has."""
        self._last = self._given.pop() if self._given else self._last + APART
        return self._last


class _ActorPermits(Permits):
    """The permits of a worker whose grants arrive with calls."""

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
