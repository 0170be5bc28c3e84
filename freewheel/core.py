"""The values that flow through a run and the bases of what moves them: read this first.

    env → Runner → Channel → Collector → Learner → Snapshot → Mailbox → Runner

Words. A *row* is one transition of one env. A *lane* is one env, numbered 0..num_envs-1 over the whole run. An *author* is one
runner: a worker, or the learner's own process. A *chunk* holds consecutive rows of one author. *S* is the number of rows that
one on-policy update consumes. *version* counts finished updates; *lag* is the version at the start of an update minus the
version that chose the action. T is time, B lanes, D the columns of an observation, A those of an action.

A run may have *contexts*, a table [K, C]: every episode gets one row of it, chosen by the episode's seed, and its
observations contain that row. The table travels with the weights (loop → Snapshot → Mailbox → Runner → Env), the row returns
with the Episode. C = 0 in a run without contexts.

Values are frozen, so a receiver may keep them. Arrays are numpy in CPU workers and torch on a device: a bare `Env`, `Step` or
`Chunk` holds numpy arrays, `Env[torch.Tensor]` holds tensors.
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
Auto: TypeAlias = Literal["auto"]  # of an option: chosen when the world is known
Compile: TypeAlias = Literal["off", "graphs"]  # whether a GPU replays fixed-shape work from CUDA graphs

#: Every worker-second is one of these (ns, in this order, in `Chunk.time`).
WORKER_TIME = ("step", "reset", "infer", "write", "wait-credit", "wait-slot", "wait-gate", "load", "down", "other")
#: Every learner-second is one of these.
LEARNER_TIME = ("observe", "update", "fit", "rollout", "publish", "wait-data", "wait-model", "eval", "save", "other")
#: Why a row may be dropped; there are no other reasons.
CAUSES = ("stale", "overflow", "nan", "shape", "env_error", "worker_death", "shutdown", "quarantine")
NO_CONTEXT: NDArray = np.zeros((0, 0), np.float32)  # the table of a run without contexts
MOST_CONTEXTS = 4096  # rows of a table that replaces the first one of a run


@dataclass(frozen=True)
class Slice:
    """Named columns of the observation: `obs[..., start:stop]`, of this shape before flattening."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ActionSpec:
    """Actions as the package sees them. Adapters scale bounded Box columns to [-1, 1]; unbounded columns stay raw."""

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
    """All that the rest of the package may know about an environment."""

    name: str
    lanes: int
    obs_size: int  # D: every observation space becomes D columns
    obs_dtype: Literal["float32", "uint8"]
    # "policy", "critic", "action_mask" (0/1), "context" and "model_state" have a meaning; others are the environment's own.
    slices: tuple[Slice, ...]
    action: ActionSpec
    device: str = "cpu"
    measures: tuple[str, ...] = ()  # names of floats reported with every finished episode
    one_per_process: bool = False  # a process can hold only one simulation
    batched_on_device: bool = False  # all lanes are one simulation, and its arrays are torch tensors on `device`
    has_final_obs: bool = True  # whether next_obs of an episode's last row is known; if not, it repeats the row's own
    context: int = 0  # C: numbers in the context of an episode; 0: no contexts
    # The spaces as plain data (policies/layout.py), kept beside the weights; empty: a policy of it cannot be used elsewhere.
    layout: Mapping[str, Any] = field(default_factory=dict, hash=False)
    model_task: Any = field(default=None, compare=False, repr=False)  # see learn/mbpo/task.py; or none is declared
    bounds: NDArray | None = field(default=None, compare=False, repr=False)  # [2, D] declared, lowest first; or none is

    def slice(self, name: str) -> Slice | None:
        return next((part for part in self.slices if part.name == name), None)

    def check_context(self, context: NDArray) -> None:
        """SetupError unless episodes can take rows of this table [K, C]; an empty table is always accepted."""
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
    """An episode that was cut short by an exception or an invalid answer; the lane's next episode replaces it."""

    lane: int  # 0 .. B - 1 within its Env
    cause: str  # env_error, nan or shape
    report: str  # which lane, where, and the env's own traceback
    in_reset: bool = False  # then no row was lost


@dataclass(frozen=True, slots=True)
class Step(Generic[A]):
    """The result of B actions in B lanes. The arrays belong to the env and are valid until its next step."""

    reward: A  # [B] float32, raw
    terminated: A  # [B] bool
    truncated: A  # [B] bool
    next_obs: A  # [B, D] the true successor, never a reset observation
    valid: A  # [B] bool: False where no transition happened (a reset that took a step, an env that failed)
    measures: A  # [B, M] float32, read where the episode has just ended
    reset_ns: int = 0  # how much of this step was spent on resets, where the env cannot defer them to `autoreset`
    failures: tuple[Failure, ...] = ()  # only of a fault-tolerant Env; others raise


@dataclass(frozen=True, slots=True)
class Transitions(Generic[A]):
    """Aligned rows [T, B, ...]. Where `valid` is False there is no transition and the other fields have no meaning."""

    obs: A  # [T, B, D]
    action: A  # [T, B] int64 or [T, B, A] float32, as chosen (before any clipping)
    log_prob: A  # [T, B] float32 of the policy that chose it
    reward: A  # [T, B] float32, raw
    terminated: A  # [T, B] bool: the task ended; the value of the future is 0
    truncated: A  # [T, B] bool: the time limit ended; the value of the future is V(next_obs)
    next_obs: A  # [T, B, D]
    valid: A  # [T, B] bool


TRANSITION_FIELDS = tuple(field.name for field in fields(Transitions))


@dataclass(frozen=True, slots=True)
class Origin:
    """Who wrote a chunk. `sequence` has no gaps within one incarnation; lanes are lane0 .. lane0 + B - 1."""

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
    """Rows of ONE author under ONE version of the policy."""

    data: Transitions[A]
    version: int
    origin: Origin
    episodes: tuple[Episode, ...]
    state: A  # [B, H] the actor's memory before row 0; H = 0 for policies without one
    time: NDArray  # [len(WORKER_TIME)] int64, ns since the author's previous chunk
    rows: int  # valid rows in data


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Weights, and the contexts to act in. A learner fills in the weights; the loop adds the contexts when it publishes."""

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
    """What one update learns from; the same value for collectors and learners."""

    steps: int  # of each lane
    lanes: int
    episodes: int | None = None  # this many whole episodes, one in every lane of a chunk, instead of S rows
    max_lag: int | None = None  # rows older than this are never learned from; None: no bound

    @property
    def rows(self) -> int:
        """S: rows that an on-policy update consumes."""
        return self.steps * self.lanes


@dataclass(frozen=True)
class RowCounts:
    """Row counts of a collector or a learner; the ledger adds them up and checks that they balance."""

    produced: int = 0  # a step returned and its row was counted
    trained: int = 0  # used by an update, or stored in replay
    queued: int = 0  # committed, not yet used
    open: int = 0  # in a fragment that is still being written
    dropped: Mapping[str, int] = field(default_factory=dict)  # by cause, see CAUSES

    @property
    def done(self) -> int:
        """Rows that are finished, so that as many new ones may be collected."""
        return self.trained + sum(self.dropped.values())


@dataclass(frozen=True, slots=True)
class Tick:
    """What one iteration of the loop did."""

    chunks: Sequence[Chunk[Any]]  # delivered to the learner in this iteration
    env_steps: int  # rows delivered so far
    version: int  # updates finished so far
    metrics: Metrics | None  # of the update, if there was one


def to_numpy(array: Array) -> NDArray:
    """As a numpy array, copied from its device if necessary."""
    return np.asarray(array if isinstance(array, np.ndarray) else array.cpu())


@dataclass(frozen=True, slots=True)
class EpisodePrefix:
    """An episode under way: by its seed, its context and its actions it can be brought to this point again."""

    action: NDArray  # [n] or [n, A], n > 0
    obs: NDArray  # [D] what the last of them led to
    ret: float  # the sum of the rewards
    context: NDArray  # [K, C] the table of contexts when it began


class SeedStream(Protocol):
    """The seeds of one lane's episodes, in order; small and picklable."""

    def number(self, k: int) -> int: ...  # the number of the k-th episode of this stream
    def seed(self, k: int) -> int: ...  # and its seed


class Env(ABC, Generic[A]):
    """B lanes stepped together; nothing else knows the simulator.

    Call `autoreset` after a step in which a lane ended or failed; it is separate so that a row can be sent before a slow reset.
    An episode with seed s that begins after `set_context(context)` gets row seeding.pick(s, K) of it.
    """

    @property
    @abstractmethod
    def spec(self) -> EnvSpec: ...
    @abstractmethod
    def set_context(self, context: NDArray) -> None: ...  # [K, C], which the env may keep; see EnvSpec.check_context
    @abstractmethod
    def reset(self, seeds: Sequence[SeedStream]) -> A: ...  # one stream a lane; the k-th reset of a lane takes seed(k)
    @abstractmethod
    def step(self, action: A) -> Step[A]: ...
    @abstractmethod
    def autoreset(self) -> A: ...  # begin the next episode of lanes that ended; [B, D] what to act on next
    @abstractmethod
    def render(self) -> NDArray | str | None: ...  # lane 0: RGB [H, W, 3], text, or nothing
    @abstractmethod
    def close(self) -> None: ...

    # What an Env may do besides. `replay` is like `reset`, and plays again what is given, lane by lane; a lane whose episode does
    # not come to the same point begins the next one. It returns what to act on [B, D], and for each lane why it did not; None,
    # and nothing is done: it cannot bring episodes back. It calls `calling` with "reset" or "step" before each of them.
    def replay(
        self, seeds: Sequence[SeedStream], played: Sequence[EpisodePrefix | None], calling: Callable[[str], None]
    ) -> tuple[A, list[str]] | None:
        return None

    # From now on, write the lane (0 .. B - 1) into lane[0] before it is stepped, and call reset(lane, seed) before it is reset.
    def watch(self, lane: memoryview, reset: Callable[[int, int], None]) -> None: ...


class Actor(Protocol[A]):
    """A private copy of the policy, updated only by snapshots.

    A recurrent policy has `state_size` numbers of memory for each lane, which `act` takes and returns. The caller stores them
    and sets them to zero where an episode begins (None: zero in every lane).
    """

    @property
    def state_size(self) -> int: ...  # H; 0: no memory
    # `obs` is [B, D] and `state` is [B, H].
    def act(self, obs: A, rng: np.random.Generator, *, state: A | None = None, greedy: bool = False) -> Decision[A]: ...
    def load(self, snapshot: Snapshot) -> None: ...


class Collector(AbstractContextManager["Collector"], ABC):
    """One mode of collection: weights in, chunks out. Leaving the `with` block leaves nothing running."""

    @abstractmethod
    def publish(self, snapshot: Snapshot, done: int) -> None: ...  # never waits for a worker; done: see RowCounts.done
    @abstractmethod
    def collect(self, wait: bool) -> Sequence[Chunk[Any]]: ...  # wait: until there is one or oldest() moves, or raise
    @abstractmethod
    def oldest(self) -> int | None: ...  # smallest version still open or queued here; None: nothing is
    @abstractmethod
    def rows(self) -> RowCounts: ...
    @abstractmethod
    def stats(self) -> Mapping[str, float | None]: ...
    @abstractmethod
    def messages(self) -> Sequence[str]: ...  # new messages for the user, each once
    @abstractmethod
    def summary(self) -> Mapping[str, Any]: ...  # for summary.json; also available after the end
    @abstractmethod
    def state_dict(self) -> dict[str, Array]: ...  # what a resumed run continues from; without rows under way
    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Array]) -> None: ...  # call it before entering the collector

    # What a Collector may do besides:
    main_thread: bool = False  # `serve` runs in the main thread, and the loop in another one, which calls `stop`

    def serve(self) -> None: ...  # simulate
    def stop(self) -> None: ...  # end it
    def workers(self) -> Sequence[WorkerState]:  # what each is doing; for any thread, until the collector is closed
        return ()

    def eval_episodes(self) -> list[Episode] | None:  # new ones of reserved lanes, which are not learned from
        return None  # there are no such lanes

    def plant(self) -> tuple[Settings, Settings, Settings] | None:  # what `adjust` may choose: least, present, most
        return None  # nothing can be changed while it collects

    def adjust(self, settings: Settings) -> None: ...  # from the next fragments on; no promise depends on it


class Learner(ABC):
    """One algorithm: chunks in, snapshots out. It does not know how its data was collected."""

    version: int = 0  # updates finished so far

    @property
    @abstractmethod
    def ready(self) -> bool: ...  # may update now
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

    # What a Learner may do besides:
    learning_rate: float = math.nan  # of the next update; what is assigned ends a schedule. NaN: it cannot be changed
    burst: int = 0  # updates at a time; what is learned does not depend on how many. 0: it has no such choice
    not_finite: str | None = None  # in the update behind this version, put back; empty: nothing. None: it does not look
    remedy: str = ""  # what to do about numbers that are not finite

    @property
    def hungry(self) -> bool:  # wants chunks now; `ready` or `hungry` is always true
        return not self.ready

    @property
    def buffer_util(self) -> float:  # 0..1: how full its buffer is
        return float(self.ready)

    @property
    def fallback(self) -> str:  # why it does not replay its updates from CUDA graphs; empty: it does, or has not begun
        return ""

    # Too large to be saved whole again and again; a name has letters, digits and _. Of the rows, state_dict has the counts.
    def buffers(self) -> Mapping[str, RowBuffer]:
        return {}

    # Copies by name: weights of policy and critics, and statistics. None: it hands over nothing.
    def learned(self) -> dict[str, NDArray] | None:
        return None

    # What others have made of it, an average for example; in the next snapshot. Its optimiser and its rows stay.
    def adopt(self, learned: Mapping[str, NDArray]) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no `adopt`")


class RowBuffer(Protocol):
    """Rows [row_bytes] that a learner keeps, numbered from 0 as they are added; those from `added - count` on are stored."""

    added: int
    count: int
    # Called before rows with smaller numbers than this are overwritten; None: nobody is interested.
    before_overwriting: Callable[[int], None] | None

    @property
    def row_bytes(self) -> int: ...
    @property
    def shared(self) -> bool: ...  # another thread may read it
    def read(self, first: int, end: int) -> NDArray: ...  # a copy of stored rows [first, end), on the CPU
    def write(self, first: int, rows: NDArray) -> None: ...  # restores stored rows; `added` and `count` stay


class Executor(Protocol):
    """Runs one function, one call after the other: in the caller's thread, in another thread, or in a process."""

    @property
    def busy(self) -> bool: ...
    def submit(self, argument: Any) -> None: ...
    def result(self, wait: float = 0.0) -> Any: ...  # of the oldest call, or the error that it raised; None: not yet


#: Makes executors, which end together with their maker: (build, what), where `build` is called where the function will run.
MakeExecutor: TypeAlias = Callable[[Callable[[], Callable[[Any], Any]], str], Executor]
