"""What a worker process does: act within its grants, write rows into its slots, say what happens, end when told."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import NamedTuple, Protocol

import cloudpickle  # type: ignore[import-untyped]

from freewheel.core import WORKER_TIME, Failure, NDArray, SeedStream, Transitions
from freewheel.errors import EnvError, FreewheelError
from freewheel.rollout.factory import RunnerFactory
from freewheel.rollout.runner import Author, Runner
from freewheel.rollout.single_env_runner import SingleEnv, SingleEnvRunner
from freewheel.seeding import training_episodes
from freewheel.transport.forkserver import settle
from freewheel.transport.shm import heartbeats as phase
from freewheel.transport.shm.channel import Port, Tally, Writer
from freewheel.transport.shm.heartbeats import Heartbeats
from freewheel.transport.shm.mailbox import NEVER, Mailbox
from freewheel.transport.shm.wakeup import Wakeups

WAIT_CREDIT, WAIT_SLOT, WAIT_GATE, DOWN, OTHER = (
    WORKER_TIME.index(kind) for kind in ("wait-credit", "wait-slot", "wait-gate", "down", "other")
)

WEIGH = 500_000_000  # ns between two looks at its own memory
KEEP = -2  # no other weights than those already loaded


class Grant(NamedTuple):
    """Leave to act."""

    steps: int
    version: int  # at least
    exact: bool = False  # this version and no newer


class Permits(Protocol):
    """How a mode paces its workers."""

    def take(self, worker: int, tally: Tally) -> Grant | None: ...  # after giving back; None: wait at its wakeup
    def over(self, worker: int, version: int, ended: bool) -> bool: ...  # after each step: close the fragment?
    def give_back(self, worker: int, tally: Tally) -> None: ...  # its fragment is queued, and it may not take soon
    @property
    def wakeups(self) -> Wakeups: ...  # a worker's rings when there may be a grant for it
    @property
    def gated(self) -> bool: ...  # it is the gate that they wait for
    def streams(self, worker: int) -> Sequence[SeedStream]: ...  # the episodes its lanes play; () for the lanes' own


@dataclass(frozen=True)
class WorkerResources:
    """All that a worker shares with the learner."""

    recipe: bytes  # a cloudpickled RunnerFactory
    port: Port
    mailbox: Mailbox
    heartbeats: Heartbeats
    permits: Permits
    context: NDArray  # [K, C] for the episodes that begin before there is mail


@dataclass(frozen=True)
class Post:
    """Which worker this is."""

    worker: int
    incarnation: int
    lanes: range


def work(desk: WorkerResources, post: Post) -> None:
    """The main function of a worker process."""
    try:
        _Worker(desk, post).run()
    except FreewheelError as error:
        desk.heartbeats.say(post.worker, str(error))
        sys.exit(phase.HOPELESS if isinstance(error, EnvError) and error.cause == "quarantine" else 1)
    except MemoryError:
        desk.heartbeats.say(post.worker, f"out of memory, peak {_peak() // 1024} MB")
        sys.exit(1)


class _Worker:
    def __init__(self, desk: WorkerResources, post: Post) -> None:
        self._desk, self._post, self._heartbeats = desk, post, desk.heartbeats
        worker, memory = post.worker, desk.heartbeats.memory
        recipe: RunnerFactory = cloudpickle.loads(desk.recipe)
        begun = memory["begun"][worker].tolist()
        streams = desk.permits.streams(worker) or [
            training_episodes(recipe.seed, lane, start=start) for lane, start in zip(post.lanes, begun, strict=True)
        ]
        author = Author(recipe.seed, post.lanes, worker=worker, incarnation=post.incarnation, streams=streams)
        self._begun = memory["begun"][worker]
        self._steps, self._since = memory.cells("steps", worker), memory.cells("since", worker)
        self._complaints: set[str] = set()
        self._loaded, self._weights = NEVER, desk.mailbox.room()
        self._weighed = 0  # when it last looked at its memory
        self._untold = False  # something was committed that the learner has not been woken for
        self._heartbeats.enter(worker, phase.CONSTRUCT)
        env = recipe.make(post.lanes, fault_tolerant=True)
        self._runner = (
            SingleEnvRunner(recipe, post.lanes, env=env, author=author)
            if isinstance(env, SingleEnv)
            else Runner(recipe, post.lanes, env=env, author=author)
        )
        self._writer = Writer(desk.port, worker, post.incarnation)

    def run(self) -> None:
        self._heartbeats.enter(self._post.worker, phase.RESET)
        self._runner.set_context(self._desk.context)
        self._runner.begin()
        self._begun += 1
        settle()
        self._report_ready()
        self._mark = perf_counter_ns()
        while self._fragment():
            pass
        self._runner.close()

    def _report_ready(self) -> None:
        self._runner.spent()
        died = int(self._heartbeats.memory["died"][self._post.worker])
        if died:
            self._runner.spend(DOWN, perf_counter_ns() - died)

    def _fragment(self) -> bool:
        """Write the next fragment; False when told to end."""
        grant = self._await_grant()
        if grant is None:
            return False
        self._load(grant)
        data = self._writer.begin(self._runner.version)
        self._act(data, grant.steps)
        self._commit()
        if self._runner.over:
            self._give_back()  # a reset may take long
            self._renew()
        return not self._heartbeats.stopping

    def _give_back(self) -> None:
        """What is left of the grant, once: a ticket that was drawn since is another one."""
        if self._untold:
            self._desk.permits.give_back(self._post.worker, self._writer.tally)
            self._tell()

    def _tell(self) -> None:
        """Wake the learner: it will see what was committed, and that nobody acts on the version of that here any more."""
        if self._untold:
            self._untold = False
            self._writer.notify()

    def _load(self, grant: Grant) -> None:
        if grant.version == KEEP:
            return
        mailbox = self._desk.mailbox
        wanted = grant.version if grant.exact else mailbox.version
        if wanted != self._loaded:
            self._runner.load(mailbox.read(grant.version if grant.exact else None, self._weights))
            self._loaded = self._runner.version

    def _act(self, data: Transitions, steps: int) -> None:
        runner, writer, permits, worker = self._runner, self._writer, self._desk.permits, self._post.worker
        version, since, counted = runner.version, self._since, self._steps
        self._heartbeats.enter(worker, phase.STEP)
        for t in range(steps):
            if runner.over:
                self._renew()
                self._heartbeats.enter(worker, phase.STEP)
            since[0] = perf_counter_ns()
            episodes = runner.step(data, t)
            writer.row(t, runner.rows, episodes, runner.failures)
            counted[0] += 1
            for episode in episodes:
                self._begun[episode.lane - self._post.lanes.start] += 1
            if runner.failures:
                self._complain(runner.failures)
            if permits.over(worker, version, runner.over):
                break

    def _renew(self) -> None:
        self._heartbeats.enter(self._post.worker, phase.RESET)
        self._runner.autoreset()
        self._runner.over = False

    def _commit(self) -> None:
        now = perf_counter_ns()
        time = self._runner.spent()
        time[OTHER] += max(0, now - self._mark - sum(time))
        self._mark = now
        if now > self._weighed + WEIGH:
            self._weighed = now
            self._heartbeats.memory["peak"][self._post.worker] = _peak()
        self._writer.commit(time)
        self._untold = True

    def _await_grant(self) -> Grant | None:
        """A slot, then leave to act; None when told to end."""
        writer, permits, worker, heartbeats = self._writer, self._desk.permits, self._post.worker, self._heartbeats
        room = self._desk.port.room
        began = perf_counter_ns()
        waited, kind = False, WAIT_SLOT
        while not heartbeats.stopping:
            if writer.full():
                self._give_back()
                wakeup, kind = room, WAIT_SLOT
            else:
                heartbeats.enter(worker, phase.STEP)  # before it announces: whoever is announced can be timed out
                grant = permits.take(worker, writer.tally)
                self._tell()
                if grant is not None:
                    if waited:
                        self._runner.spend(kind, perf_counter_ns() - began)
                    return grant
                wakeup, kind = permits.wakeups[worker], WAIT_GATE if permits.gated else WAIT_CREDIT
            waited = True
            heartbeats.enter(worker, phase.WAIT)
            wakeup.wait(phase.TURN)
        self._give_back()
        return None

    def _complain(self, failures: Sequence[Failure]) -> None:
        """Say what went wrong, each thing once."""
        for failure in failures:
            self._begun[failure.lane] += 1
            about = phase.kind(failure.report)
            if about.split(":")[0].endswith("MemoryError"):  # numpy has one of its own
                raise MemoryError
            if failure.cause == "quarantine":  # what it failed of has been said
                self._heartbeats.say(self._post.worker, failure.report.split("\n", 1)[0])
            elif about not in self._complaints:
                self._complaints.add(about)
                self._heartbeats.say(self._post.worker, failure.report)


def _peak() -> int:
    """kB of memory this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
