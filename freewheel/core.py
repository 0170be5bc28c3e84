"""The values that flow and the nouns that move them: read this first.

    env → Runner → Channel → Collector → Learner → Snapshot → Mailbox → Runner

Words. A *row* is one transition of one env. A *lane* is one env, numbered 0..num_envs-1 over the whole run. A *chunk* is a
fragment of consecutive rows by one author. *S* is the number of rows one on-policy update consumes. *version* counts finished
updates; *lag* is the version at the start of an update minus the version that chose the action. T is time, B lanes, D the
columns of an observation, A those of an action.

A run may have *contexts*, a table [K, C]: every episode is told one row of it, drawn by the episode's seed, and its
observations show that row. The table travels with the weights (loop → Snapshot → Mailbox → Runner → Env), the row comes back
with the Episode; C = 0 where nobody asked for any.

Values are frozen: whoever receives one may keep it. Arrays are numpy from CPU workers and torch on a device; a bare `Env`,
`Step` or `Chunk` is the numpy kind, `Env[torch.Tensor]` the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
from typing_extensions import TypeVar

from freewheel.errors import SetupError

if TYPE_CHECKING:
    import torch

    Array: TypeAlias = npt.NDArray[Any] | torch.Tensor
else:
    Array: TypeAlias = npt.NDArray[Any]

NDArray: TypeAlias = npt.NDArray[Any]
A = TypeVar("A", bound="Array", default=NDArray)
Metrics: TypeAlias = Mapping[str, float]
Compile: TypeAlias = Literal["off", "graphs"]  # whether a GPU replays fixed-shape work from CUDA graphs

#: Every worker-second is one of these (ns, in this order, in `Chunk.time`).
WORKER_TIME = (
    "step", "reset", "infer", "write", "wait-credit", "wait-slot", "wait-gate", "load", "down", "other",
)  # fmt: skip
#: Every learner-second is one of these.
LEARNER_TIME = ("observe", "update", "publish", "wait-data", "eval", "save", "other")
#: Why a row may be dropped: a closed list.
CAUSES = ("stale", "overflow", "nan", "shape", "env_error", "worker_death", "shutdown", "quarantine")
#: The table of contexts of a run that has none.
NO_CONTEXT: NDArray = np.zeros((0, 0), np.float32)


# ---------------------------------------------------------------------------------------------------------- what a world is


@dataclass(frozen=True)
class Slice:
    """A named run of columns of the observation: `obs[..., start:stop]`, of this shape before it was flattened."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ActionSpec:
    """What an action is inside the house. Bounded Box columns are scaled to [-1, 1] by the adapter; unbounded ones are raw."""

    kind: Literal["discrete", "box"]
    size: int  # discrete: number of choices; box: columns
    low: tuple[float, ...] = ()  # box only, inside the house: -1 or -inf a column
    high: tuple[float, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return () if self.kind == "discrete" else (self.size,)

    @property
    def dtype(self) -> str:
        return "int64" if self.kind == "discrete" else "float32"


@dataclass(frozen=True)
class EnvSpec:
    """All that the rest of the house may know about a world."""

    name: str
    lanes: int
    obs_size: int  # D: every observation space becomes D columns
    obs_dtype: Literal["float32", "uint8"]
    slices: tuple[
        Slice, ...
    ]  # "policy", "critic", "action_mask" (0/1) and "context" have a meaning; other names are the env's
    action: ActionSpec
    device: str = "cpu"
    measures: tuple[str, ...] = ()  # floats that ride with every finished episode
    one_per_process: bool = False  # only one simulation can live in a process
    batched_on_device: bool = (
        False  # a batched simulator: all lanes are one simulation, and its arrays are torch tensors on `device`
    )
    has_final_obs: bool = (
        True  # next_obs of an episode's last row is known; where not, it repeats the row's own observation
    )
    context: int = 0  # C: numbers of the context that an episode can be told, and then shows; 0: it cannot

    def slice(self, name: str) -> Slice | None:
        return next((part for part in self.slices if part.name == name), None)

    def check_context(self, context: NDArray) -> None:
        """SetupError unless episodes can be told rows of this table [K, C]; an empty one is always welcome."""
        if not context.size or context.shape[1] == self.context:
            return
        if self.context:
            raise SetupError(f"{self.name} shows contexts of {self.context} numbers; {context.shape[1]} were given")
        remedy = (
            "it is one simulation, leave them out"
            if self.batched_on_device
            else "it has to take options['context'] in reset() and show it as 'context' in a Dict observation "
            "(a vector env options['contexts'], see envs/vector.py)"
        )
        raise SetupError(f"episodes of {self.name} cannot be told contexts: {remedy}")


# ------------------------------------------------------------------------------------------------------- the values that flow


@dataclass(frozen=True, slots=True)
class Failure:
    """A lane that raised or lied and was cut short; its next episode begins in its place."""

    lane: int  # 0 .. B - 1 within its Env
    cause: str  # env_error, nan or shape
    report: str  # who, where, and the env's own traceback
    in_reset: bool = False  # then no row was lost


@dataclass(frozen=True, slots=True)
class Step(Generic[A]):
    """What B lanes answered to B actions. The arrays are the env's own and live until its next step."""

    reward: A  # [B] float32, raw
    terminated: A  # [B] bool
    truncated: A  # [B] bool
    next_obs: A  # [B, D] the true successor, never a reset observation
    valid: A  # [B] bool: False where no transition happened (a reset that took a step, an env that failed)
    measures: A  # [B, M] float32, read where the episode has just ended
    reset_ns: int = 0  # how much of this step went into resets, where the env cannot keep them for `autoreset`
    failures: tuple[Failure, ...] = ()  # only of an Env that was made tolerant; another raises


@dataclass(frozen=True, slots=True)
class Transitions(Generic[A]):
    """Aligned rows [T, B, ...]. Where `valid` is False the row is a gap and its other fields mean nothing to a learner."""

    obs: A  # [T, B, D]
    action: A  # [T, B] int64 or [T, B, A] float32, as chosen (before any clipping)
    log_prob: A  # [T, B] float32 of the policy that chose it
    reward: A  # [T, B] float32, raw
    terminated: A  # [T, B] bool: the world ended; the future is worth nothing
    truncated: A  # [T, B] bool: the clock ended; the future is worth V(next_obs)
    next_obs: A  # [T, B, D]
    valid: A  # [T, B] bool


@dataclass(frozen=True, slots=True)
class Origin:
    """Who wrote a chunk. `sequence` has no gaps within one incarnation; lanes are lane0 .. lane0 + B - 1."""

    worker: int
    incarnation: int
    sequence: int
    lane0: int


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished episode, as its author saw it."""

    lane: int
    number: int
    seed: int
    context: tuple[float, ...]  # [C] what it was told
    ret: float
    length: int
    seconds: float
    measures: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Chunk(Generic[A]):
    """Experience by ONE author under ONE version of the policy."""

    data: Transitions[A]
    version: int
    origin: Origin
    episodes: tuple[Episode, ...]
    state: A  # [B, H] the actor's memory before row 0; H = 0 for policies without one
    time: NDArray  # [len(WORKER_TIME)] int64, ns since the author's previous chunk
    rows: int  # valid rows in data


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Weights as a value, and the contexts to act in: a learner knows only the weights, whoever publishes adds the rest."""

    version: int
    params: Mapping[str, Array]
    context: NDArray = field(default_factory=lambda: NO_CONTEXT)  # [K, C] float32


@dataclass(frozen=True, slots=True)
class Decision(Generic[A]):
    """What an actor chose for B lanes."""

    action: A
    log_prob: A
    state: A  # [B, H] the memory to act with next


@dataclass(frozen=True)
class BatchSpec:
    """What one update learns from, said once for collectors and learners."""

    steps: int  # of each lane
    lanes: int
    episodes: int | None = None  # so many chunks, each a whole episode, instead of S rows
    max_lag: int | None = None  # rows older than this are never learned from; None: there is no bound

    @property
    def rows(self) -> int:
        """S: rows that an on-policy update consumes."""
        return self.steps * self.lanes


@dataclass(frozen=True)
class RowCounts:
    """One party's account of its rows; the ledger adds the parties up and checks that they balance."""

    produced: int = 0  # a step returned and its row was counted
    trained: int = 0  # used by an update, or stored in replay
    queued: int = 0  # committed, not yet used
    open: int = 0  # in a fragment that is still being written
    dropped: Mapping[str, int] = field(default_factory=dict)  # by cause, see CAUSES

    @property
    def done(self) -> int:
        """Rows that nobody waits for any more: this is what makes room for others."""
        return self.trained + sum(self.dropped.values())


@dataclass(frozen=True, slots=True)
class Tick:
    """What one turn of the loop did."""

    chunks: Sequence[Chunk[Any]]  # delivered to the learner in this turn
    env_steps: int  # rows delivered so far
    version: int  # updates finished so far
    metrics: Metrics | None  # of the update, if there was one


def to_numpy(array: Array) -> NDArray:
    """As numpy, whatever it is and wherever it lives."""
    return np.asarray(array if isinstance(array, np.ndarray) else array.cpu())


# -------------------------------------------------------------------------------------------------------------- the nouns


class SeedStream(Protocol):
    """The seeds of one lane's episodes, in order; small and picklable."""

    def number(self, k: int) -> int: ...  # what the k-th episode of this stream is called
    def seed(self, k: int) -> int: ...  # and the seed it starts from


class Env(Protocol[A]):
    """B lanes stepped as one; the only place that knows a simulator.

    After a step in which a lane ended or failed comes `autoreset`, so that a row can be shipped before a slow reset.
    An episode of seed s that begins after `condition(context)` is told row seeding.pick(s, K) of it.
    """

    @property
    def spec(self) -> EnvSpec: ...
    def set_context(
        self, context: NDArray
    ) -> None: ...  # [K, C], the env's to keep; SetupError as EnvSpec.check_context says
    def reset(self, seeds: Sequence[SeedStream]) -> A: ...  # one stream a lane; the k-th reset of a lane takes seed(k)
    def step(self, action: A) -> Step[A]: ...
    def autoreset(self) -> A: ...  # begin what has to begin; [B, D] what to act on next
    def render(self) -> NDArray | str | None: ...  # lane 0 for a person: RGB [H, W, 3], text, or nothing
    def close(self) -> None: ...


class Actor(Protocol[A]):
    """A private copy of the policy, refreshed only by snapshots.

    A policy may have a memory: `state_size` numbers a lane, which `act` takes and gives back. It is zero when an episode begins
    (None: in every lane); whoever steps the environment keeps it, and puts it back to zero where an episode ends.
    """

    @property
    def state_size(self) -> int: ...  # H; 0: no memory
    def act(
        self, obs: A, rng: np.random.Generator, *, state: A | None = None, greedy: bool = False
    ) -> Decision[A]: ...  # obs [B, D], state [B, H]
    def load(self, snapshot: Snapshot) -> None: ...


class Collector(AbstractContextManager["Collector"], Protocol):
    """One mode of collection: weights in, chunks out. Leaving the `with` block leaves nothing running."""

    def publish(
        self, snapshot: Snapshot, done: int
    ) -> None: ...  # latest wins; never waits for a worker. done: see RowCounts.done
    def collect(self, wait: bool) -> Sequence[Chunk[Any]]: ...  # wait: until there is one or oldest() moves, or raise
    def oldest(self) -> int | None: ...  # smallest version still open or queued here; None: nothing is
    def rows(self) -> RowCounts: ...
    def stats(self) -> Mapping[str, float | None]: ...
    def messages(self) -> Sequence[str]: ...  # what a person should read, each once
    def summary(self) -> Mapping[str, Any]: ...  # what summary.json should know; also after the end


@runtime_checkable
class EvaluatingCollector(Protocol):
    """A Collector whose simulation has reserved lanes: they act greedily and are not learned from."""

    def eval_episodes(self) -> list[Episode]: ...  # that have ended there since this was last asked


@runtime_checkable
class MainThreadCollector(Protocol):
    """A Collector whose simulator lives only in the main thread: the loop then runs in another."""

    def serve(self) -> None: ...  # simulate, until `stop`
    def stop(self) -> None: ...


class Learner(Protocol):
    """One algorithm: chunks in, snapshots out. It cannot tell how its data arrived."""

    @property
    def version(self) -> int: ...
    @property
    def ready(self) -> bool: ...  # may update now
    @property
    def hungry(self) -> bool: ...  # wants chunks now; never neither
    @property
    def buffer_util(self) -> float: ...  # 0..1: how full its buffer is
    def observe(self, chunk: Chunk[Any]) -> None: ...
    def update(self) -> Metrics: ...
    def snapshot(self) -> Snapshot: ...
    def rows(self) -> RowCounts: ...
    def state_dict(self) -> dict[str, Array]: ...
    def load_state_dict(self, state: Mapping[str, Array]) -> None: ...


@runtime_checkable
class GraphedLearner(Protocol):
    """A Learner that replays its updates from CUDA graphs where it can."""

    @property
    def fallback(self) -> str: ...  # why it does not; empty: it does, or has not begun


class Executor(Protocol):
    """Runs one function elsewhere, one call after the other: in turn with the caller, in a thread, or in a process."""

    @property
    def busy(self) -> bool: ...
    def submit(self, argument: Any) -> None: ...
    def result(self, wait: float = 0.0) -> Any: ...  # of the oldest call, or the error it ended in; None: not yet


class MakeExecutor(Protocol):
    """Makes executors. `build` makes the function, where it will run; all executors end with whoever made this."""

    def __call__(self, build: Callable[[], Callable[[Any], Any]], what: str) -> Executor: ...


class Sink(Protocol):
    """Somewhere a run is written to."""

    def write(self, row: Mapping[str, Any]) -> None: ...  # one row of metrics
    def note(self, text: str) -> None: ...  # something a person should read
    def close(self, summary: Mapping[str, Any]) -> None: ...
