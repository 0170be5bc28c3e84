"""Worker processes that are started, watched, named when they fail, replaced within a budget, and never left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess

from freewheel.errors import SetupError
from freewheel.rollout.factory import Timeouts
from freewheel.transport import forkserver
from freewheel.transport.shm.heartbeats import CONSTRUCT, HOPELESS, PHASES, TURN, WAIT, Heartbeats
from freewheel.transport.shm.sync import ProcessLock

GOOD_STEPS, FAILURES = 10, 3  # a worker that fails three times running with fewer good steps between is given up
BACKOFF = (0.0, 0.1, 0.5)  # seconds before a restart, by failures running
LOOK = 0.2  # seconds between two looks at the heartbeats
STUCK = 1.0  # seconds after which whoever holds the lock must have been stopped
JOIN = 30.0  # seconds within which the kernel ends a process that was killed
ORPHANED = 255  # the exit code where the server that workers are born from has died: the worker may well live
GRACE = 1.0  # seconds for workers to end by themselves, and again after SIGTERM


@dataclass
class WorkerSlot:
    """One worker's place in the crew."""

    worker: int
    process: ForkServerProcess | None = None
    incarnation: int = -1
    steps: int = 0  # of earlier incarnations
    failures: int = 0  # running
    due: float = 0.0  # when to start the next incarnation
    given_up: bool = False


@dataclass(frozen=True)
class WorkerLoss:
    """A worker that ended when it should not have."""

    worker: int
    incarnation: int
    reason: str
    report: str  # its own last words
    given_up: bool
    seen: float  # time.monotonic()

    def __str__(self) -> str:
        what = "is given up" if self.given_up else "is replaced"
        return f"worker {self.worker} {self.reason} and {what}" + (f"\n{self.report}" if self.report else "")


@dataclass
class Supervisor:
    """Keeps `count` workers going, from a thread of its own."""

    count: int
    heartbeats: Heartbeats
    limits: Timeouts
    spawn: Callable[[int, int], ForkServerProcess]  # (worker, incarnation) -> a process, not yet started
    settle: Callable[[int, bool], None]  # called between the death of a worker and its replacement; True: there is none
    locks: Sequence[ProcessLock] = ()  # that a stopped worker might hold; held in `settle`
    slots: list[WorkerSlot] = field(init=False)
    losses: list[WorkerLoss] = field(default_factory=list)
    restarts: int = 0

    def __post_init__(self) -> None:
        self.slots = [WorkerSlot(worker) for worker in range(self.count)]
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="freewheel-crew", daemon=True)
        self._holders: dict[ProcessLock, tuple[int | None, float]] = {}  # who was last seen with each, since when
        self._looked = self._returned = time.monotonic()  # the last look, and the first after a longer absence
        self.error: BaseException | None = None  # of the thread itself

    def start(self) -> None:
        for slot in self.slots:
            self._start(slot)
        self._thread.start()

    @property
    def given_up(self) -> int:
        return sum(slot.given_up for slot in self.slots)

    def stop(self) -> None:
        """Ask, then tell, then kill; nothing is left."""
        self.heartbeats.stop()
        os.write(self._wake_write, b"x")
        if self._thread.ident is not None:
            self._thread.join()
        _end([slot.process for slot in self.slots if slot.process is not None])
        os.close(self._wake_read)
        os.close(self._wake_write)

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
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits for the crew
            self.error = error

    def _look(self) -> None:
        running = {slot.process.sentinel: slot for slot in self.slots if slot.process is not None}
        for ready in connection.wait([*running, self._wake_read], LOOK):
            if isinstance(ready, int) and ready in running:
                self._bury(running[ready], "")
        now = time.monotonic()
        if now - self._looked > STUCK:  # this process was stopped, and perhaps the workers with it
            self._returned = now
            self._holders.clear()
        self._looked = now
        self._kill_silent(now - self._returned)
        self._free_locks()
        for slot in self.slots:
            if slot.process is None and not slot.given_up and now >= slot.due and not self.heartbeats.stopping:
                self.restarts += 1
                self._start(slot)

    def _kill_silent(self, watched: float) -> None:
        """Silence counts only while it was watched, for so many seconds now."""
        limits = (self.limits.construct, self.limits.reset, self.limits.step, max(self.limits.step, 2 * TURN))
        phases, ages = self.heartbeats.memory["phase"].tolist(), self.heartbeats.age().clip(max=watched).tolist()
        for slot in self.slots:
            phase = phases[slot.worker]
            if slot.process is not None and ages[slot.worker] > (limit := limits[phase]):
                self._kill(slot, f"did not answer within {limit:g} s of {PHASES[phase]}")

    def _free_locks(self) -> None:
        """A worker that was stopped with a lock in its hands stops everyone."""
        now = time.monotonic()
        for lock in self.locks:
            holder = lock.holder()
            before, since = self._holders.get(lock, (None, now))
            if holder is None or holder != before:
                self._holders[lock] = holder, now
            elif now - since > STUCK:
                self._kill_holder(lock)

    def _kill_holder(self, lock: ProcessLock) -> None:
        holder = lock.holder()
        for slot in self.slots:
            if slot.process is not None and slot.process.pid == holder:
                self._kill(slot, "was stopped with a lock in its hands")

    def _kill(self, slot: WorkerSlot, reason: str) -> None:
        assert slot.process is not None, "a worker dies once"
        slot.process.kill()
        self._bury(slot, reason)

    @contextmanager
    def _holding_locks(self) -> Iterator[None]:
        """So that `settle` finds them free, or it would wait for a stopped worker and nobody would look after the others."""
        with ExitStack() as held:
            for lock in self.locks:
                while not lock.acquire(STUCK):
                    self._kill_holder(lock)
                held.callback(lock.release)
            yield

    def _bury(self, slot: WorkerSlot, reason: str) -> None:
        process = slot.process
        assert process is not None, "a worker dies once"
        process.join(JOIN)
        if process.exitcode is None:
            raise SetupError(f"worker {slot.worker} (process {process.pid}) cannot be killed; the machine needs a look")
        code = process.exitcode
        _close(process)
        slot.process = None
        self.heartbeats.enter(slot.worker, WAIT)
        self.heartbeats.memory["died"][slot.worker] = time.monotonic_ns()
        if self.heartbeats.stopping:
            return
        good = int(self.heartbeats.memory["steps"][slot.worker]) - slot.steps
        slot.failures = 1 if good >= GOOD_STEPS and code != HOPELESS else slot.failures + 1
        given_up = slot.failures >= FAILURES
        slot.due = time.monotonic() + BACKOFF[slot.failures - 1] if not given_up else 0.0
        with self._holding_locks():
            self.settle(slot.worker, given_up)
        report = self.heartbeats.last_words(slot.worker) if code > 0 else ""
        why = reason or self._cause(slot.worker, code)
        self.losses.append(WorkerLoss(slot.worker, slot.incarnation, why, report, given_up, time.monotonic()))
        slot.given_up = given_up  # last: who finds nobody left finds out why

    def _cause(self, worker: int, code: int) -> str:
        if code == ORPHANED:
            return "lost the server that it was born from"
        if code >= 0:
            return f"ended (exit code {code})"
        peak = int(self.heartbeats.memory["peak"][worker]) // 1024
        hint = f"; out of memory? its peak was {peak} MB" if -code == signal.SIGKILL and peak else ""
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"was killed ({name}{hint})"


def _end(processes: list[ForkServerProcess]) -> None:
    for strike in (None, ForkServerProcess.terminate, ForkServerProcess.kill):
        deadline = time.monotonic() + GRACE
        for process in processes:
            if strike is not None:
                strike(process)
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()) if strike is not ForkServerProcess.kill else None)
    for process in processes:
        _close(process)


def _close(process: ForkServerProcess) -> None:
    """Forget a process that has ended, or see to it that it does: there must never be two of a worker."""
    if process.exitcode == ORPHANED:
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(process.pid or 0)
            try:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                connection.wait([handle], JOIN)
            finally:
                os.close(handle)
    process.close()
