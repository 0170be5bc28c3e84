"""The supervisor starts worker processes, watches them, reports and replaces those that fail, and ends them all."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess

from freewheel.errors import SetupError
from freewheel.rollout.factory import Timeouts
from freewheel.transport import forkserver
from freewheel.transport.clock import clock
from freewheel.transport.shm.heartbeats import CONSTRUCT, NO_LANES_LEFT, PHASES, TURN, WAIT, Heartbeats
from freewheel.transport.shm.sync import ProcessLock

GOOD_STEPS, FAILURES = 10, 3  # a worker is given up after three failures with fewer good steps between them
BACKOFF = (0.0, 0.1, 0.5)  # seconds before a restart, by number of failures in a row
LOOK = 0.2  # seconds between two looks at the heartbeats
STUCK = 1.0  # seconds after which the holder of a lock must have been stopped
GRACE = 1.0  # seconds for workers to end by themselves, and again after SIGTERM


@dataclass
class WorkerSlot:
    """The state of one worker."""

    worker: int
    process: ForkServerProcess | None = None
    incarnation: int = -1
    steps: int = 0  # of earlier incarnations
    failures: int = 0  # in a row
    deaths: int = 0
    restarts: int = 0
    due: float = 0.0  # when to start the next incarnation
    given_up: bool = False


@dataclass(frozen=True)
class WorkerLoss:
    """A worker that ended unexpectedly."""

    worker: int
    incarnation: int
    reason: str
    report: str  # its last report
    given_up: bool
    seen: float  # time.monotonic()

    def __str__(self) -> str:
        what = "is given up" if self.given_up else "is replaced"
        return f"worker {self.worker} {self.reason} and {what}" + (f"\n{self.report}" if self.report else "")


@dataclass
class Supervisor:
    """Keeps `count` workers running, from its own thread."""

    count: int
    heartbeats: Heartbeats
    limits: Timeouts
    spawn: Callable[[int, int], ForkServerProcess]  # (worker, incarnation) -> a process, not yet started
    settle: Callable[[int, bool], None]  # (worker, for good): called after its death, before a replacement starts
    locks: Sequence[ProcessLock] = ()  # that a stopped worker may hold; held during `settle`
    slots: list[WorkerSlot] = field(init=False)
    losses: list[WorkerLoss] = field(default_factory=list)
    restarts: int = 0

    def __post_init__(self) -> None:
        self.slots = [WorkerSlot(worker) for worker in range(self.count)]
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="freewheel-supervisor", daemon=True)
        self._holders: dict[ProcessLock, tuple[int | None, float]] = {}  # the last known holder, and since when
        self._held = ExitStack()
        self.error: BaseException | None = None  # of the thread itself

    def start(self) -> None:
        self._held.enter_context(clock)
        for slot in self.slots:
            self._start(slot)
        self._thread.start()

    @property
    def given_up(self) -> int:
        return sum(slot.given_up for slot in self.slots)

    def stop(self) -> None:
        """Ask the workers to end, then send SIGTERM, then SIGKILL; no process is left."""
        self.heartbeats.stop()
        os.write(self._wake_write, b"x")
        if self._thread.ident is not None:
            self._thread.join()
        forkserver.end([slot.process for slot in self.slots if slot.process is not None], GRACE, GRACE)
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._held.close()

    def _start(self, slot: WorkerSlot) -> None:
        slot.incarnation += 1
        slot.steps = int(self.heartbeats.memory["steps"][slot.worker])
        self.heartbeats.enter(slot.worker, CONSTRUCT)
        process = self.spawn(slot.worker, slot.incarnation)
        forkserver.start(process)
        slot.process = process

    def _watch(self) -> None:
        try:
            while not self.heartbeats.stopping:
                self._look()
        except BaseException as error:  # noqa: BLE001 - raised again where the learner waits
            self.error = error

    def _look(self) -> None:
        running = {slot.process.sentinel: slot for slot in self.slots if slot.process is not None}
        for ready in connection.wait([*running, self._wake_read], LOOK):
            if isinstance(ready, int) and ready in running:
                self._handle_exit(running[ready], "")
        now = time.monotonic()
        self._kill_silent()
        self._free_locks()
        for slot in self.slots:
            if slot.process is None and not slot.given_up and now >= slot.due and not self.heartbeats.stopping:
                self.restarts += 1
                slot.restarts += 1
                self._start(slot)

    def _kill_silent(self) -> None:
        """Kill workers that exceed a time limit."""
        limits = (self.limits.construct, self.limits.reset, self.limits.step, max(self.limits.step, 2 * TURN))
        phases, ages = self.heartbeats.memory["phase"].tolist(), self.heartbeats.call_age().tolist()
        for slot in self.slots:
            phase = phases[slot.worker]
            if slot.process is not None and ages[slot.worker] > (limit := limits[phase]):
                call = self.heartbeats.call(slot.worker)
                what = (
                    f"return within {limit:g} s from {call}"
                    if call
                    else f"answer within {limit:g} s of {PHASES[phase]}"
                )
                self._handle_exit(slot, f"did not {what}")

    def _free_locks(self) -> None:
        """Kill a worker that was stopped while holding a lock, because it blocks all others."""
        now = time.monotonic()
        for lock in self.locks:
            holder = lock.holder()
            before, since = self._holders.get(lock, (None, now))
            if holder is None or holder != before:
                self._holders[lock] = holder, now
            elif clock.age(since) > STUCK:
                self._kill_holder(lock)

    def _kill_holder(self, lock: ProcessLock) -> None:
        holder = lock.holder()
        for slot in self.slots:
            if slot.process is not None and slot.process.pid == holder:
                self._handle_exit(slot, "was stopped while holding a lock")

    @contextmanager
    def _holding_locks(self) -> Iterator[None]:
        """Take all locks, so that `settle` never waits for a stopped worker: this thread must keep watching."""
        with ExitStack() as held:
            for lock in self.locks:
                while not lock.acquire(STUCK):
                    self._kill_holder(lock)
                held.callback(lock.release)
            yield

    def _handle_exit(self, slot: WorkerSlot, reason: str) -> None:
        process = slot.process
        assert process is not None, "the worker runs"
        pid, (code,) = process.pid, forkserver.end([process], 0.0)
        if code is None:
            raise SetupError(f"worker {slot.worker} (process {pid}) cannot be killed; check the machine")
        slot.process, call = None, self.heartbeats.call(slot.worker)
        self.heartbeats.memory["died_in"][slot.worker] = self.heartbeats.memory["phase"][slot.worker]
        self.heartbeats.enter(slot.worker, WAIT)
        self.heartbeats.memory["died"][slot.worker] = time.monotonic_ns()
        if self.heartbeats.stopping:
            return
        slot.deaths += 1
        good = int(self.heartbeats.memory["steps"][slot.worker]) - slot.steps
        slot.failures = 1 if good >= GOOD_STEPS and code != NO_LANES_LEFT else slot.failures + 1
        given_up = slot.failures >= FAILURES
        slot.due = time.monotonic() + BACKOFF[slot.failures - 1] if not given_up else 0.0
        with self._holding_locks():
            self.settle(slot.worker, given_up)
        report = self.heartbeats.last_report(slot.worker) if code > 0 else ""
        why = reason or self._cause(slot.worker, code, "" if report else call)
        self.losses.append(WorkerLoss(slot.worker, slot.incarnation, why, report, given_up, time.monotonic()))
        slot.given_up = given_up  # last, so that the reason is known when every worker is given up

    def _cause(self, worker: int, code: int, call: str) -> str:
        """How a worker ended; `call`: of its env, which was the cause unless somebody else killed it."""
        if code == forkserver.ORPHANED:
            return "lost its forkserver"
        at = f" in {call}" if call else ""
        if code >= 0:
            return f"ended (exit code {code}){at}"
        peak = int(self.heartbeats.memory["peak"][worker]) // 1024
        hint = f"; out of memory? its peak was {peak} MB" if -code == signal.SIGKILL and peak else ""
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"was killed ({name}{hint}){'' if -code in (signal.SIGKILL, signal.SIGTERM) else at}"
