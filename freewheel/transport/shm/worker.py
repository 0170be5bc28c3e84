"""The worker process: it acts within its grants, writes rows into its slots, reports failures, and ends on request."""

from __future__ import annotations

import os
import resource
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Generic, TypeVar

import cloudpickle  # type: ignore[import-untyped]

from freewheel.core import WORKER_TIME, Failure, NDArray, Transitions
from freewheel.errors import EnvError, FreewheelError
from freewheel.pacing.episode_queue import TicketStream
from freewheel.pacing.pacing import KEEP, Grant
from freewheel.rollout.factory import RunnerFactory
from freewheel.rollout.probe import watching
from freewheel.rollout.runner import Author
from freewheel.rollout.single_env_runner import make_runner
from freewheel.timeline.track import NoTrack
from freewheel.transport.forkserver import freeze_heap
from freewheel.transport.shm.channel import Port, Writer
from freewheel.transport.shm.memory import NEVER, Mailbox
from freewheel.transport.shm.permits import SharedPermits
from freewheel.transport.shm.rings import Rings
from freewheel.transport.wire import Permits
from freewheel.transport.workers import heartbeats as phase
from freewheel.transport.workers.heartbeats import Heartbeats, LaneCalls

WAIT_CREDIT, WAIT_SLOT, WAIT_GATE, DOWN, OTHER = (
    WORKER_TIME.index(kind) for kind in ("wait-credit", "wait-slot", "wait-gate", "down", "other")
)

MEMORY_CHECK = 500_000_000  # ns between two measurements of the process's memory


Permits_co = TypeVar("Permits_co", bound=Permits, covariant=True)


@dataclass(frozen=True)
class WorkerResources(Generic[Permits_co]):
    """Everything that a worker shares with the learner."""

    factory: bytes  # a cloudpickled RunnerFactory
    port: Port
    mailbox: Mailbox
    heartbeats: Heartbeats
    permits: Permits_co
    context: NDArray  # [K, C] for episodes that begin before the first weights are loaded
    nice: int = 0  # how much to lower the priority
    resume: Mapping[str, NDArray] | None = None  # for Runner.load_state_dict: the worker's state in an earlier run
    rings: Rings | None = None  # the worker writes its timeline here


@dataclass(frozen=True)
class WorkerId:
    """Which worker this is."""

    worker: int
    incarnation: int
    lanes: range
    place: int  # its index in the shared memory: its number, or 0 if no other worker shares that memory


def work(shared: WorkerResources[SharedPermits], who: WorkerId) -> None:
    """The main function of a worker process."""
    os.nice(shared.nice)
    if code := exit_code(lambda: WorkerProcess(shared, who).run(), shared.heartbeats, who.place):
        sys.exit(code)


def exit_code(work: Callable[[], None], heartbeats: Heartbeats, place: int) -> int:
    """Do a worker's work. Report an error that ends it, and return the exit code."""
    try:
        work()
    except FreewheelError as error:
        heartbeats.report(place, str(error))
        return phase.NO_LANES_LEFT if isinstance(error, EnvError) and error.cause == "quarantine" else 1
    except MemoryError:
        heartbeats.report(place, f"out of memory, peak {_peak() // 1024} MB")
        return 1
    return 0


class Worker:
    """A worker's envs and policy. It writes one fragment for each grant, and begins episodes when its caller asks."""

    def __init__(self, shared: WorkerResources[Permits], who: WorkerId) -> None:
        self._shared, self._who, self._heartbeats, self._place = shared, who, shared.heartbeats, who.place
        worker, memory = who.place, shared.heartbeats.memory
        self._track = NoTrack() if shared.rings is None else shared.rings.begin(worker, shared.heartbeats)
        factory: RunnerFactory = cloudpickle.loads(shared.factory)
        begun = memory["begun"][worker].tolist()
        streams = shared.permits.streams(worker) or [
            factory.episodes(lane, start=start) for lane, start in zip(who.lanes, begun, strict=True)
        ]
        self._tickets = next((one.tickets for one in streams if isinstance(one, TicketStream)), None)
        number: dict[str, int] = {"worker": who.worker, "incarnation": who.incarnation}
        author = Author(factory.seed, who.lanes, streams=streams, first_worker=factory.first_worker, **number)
        self._begun = memory["begun"][worker]
        self._counted = memory.cells("begun", worker)
        self._own_episodes = shared.permits.pacing.own_episodes
        self._steps, self._since = memory.cells("steps", worker), memory.cells("since", worker)
        self._out_of_space = memory.cells("out_of_space", worker)
        self._out_of_space_before = self._out_of_space[0]
        self._reported: set[str] = set()
        self._loaded, self._weights = NEVER, shared.mailbox.buffer()
        self._memory_checked = 0  # ns: when the memory was last measured
        self._heartbeats.enter(worker, phase.CONSTRUCT)
        calls = LaneCalls(self._heartbeats, worker, who.lanes)
        with watching(calls):
            env = factory.env(who.lanes, fault_tolerant=True)
        env.watch(calls.lane, calls.reset)
        self._runner = make_runner(factory, who.lanes, env, author)
        self._runner.calling = self._calling
        if shared.resume is not None:
            self._runner.load_state_dict(shared.resume)
        self._writer = Writer(shared.port, worker, who.incarnation)

    def begin(self) -> None:
        """Begin the first episodes."""
        began = perf_counter_ns()
        self._heartbeats.enter(self._place, phase.RESET)
        self._runner.set_context(self._shared.context)
        self._runner.begin()
        self._begun[:] = [number + 1 for number in self._runner.numbers] if self._own_episodes else self._begun + 1
        self._report_notes()
        freeze_heap()
        self._report_ready(began)
        self._mark = perf_counter_ns()

    @property
    def over(self) -> bool:
        """True if an episode has ended: call `begin_next` before the next fragment."""
        return self._runner.over

    def write(self, grant: Grant) -> None:
        """Write a fragment into the next slot and close the slot."""
        self._load(grant)
        tickets = () if self._tickets is None else self._tickets.history
        data = self._writer.begin(self._runner.version, self._runner.state, tickets)
        self._act(data, grant.steps)
        self._commit(exact=grant.exact)

    def begin_next(self) -> None:
        """Begin the next episode of each lane whose episode has ended."""
        self._autoreset()
        self._writer.spend(self._spent(perf_counter_ns()))  # now, because there may be no later fragment

    def waited(self, kind: int, began: int) -> None:
        """Record a wait from `began` (ns) until now."""
        now = perf_counter_ns()
        self._track.waited(kind, began, now, self._runner.counted)
        self._runner.spend(kind, now - began)

    def close(self) -> None:
        """Close the envs. Warnings of their close() are reported like failures, once for all workers."""
        self._track.cut(perf_counter_ns(), self._runner.counted)
        with warnings.catch_warnings(record=True, action="ignore") as caught:
            warnings.simplefilter("always", RuntimeWarning)
            self._runner.close()
        for one in caught:
            self._heartbeats.report(self._place, str(one.message))

    def _report_notes(self) -> None:
        for note in self._runner.messages():
            self._heartbeats.report(self._place, note)

    def _report_ready(self, began: int) -> None:
        """`began` (ns): when the environments were complete and their first episodes began."""
        self._runner.spent()
        self._heartbeats.memory["ready"][self._place] = perf_counter_ns()
        self._heartbeats.memory["peak"][self._place] = _peak()
        died = int(self._heartbeats.memory["died"][self._place])
        now = perf_counter_ns()
        if died:
            self._runner.spend(DOWN, now - died)
        self._track.ready(began, now, self._runner.counted)

    def _load(self, grant: Grant) -> None:
        if grant.version == KEEP:
            return
        mailbox = self._shared.mailbox
        wanted = grant.version if grant.exact else mailbox.version
        if wanted != self._loaded:
            self._runner.load(mailbox.read(grant.version if grant.exact else None, self._weights))
            self._loaded = self._runner.version

    def _act(self, data: Transitions, steps: int) -> None:
        runner, writer, worker = self._runner, self._writer, self._place
        closes = self._shared.permits.pacing.closes
        version, since, counted, due = runner.version, self._since, self._steps, self._track.due
        self._heartbeats.enter(worker, phase.STEP)
        t = -1
        for t in range(steps):
            if runner.over:
                self._autoreset()
                self._heartbeats.enter(worker, phase.STEP)
            since[0] = now = perf_counter_ns()
            if now >= due:
                due = self._track.cut(now, runner.counted)
            episodes = runner.step(data, t)
            writer.row(t, runner.rows, episodes, runner.failures)
            counted[0] += 1
            for episode in episodes:
                self._begun[episode.lane - self._who.lanes.start] += 1
            if runner.failures:
                self._report_failures(runner.failures)
            if closes(worker, version, ended=runner.over):
                break
        runner.review(data, t + 1)
        if (found := self._out_of_space_before + runner.out_of_space) > self._out_of_space[0]:
            self._out_of_space[0] = found
            self._report_notes()

    def _autoreset(self) -> None:
        self._heartbeats.enter(self._place, phase.RESET)
        self._runner.autoreset()
        self._runner.over = False

    def _calling(self, what: str) -> None:
        """Note a call in the replay of an earlier run's episode: each call has its own time limit."""
        self._heartbeats.enter(self._place, phase.RESET if what == "reset" else phase.STEP)

    def _commit(self, *, exact: bool) -> None:
        now = perf_counter_ns()
        time = self._spent(now)
        if now > self._memory_checked + MEMORY_CHECK:
            self._memory_checked = now
            self._heartbeats.memory["peak"][self._place] = _peak()
        if self._own_episodes:
            memory = self._runner.state if self._runner.has_memory else None
            self._writer.describe(self._counted, memory, self._runner.position.packed() if exact else None)
        self._writer.commit(time)

    def _spent(self, now: int) -> list[int]:
        """Return the time since the last call, by kind; the rest is OTHER."""
        time = self._runner.spent()
        time[OTHER] += max(0, now - self._mark - sum(time))
        self._mark = now
        self._track.taken(now, time)
        return time

    def _report_failures(self, failures: Sequence[Failure]) -> None:
        """Report failures, each kind once."""
        for failure in failures:
            self._begun[failure.lane] += 1
            about = phase.kind(failure.report)
            if about.split(":")[0].endswith("MemoryError"):  # numpy has a subclass of it
                raise MemoryError
            if failure.cause == "quarantine":  # the failure itself was reported before
                self._heartbeats.report(self._place, failure.report.split("\n", 1)[0])
            elif about not in self._reported:
                self._reported.add(about)
                self._heartbeats.report(self._place, failure.report)


class WorkerProcess(Worker):
    """A worker that fetches its grants itself until it has to end."""

    def __init__(self, shared: WorkerResources[SharedPermits], who: WorkerId) -> None:
        self._permits = shared.permits
        self._unnotified = False  # a slot is closed, and the learner was not woken yet
        super().__init__(shared, who)

    def run(self) -> None:
        self.begin()
        while (grant := self._await_grant()) is not None:
            self.write(grant)
            self._unnotified = True
            if self.over:
                self._give_back()  # a reset may take long
                self.begin_next()
        self.close()

    def _give_back(self) -> None:
        """Give the grant back once: after that the worker may hold another ticket."""
        if self._unnotified:
            self._permits.give_back(self._place, self._writer.tally)
            self._notify_learner()

    def _notify_learner(self) -> None:
        """Wake the learner: the closed slot and the end of its grant are visible now."""
        if self._unnotified:
            self._unnotified = False
            self._writer.notify()

    def _await_grant(self) -> Grant | None:
        """Wait for a free slot, then for a grant; None if the worker has to end."""
        writer, permits, worker, heartbeats = self._writer, self._permits, self._place, self._heartbeats
        slot_freed = self._shared.port.slot_freed
        began = perf_counter_ns()
        waited, kind = False, WAIT_SLOT
        while not heartbeats.stopping:
            if writer.full(permits.pacing.slots):
                self._give_back()
                wakeup, kind = slot_freed, WAIT_SLOT
            else:
                heartbeats.enter(worker, phase.STEP)  # before `take`: an announced worker can time out
                grant = permits.take(worker, writer.tally)
                self._notify_learner()
                if grant is not None:
                    if waited:
                        self.waited(kind, began)
                    return grant
                wakeup, kind = permits.wakeups[worker], WAIT_GATE if permits.pacing.gated else WAIT_CREDIT
            waited = True
            heartbeats.wait(worker, kind, began)
            wakeup.wait(phase.TURN)
        self._give_back()
        if waited:
            self.waited(kind, began)
        return None


def _peak() -> int:
    """Return the peak memory of this process in kB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
