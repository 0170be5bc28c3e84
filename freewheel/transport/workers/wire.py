"""The base of wires with supervised workers: their losses, messages, statistics, states, contexts and progress."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from freewheel.core import NDArray, RowCounts, Snapshot
from freewheel.errors import EnvError
from freewheel.metrics.workers import WorkerState
from freewheel.pacing.pacing import NO_VERSION, Pacing
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.rollout.runner import Author
from freewheel.seeding import Position
from freewheel.transport.shm.memory import NEVER
from freewheel.transport.wire import Fragment, Wire, WorkerRows
from freewheel.transport.workers.heartbeats import Heartbeats, Stragglers, kind
from freewheel.transport.workers.states import worker_states
from freewheel.transport.workers.worker_progress import WorkerProgress
from freewheel.transport.workers.worker_slots import WorkerSlots

TABLES = 64  # tables of contexts to keep: an episode's table is found by the version with which the episode began


@dataclass(frozen=True, kw_only=True)
class Size:
    """How many workers, and the size of their queues."""

    workers: int
    slots: int  # fragments of each worker that may wait
    steps: int  # of a fragment at most
    drop_oldest: bool = False  # a full queue drops its oldest fragment


class SupervisedWire(Wire):
    """A wire to workers that are started, watched and replaced here. A subclass defines what they write, and how it arrives."""

    worker_slots: WorkerSlots[Any]
    heartbeats: Heartbeats
    stragglers: Stragglers

    def __init__(self, factory: RunnerFactory, spec: CollectSpec, pacing: Pacing, size: Size) -> None:
        self.authors, self.lanes, self.slots = size.workers, spec.env.lanes // size.workers, size.slots
        self.state_size = factory.actor().state_size
        self._newest = NO_VERSION, spec.context  # version and contexts posted last
        self._recorder, self._trace = spec.recorder, spec.trace
        self._losses_shown, self._reports_shown = 0, [0] * size.workers  # reports: of each worker
        self._reported: set[str] = set()
        first = factory.first_worker
        self._progress = [
            WorkerProgress(
                self.lanes,
                self.state_size,
                Position(Author(factory.seed, range(0), worker=first + worker).rng().bit_generator.state).packed(),
                spec.context,
                workers=size.workers,
            )
            for worker in range(size.workers if pacing.own_episodes else 0)
        ]
        self._tables = {NEVER: spec.context}  # contexts by the first version that was posted with them
        self._resume: dict[int, dict[str, NDArray]] = {}  # by worker: where it begins
        self._final: _FinalState | None = None

    def _watch_over(self, worker_slots: WorkerSlots[Any], times: NDArray) -> None:
        """Use these workers and their times [W, len(WORKER_TIME)] over all incarnations."""
        self.worker_slots, self.heartbeats = worker_slots, worker_slots.heartbeats
        self.stragglers = Stragglers(worker_slots.heartbeats, times)

    @abstractmethod
    def account(self, worker: int) -> WorkerRows: ...
    @abstractmethod
    def waiting(self) -> int: ...  # closed fragments that the learner has not taken
    @abstractmethod
    def _settle_all(self) -> None: ...  # close the slots that the ended workers left open

    def post(self, snapshot: Snapshot) -> None:
        self._newest = snapshot.version, snapshot.context
        if snapshot.context is not self._tables[max(self._tables)]:
            self._tables = dict([*self._tables.items(), (snapshot.version, snapshot.context)][-TABLES:])

    def _check(self) -> None:
        """Raise an error if no rows can come any more."""
        if self.worker_slots.error is not None:
            raise self.worker_slots.error
        if self.worker_slots.given_up == self.authors:
            last = self.worker_slots.losses[-1]
            raise EnvError(f"every worker was given up, the last one because it {last.reason}\n{last.report}".rstrip())

    def produced(self, worker: int) -> int:
        return self.account(worker).produced

    def rows(self) -> RowCounts:
        if self._final is not None:
            return self._final.rows
        accounts = [self.account(worker) for worker in range(self.authors)]
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
        waiting, slots = self.waiting(), min(self.permits.pacing.slots or self.slots, self.slots)
        used = min(waiting / (self.authors * slots), 1.0)
        return {"queue_util": used, "queue/fragments": float(waiting), "queue/slots": float(slots)}

    def workers(self) -> list[WorkerState]:
        return [] if self._final is not None else worker_states(self.worker_slots, self.lanes)

    def messages(self) -> list[str]:
        """Return losses of workers, reports of environments, and stragglers, each once."""
        if self._final is not None:
            return self._final.messages()
        losses, self._losses_shown = self.worker_slots.losses[self._losses_shown :], len(self.worker_slots.losses)
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
            "worker_restarts": self.worker_slots.restarts,
            "workers_lost": self.worker_slots.given_up,
            "out_of_space": int(self.heartbeats.memory["out_of_space"].sum()),
            "episodes_produced": self.stragglers.produced(),
            "workers": self.stragglers.table(),
        }  # fmt: skip

    def state(self) -> dict[str, NDArray]:
        """Return where each worker's lanes are by the delivered rows, and the next incarnation number."""
        state = {"incarnation": np.array([1 + max(slot.incarnation for slot in self.worker_slots.slots)])}
        for worker, progress in enumerate(self._progress):
            state |= {f"{worker}.{name}": np.asarray(value) for name, value in progress.state().items()}
        return state

    def restore(self, state: Mapping[str, NDArray]) -> None:
        for slot in self.worker_slots.slots:
            slot.incarnation = int(state["incarnation"][0]) - 1
        for worker, progress in enumerate(self._progress):
            own = f"{worker}."
            found = {name.removeprefix(own): value for name, value in state.items() if name.startswith(own)}
            progress.restore(found)
            self._resume[worker] = found
            # If the worker dies before it is back there, its replacement begins the episodes after these.
            self.heartbeats.memory["begun"][worker] = progress.numbers + progress.under_way

    def _record_start(self, worker: int, incarnation: int) -> None:
        if self._recorder is not None:
            begun = self.heartbeats.memory["begun"][worker].tolist()
            self._recorder.started(worker, incarnation, begun, self._newest[0])

    def _close_accounts(self) -> None:
        """Keep the final counts and reports of the workers, because their memory is about to be freed."""
        self._settle_all()
        rows = self.rows()
        for fragment in self.take():  # their rows are not learned from, but their episodes were played
            self.note_episodes(fragment)
        self._final = _FinalState(rows, self.summary(), self.messages())
        self.stragglers.close()


@dataclass
class _FinalState:
    """The final counts and reports of the workers."""

    rows: RowCounts
    summary: Mapping[str, Any]
    unread: list[str]

    def messages(self) -> list[str]:
        unread, self.unread = self.unread, []
        return unread
