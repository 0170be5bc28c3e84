"""The values that flow through a run, and the base classes of the parts that exchange them. Read this first.

    env → Runner → Channel → Collector → Learner → Snapshot → Mailbox → Runner

Terms. A *row* is one transition of one env. A *lane* is one env, numbered 0..num_envs-1 over the whole run. An *author*
is one runner: a worker, or the learner's own process. A *chunk* holds consecutive rows of one author. *S* is the number
of rows that one on-policy update consumes. *version* counts finished updates; *lag* is the version at the start of an
update minus the version that chose the action. T is time, B lanes, D observation columns, A action columns.

A run may have *contexts*, a table [K, C]: every episode gets one row of it, chosen by the episode's seed, and its
observations contain that row. The table travels with the weights (loop → Snapshot → Mailbox → Runner → Env), the row
returns with the Episode. C = 0 in a run without contexts.

Values are frozen, so a receiver may keep them. Arrays are numpy in CPU workers and torch on a device: `Env`, `Step` and
`Chunk` without a parameter hold numpy arrays, `Env[torch.Tensor]` holds tensors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import TypeVar

from freewheel.errors import SetupError

if TYPE_CHECKING:
    import torch

    from freewheel.metrics.workers import WorkerState
    from freewheel.pacing.control import Settings

    Array: TypeAlias = npt.NDArray[Any] | torch.Tensor
else:
    Array: TypeAlias = npt.NDArray[Any]

NDArray: TypeAlias = npt.NDArray[Any]
A = TypeVar("A", bound="Array", default=NDArray)
Metrics: TypeAlias = Mapping[str, float]
Auto: TypeAlias = Literal["auto"]  # an option that is chosen when the environment is known
Compile: TypeAlias = Literal["off", "graphs"]  # whether a GPU replays fixed-shape work from CUDA graphs

#: Every worker-second has one of these kinds; `Chunk.time` holds their ns in this order.
WORKER_TIME = ("step", "reset", "infer", "write", "wait-credit", "wait-slot", "wait-gate", "load", "down", "other")
#: Every learner-second has one of these kinds.
LEARNER_TIME = ("observe", "update", "fit", "rollout", "publish", "wait-data", "wait-model", "eval", "save", "other")
#: The only reasons for which a row may be dropped.
CAUSES = ("stale", "overflow", "nan", "shape", "env_error", "worker_death", "shutdown", "quarantine")
NO_CONTEXT: NDArray = np.zeros((0, 0), np.float32)  # the table of a run without contexts
MOST_CONTEXTS = 4096  # most rows of a table that replaces the first one of a run


@dataclass(frozen=True)
class Slice:
    """Named columns of the observation, `obs[..., start:stop]`, and their shape before flattening."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ActionSpec:
    """The internal form of actions. Adapters scale bounded Box columns to [-1, 1]; unbounded columns stay raw."""

    kind: Literal["discrete", "box"]
    size: int  # discrete: number of choices; box: columns
    low: tuple[float, ...] = ()  # box only: -1 or -inf for each column
    high: tuple[float, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return () if self.kind == "discrete" else (self.size,)

    @property
    def dtype(self) -> str:
        return "int64" if self.kind == "discrete" else "float32"


@dataclass(frozen=True)
class EnvSpec:
    """Everything the rest of the package may know about an environment."""

    name: str
    lanes: int
    obs_size: int  # D: every observation space becomes D columns
    obs_dtype: Literal["float32", "uint8"]
    # "policy", "critic", "action_mask" (0/1), "context" and "model_state" have a fixed meaning; other names are free.
    slices: tuple[Slice, ...]
    action: ActionSpec
    device: str = "cpu"
    measures: tuple[str, ...] = ()  # names of the floats reported with every finished episode
    one_per_process: bool = False  # a process can hold only one simulation
    batched_on_device: bool = False  # all lanes are one simulation, and its arrays are torch tensors on `device`
    has_final_obs: bool = True  # whether next_obs of an episode's last row is known; if not, it repeats that row's obs
    context: int = 0  # C: numbers in the context of an episode; 0: no contexts
    # The spaces as plain data (policies/layout.py), saved with the weights; empty: its policies need the environment.
    layout: Mapping[str, Any] = field(default_factory=dict, hash=False)
    model_task: Any = field(default=None, compare=False, repr=False)  # see learn/mbpo/task.py; None: not declared
    bounds: NDArray | None = field(default=None, compare=False, repr=False)  # [2, D] declared: lowest, highest

    def slice(self, name: str) -> Slice | None:
        return next((part for part in self.slices if part.name == name), None)

    def check_context(self, context: NDArray) -> None:
        """Raise SetupError unless episodes accept rows of this table [K, C]; an empty table is always accepted."""
        if not context.size or context.shape[1] == self.context:
            return
        if self.context:
            raise SetupError(f"{self.name} takes contexts of {self.context} numbers, not {context.shape[1]}")
        single = "it has to take options['context'] in reset() and show it as 'context' in a Dict observation"
        remedy = f"{single} (a vector env options['contexts'], see envs/vector.py)"
        if self.batched_on_device:
            remedy = "all its lanes are one simulation, leave the contexts out"
        raise SetupError(f"{self.name} does not take contexts: {remedy}")


@dataclass(frozen=True, slots=True)
class Failure:
    """An episode that an exception or an invalid return value cut short; the lane's next episode replaces it."""

    lane: int  # 0 .. B - 1 within its Env
    cause: str  # env_error, nan or shape
    report: str  # the lane, the place and the env's traceback
    in_reset: bool = False  # True: no row was lost


@dataclass(frozen=True, slots=True)
class Step(Generic[A]):
    """The result of B actions in B lanes. The arrays belong to the env and are valid until its next step."""

    reward: A  # [B] float32, raw
    terminated: A  # [B] bool
    truncated: A  # [B] bool
    next_obs: A  # [B, D] the true successor, never a reset observation
    valid: A  # [B] bool: False where no transition happened (a reset that took a step, an env that failed)
    measures: A  # [B, M] float32, valid in lanes whose episode has just ended
    reset_ns: int = 0  # time of this step spent on resets that the env cannot defer to `autoreset`
    failures: tuple[Failure, ...] = ()  # only from a fault-tolerant Env; others raise


@dataclass(frozen=True, slots=True)
class Transitions(Generic[A]):
    """Aligned rows [T, B, ...]. Where `valid` is False, there is no transition and the other fields are undefined."""

    obs: A  # [T, B, D]
    action: A  # [T, B] int64 or [T, B, A] float32, as chosen, before clipping
    log_prob: A  # [T, B] float32, from the policy that chose the action
    reward: A  # [T, B] float32, raw
    terminated: A  # [T, B] bool: the task ended; the value of the future is 0
    truncated: A  # [T, B] bool: a time limit ended the episode; the value of the future is V(next_obs)
    next_obs: A  # [T, B, D]
    valid: A  # [T, B] bool


TRANSITION_FIELDS = tuple(field.name for field in fields(Transitions))


@dataclass(frozen=True, slots=True)
class Origin:
    """The author of a chunk. `sequence` has no gaps within an incarnation; its lanes are lane0 .. lane0 + B - 1."""

    worker: int
    incarnation: int
    sequence: int
    lane0: int


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished episode."""

    lane: int
    number: int
    seed: int
    context: tuple[float, ...]  # [C]
    ret: float
    length: int
    seconds: float
    measures: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Chunk(Generic[A]):
    """Rows of exactly one author under exactly one version of the policy."""

    data: Transitions[A]
    version: int
    origin: Origin
    episodes: tuple[Episode, ...]
    state: A  # [B, H] the actor's memory before row 0; H = 0 without memory
    time: NDArray  # [len(WORKER_TIME)] int64, ns of each kind since the author's previous chunk
    rows: int  # valid rows in data


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Weights and contexts for actors. A learner provides the weights; the loop adds the contexts when it publishes."""

    version: int
    params: Mapping[str, Array]
    context: NDArray = field(default_factory=lambda: NO_CONTEXT)  # [K, C] float32


@dataclass(frozen=True, slots=True)
class Decision(Generic[A]):
    """An actor's choice for B lanes."""

    action: A
    log_prob: A
    state: A  # [B, H] the memory for the next call


@dataclass(frozen=True)
class BatchSpec:
    """The rows of one update; collectors and learners share this value."""

    steps: int  # per lane
    lanes: int
    episodes: int | None = None  # this many whole episodes, one in each lane of a chunk, instead of S rows
    max_lag: int | None = None  # rows with a larger lag are never learned from; None: no bound

    @property
    def rows(self) -> int:
        """S: rows that an on-policy update consumes."""
        return self.steps * self.lanes


@dataclass(frozen=True)
class RowCounts:
    """Row counts of a collector or a learner. The ledger adds them and checks that they balance."""

    produced: int = 0  # rows of finished steps
    trained: int = 0  # used by an update, or stored in replay
    queued: int = 0  # committed but not used yet
    open: int = 0  # in a fragment that is still being written
    dropped: Mapping[str, int] = field(default_factory=dict)  # by cause, see CAUSES

    @property
    def done(self) -> int:
        """Finished rows; the same number of new rows may be collected."""
        return self.trained + sum(self.dropped.values())


@dataclass(frozen=True, slots=True)
class Tick:
    """The outcome of one iteration of the loop."""

    chunks: Sequence[Chunk[Any]]  # delivered to the learner in this iteration
    env_steps: int  # rows delivered so far
    version: int  # updates finished so far
    metrics: Metrics | None  # of the update, if there was one


def to_numpy(array: Array) -> NDArray:
    """Convert to a numpy array, copied from its device if necessary."""
    return np.asarray(array if isinstance(array, np.ndarray) else array.cpu())


@dataclass(frozen=True, slots=True)
class EpisodePrefix:
    """An unfinished episode, which can be brought to this point again by its seed, context and actions."""

    action: NDArray  # [n] or [n, A], n > 0
    obs: NDArray  # [D] the observation after the last action
    ret: float  # the sum of the rewards so far
    context: NDArray  # [K, C] the table of contexts when the episode began


class SeedStream(Protocol):
    """The seeds of one lane's episodes, in order; small and picklable."""

    def number(self, k: int) -> int: ...  # the number of the k-th episode of this stream
    def seed(self, k: int) -> int: ...  # the seed of that episode


class Env(ABC, Generic[A]):
    """B lanes that are stepped together. Only an Env knows the simulator.

    Call `autoreset` after a step in which a lane ended or failed; it is separate so that a row can be sent before a
    slow reset. An episode with seed s that begins after `set_context(context)` gets its row seeding.pick(s, K).
    """

    @property
    @abstractmethod
    def spec(self) -> EnvSpec: ...
    @abstractmethod
    def set_context(self, context: NDArray) -> None: ...  # [K, C], which the env may keep; see EnvSpec.check_context
    @abstractmethod
    def reset(self, seeds: Sequence[SeedStream]) -> A: ...  # one stream per lane; the k-th reset of a lane uses seed(k)
    @abstractmethod
    def step(self, action: A) -> Step[A]: ...
    @abstractmethod
    def autoreset(self) -> A: ...  # begin the next episode of lanes that ended; returns the next obs [B, D]
    @abstractmethod
    def render(self) -> NDArray | str | None: ...  # lane 0 as RGB [H, W, 3], text or None
    @abstractmethod
    def close(self) -> None: ...

    # Optional methods. `replay` resets, then repeats the prefix of each lane; a lane that does not reach the same point
    # begins its next episode. It returns the next obs [B, D] and, for each lane, why its replay failed. An env that
    # cannot replay does nothing and returns None. It calls `calling` with "reset" or "step" before each of them.
    def replay(
        self, seeds: Sequence[SeedStream], played: Sequence[EpisodePrefix | None], calling: Callable[[str], None]
    ) -> tuple[A, list[str]] | None:
        return None

    # From now on, write the lane (0 .. B - 1) into lane[0] before its steps; call reset(lane, seed) before its resets.
    def watch(self, lane: memoryview, reset: Callable[[int, int], None]) -> None: ...


class Actor(Protocol[A]):
    """A private copy of the policy, which only snapshots update.

    A recurrent policy has `state_size` numbers of memory per lane, which `act` takes and returns. The caller stores
    them and sets them to zero when an episode begins (None: zero in every lane).
    """

    @property
    def state_size(self) -> int: ...  # H; 0: no memory
    # `obs` is [B, D] and `state` is [B, H].
    def act(self, obs: A, rng: np.random.Generator, *, state: A | None = None, greedy: bool = False) -> Decision[A]: ...
    def load(self, snapshot: Snapshot) -> None: ...


class Collector(AbstractContextManager["Collector"], ABC):
    """A mode of collection, which takes weights and returns chunks. Leaving its `with` block ends all that it runs."""

    @abstractmethod
    def publish(self, snapshot: Snapshot, done: int) -> None: ...  # does not wait for workers; done: see RowCounts.done
    @abstractmethod
    def collect(self, wait: bool) -> Sequence[Chunk[Any]]: ...  # wait: for a chunk or a change of oldest(), or raise
    @abstractmethod
    def oldest(self) -> int | None: ...  # smallest version of open or queued rows; None: there are none
    @abstractmethod
    def rows(self) -> RowCounts: ...
    @abstractmethod
    def stats(self) -> Mapping[str, float | None]: ...
    @abstractmethod
    def messages(self) -> Sequence[str]: ...  # new messages for the user, each returned once
    @abstractmethod
    def summary(self) -> Mapping[str, Any]: ...  # for summary.json; also available after closing
    @abstractmethod
    def state_dict(self) -> dict[str, Array]: ...  # for resuming a run; without rows in progress
    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Array]) -> None: ...  # call before entering the collector

    # Optional attributes and methods:
    main_thread: bool = False  # True: `serve` runs in the main thread; the loop runs in another one and calls `stop`

    def serve(self) -> None: ...  # run the simulation
    def stop(self) -> None: ...  # end `serve`
    def workers(self) -> Sequence[WorkerState]:  # what each worker does; for any thread until closing
        return ()

    def eval_episodes(self) -> list[Episode] | None:  # new episodes of reserved lanes, whose rows are not learned from
        return None  # there are no such lanes

    def plant(self) -> tuple[Settings, Settings, Settings] | None:  # the range for `adjust`: least, present, most
        return None  # nothing can be changed while it collects

    def adjust(self, settings: Settings) -> None: ...  # applies from the next fragments on; no guarantee depends on it


class Learner(ABC):
    """An algorithm, which takes chunks and returns snapshots. It does not know how its data was collected."""

    version: int = 0  # updates finished so far

    @property
    @abstractmethod
    def ready(self) -> bool: ...  # whether it can update now
    @abstractmethod
    def observe(self, chunk: Chunk[Any]) -> None: ...
    @abstractmethod
    def update(self) -> Metrics: ...
    @abstractmethod
    def snapshot(self) -> Snapshot: ...
    @abstractmethod
    def rows(self) -> RowCounts: ...
    @abstractmethod
    def state_dict(self) -> dict[str, Array]: ...
    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Array]) -> None: ...

    # Optional attributes and methods:
    learning_rate: float = math.nan  # of the next update; assigning it ends a schedule. NaN: it cannot be changed
    burst: int = 0  # updates at a time, without effect on the result. 0: not adjustable
    not_finite: str | None = None  # what was not finite in the last update, now undone; empty: nothing; None: no check
    remedy: str = ""  # advice for numbers that are not finite

    @property
    def hungry(self) -> bool:  # whether it wants chunks now; `ready` or `hungry` is always true
        return not self.ready

    @property
    def buffer_util(self) -> float:  # fill level of its buffer, 0..1
        return float(self.ready)

    @property
    def fallback(self) -> str:  # why updates do not use CUDA graphs; empty: they do, or have not begun
        return ""

    # Row storage too large to save in full each time; state_dict has only its counts. Names use letters, digits and _.
    def buffers(self) -> Mapping[str, RowBuffer]:
        return {}

    # Copies by name of the weights of policy and critics, and of statistics. None: not supported.
    def learned(self) -> dict[str, NDArray] | None:
        return None

    # Replace what was learned, for example by an average, in the next snapshot. The optimiser and the rows stay.
    def adopt(self, learned: Mapping[str, NDArray]) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no `adopt`")


class RowBuffer(Protocol):
    """A learner's rows [row_bytes], numbered from 0 as they are added. The last `count` rows are stored."""

    added: int
    count: int
    # Called with n before rows with numbers below n are overwritten; None: no listener.
    before_overwriting: Callable[[int], None] | None

    @property
    def row_bytes(self) -> int: ...
    @property
    def shared(self) -> bool: ...  # whether another thread may read it
    def read(self, first: int, end: int) -> NDArray: ...  # a copy of stored rows [first, end), on the CPU
    def write(self, first: int, rows: NDArray) -> None: ...  # restore stored rows; `added` and `count` are unchanged


class Executor(Protocol):
    """Runs calls of one function one after another: in the caller's thread, another thread or a process."""

    @property
    def busy(self) -> bool: ...
    def submit(self, argument: Any) -> None: ...
    def result(self, wait: float = 0.0) -> Any: ...  # of the oldest call, or its error as a value; None: not finished


#: Makes executors from (build, what); `build` is called where the function will run. They end when their maker ends.
MakeExecutor: TypeAlias = Callable[[Callable[[], Callable[[Any], Any]], str], Executor]
