"""The workers of a run: which of them run, which were lost and why, which are too late, and which are replaced or given up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from freewheel.rollout.factory import Timeouts
from freewheel.transport.workers.heartbeats import CONSTRUCT, PHASES, TURN, WAIT, Heartbeats

GOOD_STEPS, FAILURES = 10, 3  # a worker is given up after FAILURES failures with fewer good steps between them
BACKOFF = (0.0, 0.1, 0.5)  # seconds before a restart, by number of failures in a row


class Process(Protocol):
    """The process of a worker, on this machine or another."""

    @property
    def pid(self) -> int | None: ...  # on this machine


P = TypeVar("P", bound=Process)


@dataclass
class WorkerSlot(Generic[P]):
    """The state of one worker."""

    worker: int
    process: P | None = None
    incarnation: int = -1
    steps: int = 0  # of earlier incarnations
    failures: int = 0  # in a row
    deaths: int = 0
    restarts: int = 0
    due: float = 0.0  # when to start the next incarnation
    pending: bool = False  # there is no room for it yet, on a cluster
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
class WorkerSlots(Generic[P]):
    """The list of `count` workers. The code that starts and watches them fills it in."""

    count: int
    heartbeats: Heartbeats
    limits: Timeouts
    slots: list[WorkerSlot[P]] = field(init=False)
    losses: list[WorkerLoss] = field(init=False, default_factory=list)
    restarts: int = field(init=False, default=0)
    error: BaseException | None = field(init=False, default=None)  # of the thread that watches the workers

    def __post_init__(self) -> None:
        self.slots = [WorkerSlot(worker) for worker in range(self.count)]

    @property
    def given_up(self) -> int:
        return sum(slot.given_up for slot in self.slots)

    def settled(self, worker: int, *, for_good: bool) -> None:
        """Handle the death of a worker, before another one takes its place."""
        raise NotImplementedError

    def begin(self, slot: WorkerSlot[P]) -> None:
        """Prepare the start of a worker's next incarnation."""
        slot.incarnation += 1
        slot.steps = int(self.heartbeats.memory["steps"][slot.worker])
        self.heartbeats.enter(slot.worker, CONSTRUCT)

    def take_due(self) -> list[WorkerSlot[P]]:
        """Return the workers that are to start again now, and count their restarts."""
        now = time.monotonic()
        due = [slot for slot in self.slots if slot.process is None and not slot.given_up and now >= slot.due]
        self.restarts += len(due)
        for slot in due:
            slot.restarts += 1
        return due

    def overdue(self) -> Iterator[tuple[WorkerSlot[P], str]]:
        """Yield the workers that exceed a time limit, and what they did not do."""
        limits = (self.limits.construct, self.limits.reset, self.limits.step, max(self.limits.step, 2 * TURN))
        phases, ages = self.heartbeats.memory["phase"].tolist(), self.heartbeats.call_age().tolist()
        for slot in self.slots:
            phase = phases[slot.worker]
            if slot.process is not None and not slot.pending and ages[slot.worker] > (limit := limits[phase]):
                call = self.heartbeats.call(slot.worker)
                late = (
                    f"return within {limit:g} s from {call}"
                    if call
                    else f"answer within {limit:g} s of {PHASES[phase]}"
                )
                yield slot, f"did not {late}"

    def note_death(self, slot: WorkerSlot[P]) -> None:
        """Note that the worker's process has ended."""
        memory, worker = self.heartbeats.memory, slot.worker
        slot.process = None
        memory["died_in"][worker] = memory["phase"][worker]
        self.heartbeats.enter(worker, WAIT)
        memory["died"][worker] = time.monotonic_ns()

    def note_loss(
        self, slot: WorkerSlot[P], reason: str, report: str = "", *, hopeless: bool = False, own_fault: bool = True
    ) -> None:
        """Note an unexpected end. hopeless: no step counts as good; own_fault: its machine is not the cause."""
        slot.deaths += 1
        good = int(self.heartbeats.memory["steps"][slot.worker]) - slot.steps
        if own_fault:
            slot.failures = 1 if good >= GOOD_STEPS and not hopeless else slot.failures + 1
        given_up = slot.failures >= FAILURES
        slot.due = time.monotonic() + BACKOFF[max(0, slot.failures - 1)] if not given_up else 0.0
        self.settled(slot.worker, for_good=given_up)
        self.losses.append(WorkerLoss(slot.worker, slot.incarnation, reason, report, given_up, time.monotonic()))
        slot.given_up = given_up  # last, so that the reason is known when every worker is given up
