"""The supervisor starts worker processes, watches them, reports and replaces those that fail, and ends them all."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess

from freewheel.errors import SetupError
from freewheel.transport import forkserver
from freewheel.transport.clock import clock
from freewheel.transport.shm.sync import ProcessLock
from freewheel.transport.workers.heartbeats import NO_LANES_LEFT
from freewheel.transport.workers.worker_slots import WorkerSlot, WorkerSlots

LOOK = 0.2  # seconds between two checks of the heartbeats
STUCK = 1.0  # seconds: a worker that holds a lock for longer must have been stopped
GRACE = 1.0  # seconds for workers to end by themselves, and again after SIGTERM


@dataclass
class Supervisor(WorkerSlots[ForkServerProcess]):
    """Keeps `count` workers running, from its own thread."""

    spawn: Callable[[int, int], ForkServerProcess]  # (worker, incarnation) -> a process, not yet started
    settle: Callable[[int, bool], None]  # (worker, for good): called after its death, before a replacement starts
    locks: Sequence[ProcessLock] = ()  # a stopped worker may hold them; the supervisor holds them during `settle`

    def __post_init__(self) -> None:
        super().__post_init__()
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="freewheel-supervisor", daemon=True)
        self._holders: dict[ProcessLock, tuple[int | None, float]] = {}  # the last known holder, and since when
        self._held = ExitStack()

    def start(self) -> None:
        self._held.enter_context(clock)
        for slot in self.slots:
            self._start(slot)
        self._thread.start()

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

    def _start(self, slot: WorkerSlot[ForkServerProcess]) -> None:
        self.begin(slot)
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
        for slot, late in self.overdue():
            self._handle_exit(slot, late)
        self._free_locks()
        for slot in [] if self.heartbeats.stopping else self.take_due():
            self._start(slot)

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

    def _handle_exit(self, slot: WorkerSlot[ForkServerProcess], reason: str) -> None:
        process = slot.process
        assert process is not None, "the worker runs"
        pid, (code,) = process.pid, forkserver.end([process], 0.0)
        if code is None:
            raise SetupError(f"worker {slot.worker} (process {pid}) cannot be killed; check the machine")
        call = self.heartbeats.call(slot.worker)
        self.note_death(slot)
        if self.heartbeats.stopping:
            return
        report = self.heartbeats.last_report(slot.worker) if code > 0 else ""
        why = reason or self._cause(slot.worker, code, "" if report else call)
        self.note_loss(slot, why, report, hopeless=code == NO_LANES_LEFT)

    def settled(self, worker: int, *, for_good: bool) -> None:
        with self._holding_locks():
            self.settle(worker, for_good)

    def _cause(self, worker: int, code: int, call: str) -> str:
        """Say how a worker ended. `call`: its env call, the likely cause unless another process killed the worker."""
        if code == forkserver.ORPHANED:
            return "lost its forkserver"
        at = f" in {call}" if call else ""
        if code >= 0:
            return f"ended (exit code {code}){at}"
        peak = int(self.heartbeats.memory["peak"][worker]) // 1024
        hint = f"; out of memory? its peak was {peak} MB" if -code == signal.SIGKILL and peak else ""
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"was killed ({name}{hint}){'' if -code in (signal.SIGKILL, signal.SIGTERM) else at}"
