"""The input of collectors: what to collect, and a factory of environments and actors, sent to where these run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from freewheel.core import NO_CONTEXT, Actor, BatchSpec, Compile, Env, EnvSpec, NDArray, Transitions
from freewheel.errors import Range, check_ranges
from freewheel.registry import with_defaults
from freewheel.seeding import EpisodeSeeds, training_episodes

if TYPE_CHECKING:
    from freewheel.timeline.recording import SpanRecording

SECONDS = Range(above=0, most=1e7)  # of a timeout: at most a third of a year


class MakeEnv(Protocol):
    """Builds an Env of these lanes: a loop in this process, or (processes=True) one process per lane with a barrier.

    A fault-tolerant loop reports a failed lane in its Step and begins its next episode; otherwise a failure raises.
    """

    def __call__(self, lanes: range, *, processes: bool = False, fault_tolerant: bool = False) -> Env[Any]: ...


class MakeActor(Protocol):
    """Builds a private copy of the policy; its weights are loaded later."""

    def __call__(self) -> Actor[Any]: ...


@dataclass(frozen=True)
class SideBySide:
    """Makes `count` lanes whichever lanes are asked for. Implements MakeEnv."""

    make: MakeEnv
    count: int

    def __call__(self, lanes: range, *, processes: bool = False, fault_tolerant: bool = False) -> Env[Any]:
        return self.make(range(self.count), processes=processes, fault_tolerant=fault_tolerant)


@dataclass(frozen=True)
class RunnerFactory:
    """Builds environments and policy where they are used: only this value is sent to other processes."""

    make: MakeEnv
    actor: MakeActor
    seed: int
    first_lane: int = 0  # number of lane 0 in the whole run, if several learners share its lanes
    first_worker: int = 0  # number of worker 0 in the whole run

    def env(self, lanes: range, *, processes: bool = False, fault_tolerant: bool = False) -> Env[Any]:
        """Make environments; methods that they lack get the defaults of Env. A MakeEnv."""
        return with_defaults(self.make(lanes, processes=processes, fault_tolerant=fault_tolerant), Env)

    def episodes(self, lane: int, start: int = 0) -> EpisodeSeeds:
        """The episodes of this lane from number `start` on."""
        return training_episodes(self.seed, self.first_lane + lane, start)


def _seconds(default: float, action: str, what: str) -> Any:
    description = f"Seconds that {what} may take. Then a worker is replaced; in the run's own process, the run ends."
    return field(default=default, metadata={"flag": f"{action}_timeout", "help": description})


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds that an environment may take; on the command line --construct-timeout and so on."""

    construct: Annotated[float, SECONDS] = _seconds(120.0, "construct", "the constructor of an environment")
    reset: Annotated[float, SECONDS] = _seconds(60.0, "reset", "a reset")
    step: Annotated[float, SECONDS] = _seconds(30.0, "step", "a step")

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Settings of worker processes."""

    timeouts: Timeouts = Timeouts()
    modules: Sequence[str] = ()  # imported once, before workers are forked
    nice: int = 0  # how much lower their priority is than the learner's
    turns: int = 0  # how many free-running workers act at a time; 0: all


@dataclass(frozen=True, kw_only=True)
class SimulationSpec:
    """Settings of a batched simulator."""

    compile: Compile = "off"
    reserved_lanes: int = 0  # additional lanes that act greedily, for evaluation
    main_thread: bool = False  # the simulator works only in the main thread
    deliver_to: str | None = None  # the learner's device; None: that of the simulator


class ProcessRecorder(Protocol):
    """Records what worker processes do, in the order in which the learner's side sees it, for a later replay."""

    # A process begins with these episodes of its lanes; version: the newest one posted by then, -1 if there is none.
    def started(self, worker: int, incarnation: int, first: Sequence[int], version: int) -> None: ...
    # These rows have arrived; tickets: see pacing.episode_queue.Tickets.history.
    def acted(
        self, worker: int, incarnation: int, version: int, data: Transitions[Any], tickets: Sequence[int]
    ) -> None: ...
    def dropped(self, worker: int, data: Transitions[Any], cause: str) -> None: ...  # rows that have arrived
    # A full queue has dropped this many steps before they arrived; None: the number is unknown.
    def skipped(self, worker: int, incarnation: int, version: int, steps: int | None) -> None: ...


def _keep_waiting() -> None:
    """Do not end the wait."""


@dataclass(frozen=True, kw_only=True)
class CollectSpec:
    """The task of a collector, independent of the mode."""

    env: EnvSpec  # of all lanes
    batch: BatchSpec
    weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # names and shapes that an actor loads
    context: NDArray = field(default_factory=lambda: NO_CONTEXT)  # [K, C] of the first snapshot; C is fixed
    on_policy: bool = True  # whether rows of old versions are worth less
    whole: int | None = None  # rows that all updates of the run take together; None: not known
    longest: int | None = None  # steps after which an unfinished whole episode is an error; None: no limit
    workers: WorkerSpec = WorkerSpec()
    simulation: SimulationSpec = SimulationSpec()
    while_waiting: Callable[[], None] = _keep_waiting  # called repeatedly during a wait; an exception ends the wait
    time_to_spare: Callable[[], None] = _keep_waiting  # called once, if the learner waits for rows much of the time
    recorder: ProcessRecorder | None = None
    trace: SpanRecording | None = None  # of the timeline
