"""Supervise the Ray actors in one thread of the trainer. It takes each answer when it arrives and sends the actor's next call."""

from __future__ import annotations

import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

from freewheel.core import WORKER_TIME, NDArray
from freewheel.errors import SetupError
from freewheel.pacing.episode_queue import EpisodeQueue
from freewheel.pacing.pacing import KEEP, NO_TICKET, NO_VERSION, Pacing
from freewheel.transport.clock import Limit, clock
from freewheel.transport.shm.memory import NEVER
from freewheel.transport.wire import Fragment, Permits
from freewheel.transport.workers.heartbeats import CONSTRUCT, NO_LANES_LEFT, RESET, STEP
from freewheel.transport.workers.worker_slots import WorkerSlot, WorkerSlots
from freewheel_ray.actors.actor import COUNTS, LANES, ActorHeartbeat, ActorSetup, Hello, Reply, WriteRequest
from freewheel_ray.actors.calls import CallFailure, Ref
from freewheel_ray.actors.driver import Driver
from freewheel_ray.actors.queue import FragmentQueue, PendingFragment

TICK = 0.02  # longest delay in seconds before a worker that was woken gets its next call
LOOK = 0.2  # seconds between two checks for late workers
PULSE = 0.5  # shortest time in seconds between two questions to a late worker
PULSE_EACH = 0.01  # the same, for each worker of the run; the larger time counts
HURRY = 0.02  # seconds between two questions to a worker that the learner waits for
LATE = 1.5  # a call is late if it lasts this many times the mean duration of its steps
SILENT = 1.0  # a worker that does not answer a question for this many seconds is stuck
GRACE = 1.0  # seconds that workers have to end before they are killed
ASKED = ("pulse", "take_open")  # questions that a worker answers during a call
WAIT_CREDIT, WAIT_SLOT, WAIT_GATE = (WORKER_TIME.index(kind) for kind in ("wait-credit", "wait-slot", "wait-gate"))


@dataclass(eq=False)
class RemoteWorker:
    """The supervisor's record of one actor."""

    slot: WorkerSlot[RemoteWorker]
    actor: Any
    pid: int | None = None  # known if the actor runs on this machine
    number: int = 0  # number of the last call
    task: str = ""  # the present call: hello, begin, write or begin_next; empty: none
    sent: float = 0.0  # when the call was sent
    steps: int = 0  # steps of the grant in the call
    loaded: int = NEVER  # version of the weights that the actor has
    wait: int = -1  # why the actor waits while it has no call
    idle: int = 0  # time in ns at which this wait began
    asked: float = 0.0  # when the actor was asked for its state; 0: it has answered
    heard: float = 0.0  # when it last answered
    age: float = 0.0  # seconds that its step had lasted at that time
    closing: int = -1  # the call whose fragment the actor was asked to close
    part: float = 0.0  # when it was asked for the finished rows of its open fragment; 0: no such question is open
    wants_part: bool = False
    after_part: Reply | None = None  # the reply to the call, if it has arrived before that answer


class PendingAnswer(NamedTuple):
    """An answer or rows that have not arrived yet."""

    what: str
    process: RemoteWorker
    rows: PendingFragment | None = None


@dataclass
class ActorSupervisor(WorkerSlots[RemoteWorker]):
    """Runs workers as Ray actors. It never blocks on a single actor."""

    queue: FragmentQueue
    pacing: Pacing
    job: Callable[[int, int, int], ActorSetup]  # takes the worker, its incarnation and its ticket
    room: int  # how many fragments of each worker may wait for the learner
    mean_step: Callable[[], float] = lambda: 0.0
    fragments_lost: int = 0
    weights: tuple[int, Ref | None] = (NEVER, None)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.times = np.zeros((self.count, len(WORKER_TIME)), np.int64)
        self.permits = Permits(self.pacing, threading.RLock(), self.wake)
        self._flying: dict[Ref, PendingAnswer] = {}
        self._woken: deque[int] = deque()
        self._ring = threading.Event()
        self._held = ExitStack()
        self.there = threading.Event()  # set when the first actor has answered, so the cluster works
        self._looked = self._hurried = 0.0
        self._thread = threading.Thread(target=self._run, name="freewheel-ray", daemon=True)

    def start(self, calls: Driver, factory: bytes) -> None:
        self._calls = calls
        self._factory = calls.put(factory)
        self._held.enter_context(clock)
        self._thread.start()

    def wake(self, workers: Iterable[int]) -> None:
        """Let these workers try to continue."""
        self._woken.extend(workers)
        self._ring.set()

    def stop(self) -> None:
        """End all actors. Rows that have arrived in time are counted."""
        self.heartbeats.stop()
        self._ring.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.queue.lose_the_rest()
        self._held.close()

    def step_ages(self) -> NDArray:
        """Return [W] seconds that each worker's present step has lasted at least."""
        return np.array([_age(slot.process) for slot in self.slots])

    def take_part(self, worker: int) -> Fragment | None:
        """Return the finished rows of an open fragment, or None if they are not here yet or there is no such fragment."""
        process = self.slots[worker].process
        if process is None or process.task != "write":
            return None
        if (part := self.queue.take_part(worker)) is None and not process.part:
            process.wants_part = True
            self._ring.set()
        return part

    def _run(self) -> None:
        try:
            for slot in self.slots:
                self._start(slot)
            while not self.heartbeats.stopping:
                self._turn()
            self._end()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread of the learner
            self.error = error

    def _turn(self) -> None:
        if self._flying:
            for ref in self._calls.wait(list(self._flying), TICK):
                self._landed(ref)
        else:
            self._ring.wait(LOOK)
        self._ring.clear()
        for _ in range(len(self._woken)):
            if (process := self.slots[self._woken.popleft()].process) is not None:
                self._go_on(process)
        self._hurry()
        if (now := time.monotonic()) > self._looked + LOOK:
            self._looked = now
            self._look(now)

    def _start(self, slot: WorkerSlot[RemoteWorker]) -> None:
        self.begin(slot)
        slot.process = RemoteWorker(slot, self._calls.start(slot.worker))
        slot.pending = True
        self._send(slot.process, "hello")

    def _send(self, process: RemoteWorker, task: str, *arguments: Any) -> None:
        process.task = task
        process.sent = time.monotonic()
        process.age = 0.0
        process.wait = -1
        self._flying[self._calls.call(process.actor, task, *arguments)] = PendingAnswer(task, process)

    def _landed(self, ref: Ref) -> None:
        what, process, rows = self._flying.pop(ref)
        answer, slot = self._calls.get(ref), process.slot
        if rows is not None:
            self.queue.arrived(rows, None if isinstance(answer, CallFailure) else answer)
        if slot.process is not process:  # the actor has been replaced
            return
        if what in ASKED and (answer is None or isinstance(answer, CallFailure)):
            process.asked = process.part = (
                0.0  # the answer is lost; the reply to the call will show whether the worker lives
            )
            self._end_after_part(process)
        elif isinstance(answer, CallFailure):
            # If no actor has ever become ready, a new one will not become ready either.
            if what == "begin" and answer.report and not self.heartbeats.memory["ready"].any():
                why = answer.report.splitlines()[-1]
                raise SetupError(f"the environment cannot be loaded in a Ray actor ({why})")
            self._lose(process, answer)
        elif isinstance(answer, Hello):
            self.there.set()
            slot.pending = False
            process.pid = answer.pid if answer.host == platform.node() else None
            self.heartbeats.enter(slot.worker, CONSTRUCT)
            job = self.job(slot.worker, slot.incarnation, self._ticket(slot.worker))
            self._send(process, "begin", job, self._factory)
        elif isinstance(answer, ActorHeartbeat):
            self._heard(process, answer)
        elif what == "take_open":
            self._take_part(process, *answer)
        elif isinstance(answer, Reply):
            self._ended(process, what, answer)

    def _ended(self, process: RemoteWorker, task: str, reply: Reply) -> None:
        """Handle the reply to a call."""
        if process.part:  # rows must stay in the order in which they were written
            process.after_part = reply
            return
        worker = process.slot.worker
        self._mirror(worker, reply.pulse)
        for report in reply.reports:
            self.heartbeats.report(worker, report)
        if task == "begin":
            self.heartbeats.memory["ready"][worker] = perf_counter_ns()
        if task == "write":
            self.queue.ended[worker] = reply.ended
            self._receive(process, reply)
        process.task = ""
        if reply.code:
            report = self.heartbeats.last_report(worker) if reply.reports else ""
            self._lose(process, CallFailure("failed", report), hopeless=reply.code == NO_LANES_LEFT)
        elif reply.over and not self.heartbeats.stopping:
            self.permits.give_back(worker, self.queue.tally(worker))
            self.heartbeats.enter(worker, RESET)
            process.number += 1
            self._send(process, "begin_next", process.number, self._ticket(worker))
        else:
            self._go_on(process)

    def _receive(self, process: RemoteWorker, reply: Reply) -> None:
        if (fragment := reply.fragment) is None:
            self.queue.close_part(process.slot.worker)
            return
        self.times[fragment.worker] += fragment.time
        rows = self.queue.put(fragment, complete=reply.stored is None)
        if reply.stored is not None:
            self._flying[reply.stored] = PendingAnswer("rows", process, rows)

    def _go_on(self, process: RemoteWorker) -> None:
        """Send an idle worker its next grant, if it gets one."""
        worker, permits = process.slot.worker, self.permits
        if process.slot.pending or process.task or self.heartbeats.stopping:
            return
        tally = self.queue.tally(worker)
        if self.queue.fragments(worker) >= min(permits.pacing.slots or self.room, self.room):
            permits.give_back(worker, tally)
            self._wait(process, WAIT_SLOT)
            return
        self.heartbeats.enter(worker, STEP)  # comes before `take`, because an announced worker can be timed out
        grant = permits.take(worker, tally)
        if grant is None:
            self._wait(process, WAIT_GATE if permits.pacing.gated else WAIT_CREDIT)
            return
        self.queue.ended[worker] = False
        newest, weights = self.weights
        if grant.version == KEEP or newest == process.loaded:
            weights = None
        else:
            process.loaded = newest
        process.number += 1
        process.steps = grant.steps
        self._send(process, "write", WriteRequest(process.number, grant, process.wait), weights)

    def _wait(self, process: RemoteWorker, kind: int) -> None:
        if process.wait < 0:
            process.idle = perf_counter_ns()
        process.wait = kind
        self.heartbeats.wait(process.slot.worker, kind, process.idle)

    def _ticket(self, worker: int) -> int:
        """Return the episode that a worker plays next, in modes that assign episodes."""
        queue = self.permits.pacing
        if not isinstance(queue, EpisodeQueue):
            return NO_TICKET
        held = self.permits.locked(queue.held, worker)
        return held if held != NO_TICKET else self.permits.locked(queue.issue, worker)

    def _look(self, now: float) -> None:
        """Ask late workers for their state, replace workers that are too late or gone, and update the state of idle ones."""
        for slot in self.slots:
            process = slot.process
            if process is None or slot.pending:
                continue
            if not process.task:
                self.heartbeats.wait(slot.worker, max(process.wait, 0), process.idle)
            elif not process.asked and self._is_late(process, now):
                self._ask(process)
        for slot, late in list(self.overdue()):
            self._lose(slot.process, CallFailure(late))
        for slot in self.take_due():
            self._start(slot)

    def _is_late(self, process: RemoteWorker, now: float) -> bool:
        patience = max(PULSE, PULSE_EACH * self.count)
        if process.task == "write" and process.heard < process.sent:
            patience = max(patience, LATE * process.steps * self.mean_step())
        limit = (self.limits.construct, self.limits.reset, self.limits.step)
        phase = int(self.heartbeats.memory["phase"][process.slot.worker])
        return now - max(process.sent, process.heard) > min(patience, limit[min(phase, STEP)] / 3)

    def _hurry(self) -> None:
        """Ask the workers that block the next update to close their fragments, and measure how long their steps last."""
        pacing, now = self.permits.pacing, time.monotonic()
        for slot in self.slots:
            process = slot.process
            if process is not None and process.wants_part:
                process.wants_part = False
                if process.task == "write" and not process.part:
                    process.part = now
                    self._question(process, "take_open", process.number)
        if pacing.max_lag is None or now < self._hurried + HURRY:
            return
        self._hurried = now
        for worker, version in enumerate(pacing.announced()):
            process = self.slots[worker].process
            if version == NO_VERSION or process is None or process.task != "write" or not pacing.blocks(version):
                continue
            if process.closing < process.number and version < pacing.cells["posted"][0]:
                process.closing = process.number
                self._ask(process, process.number)
            elif not process.asked and now > process.heard + PULSE_EACH * self.count:
                self._ask(process)

    def _ask(self, process: RemoteWorker, close: int = -1) -> None:
        process.asked = time.monotonic()
        self._question(process, "pulse", close)

    def _question(self, process: RemoteWorker, method: str, number: int) -> None:
        self._flying[self._calls.ask(process.actor, method, number)] = PendingAnswer(method, process)

    def _heard(self, process: RemoteWorker, pulse: ActorHeartbeat) -> None:
        process.asked = 0.0
        process.heard = time.monotonic()
        if process.task and pulse.call == process.number:
            process.age = pulse.age
            self._mirror(process.slot.worker, pulse)

    def _mirror(self, worker: int, pulse: ActorHeartbeat) -> None:
        """Copy the state that a worker has reported into the heartbeats of this process."""
        if not pulse.counts:
            return
        memory = self.heartbeats.memory
        memory["since"][worker], memory["phase"][worker] = time.monotonic_ns() - int(pulse.age * 1e9), pulse.phase
        for name, count in zip(COUNTS, pulse.counts, strict=True):
            memory[name][worker] = count
        for name, of_lanes in zip(LANES, pulse.lanes, strict=True):
            memory[name][worker] = of_lanes

    def _take_part(self, process: RemoteWorker, pulse: ActorHeartbeat, part: Fragment | None) -> None:
        process.part = 0.0
        self._heard(process, pulse)
        if part is not None:
            self.times[part.worker] += part.time
            self.queue.put_part(part)
            self.queue.wakeup.notify()
        self._end_after_part(process)

    def _end_after_part(self, process: RemoteWorker) -> None:
        if (reply := process.after_part) is not None:
            process.after_part = None
            self._ended(process, "write", reply)

    def _lose(self, process: RemoteWorker | None, failed: CallFailure, *, hopeless: bool = False) -> None:
        """Handle a worker that has ended or must end."""
        assert process is not None, "only running workers are lost"
        slot, worker = process.slot, process.slot.worker
        self.fragments_lost += process.task == "write"
        self._calls.kill(process.actor)
        self.queue.close_part(worker)
        self.note_death(slot)
        slot.pending = False
        if not self.heartbeats.stopping:
            self.note_loss(slot, failed.reason, failed.report, hopeless=hopeless, own_fault=failed.own_fault)

    def settled(self, worker: int, *, for_good: bool) -> None:
        self.permits.settle(worker, self.queue.tally(worker), for_good=for_good)
        self.queue.wakeup.notify()

    def _end(self) -> None:
        """Give workers a short time to close their fragments and envs, then kill all of them."""
        self.heartbeats.stop()
        running = [slot.process for slot in self.slots if slot.process is not None]
        for process in running:
            if not process.slot.pending and process.task != "begin":
                self._ask(process, process.number)
                self._flying[self._calls.call(process.actor, "close")] = PendingAnswer("close", process)
        limit = Limit(GRACE)
        while limit.left and (
            left := [ref for ref, one in self._flying.items() if one.what in ("write", "close", "rows")]
        ):
            for ref in self._calls.wait([*left], min(limit.left, LOOK)):
                self._landed(ref)
        for process in running:
            self._calls.kill(process.actor)


def _age(process: RemoteWorker | None) -> float:
    """Return the seconds that a worker's step has lasted at least. A worker that does not answer is stuck in its step."""
    if process is None or not process.task:
        return 0.0
    silent = time.monotonic() - process.asked if process.asked else 0.0
    return process.age + (silent if silent > SILENT else 0.0)
