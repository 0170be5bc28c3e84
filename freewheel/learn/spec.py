"""What a learner is given, and what an algorithm declares about itself; torch-free, so that help texts and workers stay light."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from freewheel.core import Array, BatchSpec, Compile, EnvSpec, Learner, NDArray, Slice
from freewheel.errors import POSITIVE, SHARE, Range, UsageError, check_ranges
from freewheel.files.memory import Need
from freewheel.registry import Registry, with_defaults

if TYPE_CHECKING:
    from freewheel.core import MakeExecutor
    from freewheel.policies.spec import PolicySpec, StartWeights

ROWS = 512  # of an on-policy update, unless its algorithm says otherwise
SIMULATED_STEPS = 64  # of each lane, with a batched simulator
Schedule = Literal["constant", "linear"]  # linear: falls to 0 over --steps


def go_on() -> None:
    """Nothing ends the work."""


def _uncounted(_kind: str) -> AbstractContextManager[object]:
    """Nobody asks where the time goes."""
    return nullcontext()


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Where and how a learner computes."""

    device: str = "cpu"
    compile: Compile = "off"


@dataclass(frozen=True, kw_only=True)
class WorldFacts:
    """What a learner may know about the world."""

    name: str = ""  # known rules of a task are found by it
    batched_on_device: bool = False  # rows come as tensors, from a batched simulator
    has_final_obs: bool = True  # the true successor of an episode's last row is known
    slices: tuple[Slice, ...] = ()  # groups of the observation
    model_task: Any = None  # what the simulator declares about itself, a learn.mbpo.task.ModelTask; or nothing


class Peers(Protocol):
    """Learners that train together: each has its share of the rows, and all have the same weights."""

    @property
    def rank(self) -> int: ...  # of this one, from 0
    @property
    def count(self) -> int: ...
    # In place, over all learners, and the same bits in each. All call it at the same points in the same order with arrays of
    # one shape and dtype; a tensor may be on the learner's device. PeerLostError: one of them is gone.
    def sum(self, array: Array) -> None: ...


class NoPeers:
    """One learner has all rows. Implements Peers."""

    rank, count = 0, 1

    def sum(self, array: Array) -> None:
        """It is the sum already."""


ALONE = NoPeers()


@dataclass(frozen=True, kw_only=True)
class Services:
    """What a run offers to its learner."""

    executors: MakeExecutor | None = None  # runs a part of the learner elsewhere; for learners that have such a part
    # All three write a row of metrics if one is due. Call one of them at least every tenth of a second, whatever takes long.
    while_waiting: Callable[[], None] = go_on  # in a wait, or in what can be done again: what it raises ends the run
    between_steps: Callable[[], None] = go_on  # where a state can be saved: ends a run out of time; signals wait
    report: Callable[[], None] = go_on  # in the middle of what has to be finished
    span: Callable[[str], AbstractContextManager[object]] = _uncounted  # a block of one kind of core.LEARNER_TIME
    peers: Peers = ALONE  # learners that train together with this one


@dataclass(frozen=True, kw_only=True)
class LearnerSpec:
    """What a learner has to do, apart from how its algorithm does it."""

    policy: PolicySpec
    batch: BatchSpec
    seed: int
    total_steps: int | None = None  # rows of the whole run, where the budget is in steps
    compute: Compute = Compute()
    world: WorldFacts = WorldFacts()
    start: StartWeights | None = None  # weights to begin with; None: drawn
    services: Services = Services()


class AlgorithmConfig(Protocol):
    """The options of one algorithm, and what the rest of a run has to know about it; options derive from this."""

    name: ClassVar[str] = ""  # for error messages
    on_policy: ClassVar[bool]  # whether rows are worth less the older the policy is that wrote them
    #: Whether its learner sums gradients over Services.peers. Options and rows of an update are those of all learners: it divides
    #: them by their number, but for the BatchSpec and the steps that a LearnerSpec has, which are its own already.
    trains_together: ClassVar[bool] = False
    publish_every: int | None = None  # rows between two publications; None: BatchSpec.rows

    @property
    def schedules_need_steps(self) -> tuple[str, ...]:
        """Options that are set to fade over --steps."""
        return ()

    @property
    def executor(self) -> Literal["serial", "async", "auto"]:
        """How parts of the learner run beside it."""
        return "serial"

    @property
    def normalises_rewards(self) -> bool:
        """Whether it learns from rewards on a scale of its own."""
        return False

    def rows_per_update(self, world: EnvSpec) -> int:
        """Rows of an update in this world, where steps of each lane are "auto"; it must not depend on how many lanes there are,
        unless they are one simulation."""
        return SIMULATED_STEPS * world.lanes if world.batched_on_device else ROWS

    def usual(self, world: EnvSpec, rows: int | None) -> Mapping[str, Any]:
        """What options that are "auto" become in this world, by name ("policy.normalize_obs"): they suit its kind of actions
        and the rows of an update, where these are known. An option that is not named here stays as it is."""
        return {"policy.normalize_obs": False}

    def about_rewards(self, rewards: NDArray) -> str:
        """What follows from rewards like these, in words; empty: nothing."""
        return ""

    def lighter(self) -> Sequence[Mapping[str, Any]]:
        """Options by dotted names for less and less work a row: the first that keep up with free workers, if none is given."""
        return ()

    def describe(self, spec: LearnerSpec) -> str:
        """One line of the plan."""
        return f"{spec.batch.rows} rows an update"

    def needs(self, spec: LearnerSpec) -> Sequence[Need]:
        """What the learner keeps in memory, at least: the network and its optimiser, and the rows of an update."""
        networks = () if spec.policy.module else (network_need(spec.policy),)
        return (*networks, Need(spec.batch.rows, "rows of an update", row_bytes(spec.policy), "--num-steps-per-env"))

    def rows_before_update(self, spec: LearnerSpec) -> int:
        """Rows that the first update takes."""
        return spec.batch.rows

    @property
    def starts_option(self) -> str:
        """The option that makes it take more than the rows of an update, if there is one."""
        return ""

    def gradient_steps(self, spec: LearnerSpec) -> int:
        """Of one update, which nothing can interrupt."""
        return 1

    def build(self, spec: LearnerSpec) -> Learner: ...  # may import torch


def make_learner(config: AlgorithmConfig, spec: LearnerSpec) -> Learner:
    """A learner, with all that the base has."""
    return with_defaults(config.build(spec), Learner)


def row_bytes(policy: PolicySpec) -> int:
    """Of a transition: both observations, the action and a few numbers."""
    width = 1 if policy.obs_dtype == "uint8" else 4
    return 2 * width * policy.obs_size + 4 * (policy.action_columns + 3)


def network_need(policy: PolicySpec, copies: int = 10) -> Need:
    """All that an update of PPO was seen to take at 2,000 x 2,000: weights, gradient, moments, what is put back and published."""
    from freewheel.policies.spec import full_layout

    count = sum(math.prod(shape) for shape in full_layout(policy).values())
    return Need(count, "weights", 4 * copies, "--policy.hidden")


#: Begins the names of running statistics among what is learned: [mean, square, count] in one vector (learn/moments.py).
STATISTICS = "statistics."
OBS_STATISTICS, RETURN_STATISTICS = f"{STATISTICS}observations", f"{STATISTICS}returns"
POLICY = "policy."  # begins the names of what acts, and of what a PPO's critic is


@dataclass(frozen=True)
class Algorithm:
    """One entry of the registry."""

    name: str
    config: type[AlgorithmConfig]
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of run options, where they differ from the usual ones


@dataclass(frozen=True)
class ReplayConfig(AlgorithmConfig):
    """Options of algorithms with a replay buffer."""

    on_policy: ClassVar[bool] = False

    lr: Annotated[float, POSITIVE] = 3e-4
    """Adam's step size."""
    batch: Annotated[int, Range(least=1, most=10**7)] = 256
    """Rows an update draws from the replay buffer."""
    gamma: Annotated[float, SHARE] = 0.99
    """Discount of the future."""
    tau: Annotated[float, Range(above=0, most=1)] = 0.005
    """How far the target critics follow the critics in each update."""
    buffer: Annotated[int, Range(least=1, most=10**10)] = 1_000_000
    """Rows that the replay buffer keeps; new rows replace the oldest."""
    learning_starts: Annotated[int, Range(least=1, most=10**10)] = 1_000
    """Rows before the first update; until then the untrained policy acts, which is close to uniform."""
    updates_per_row: Annotated[float, Range(above=0, most=10_000)] = 1.0
    """Updates per row collected, held within hard bounds in every mode."""
    replay_ratio: Annotated[float | None, Range(above=0, most=1e9)] = None
    """The same in rows: rows drawn per row collected (updates × batch / rows). Replaces updates_per_row."""
    publish_every: Annotated[int | None, Range(least=1, most=10**9)] = None
    """Rows between two publications of the policy (default: --num-steps-per-env × envs)."""

    def __post_init__(self) -> None:
        check_ranges(self, f"{self.name}.")
        if self.learning_starts > self.buffer:
            rows = f"the {self.learning_starts} rows of learning_starts"
            raise UsageError(f"{self.name}.buffer {self.buffer} cannot hold {rows}")

    @property
    def ratio(self) -> float:
        """Updates per row."""
        return self.updates_per_row if self.replay_ratio is None else self.replay_ratio / self.batch

    def usual(self, world: EnvSpec, rows: int | None) -> Mapping[str, Any]:
        head = "squashed" if world.action.kind == "box" else "categorical"
        return {**super().usual(world, rows), "policy.head": head}

    def rows_before_update(self, spec: LearnerSpec) -> int:
        return self.learning_starts + math.ceil(1 / self.ratio - 1e-9)

    @property
    def starts_option(self) -> str:
        return f"--{self.name}.learning-starts"

    def rows_kept(self, spec: LearnerSpec) -> int:
        """Capacity of the replay buffer of one learner: no more than the run will bring."""
        rows = -(-self.buffer // spec.services.peers.count)
        return rows if spec.total_steps is None else min(rows, spec.total_steps + 2 * spec.batch.rows)

    def needs(self, spec: LearnerSpec) -> Sequence[Need]:
        rows, each = self.rows_kept(spec), row_bytes(spec.policy)
        drawn = Need(self.batch, "rows of a batch", each, f"--{self.name}.batch")
        replay = Need(rows, "rows of the replay buffer", each, f"--{self.name}.buffer")
        networks = () if spec.policy.module else (network_need(spec.policy, 15),)  # with two critics and their targets
        return (*networks, drawn, replay)

    def describe(self, spec: LearnerSpec) -> str:
        rows, width = self.rows_kept(spec), 2 * spec.policy.obs_size + spec.policy.action_columns + 3
        replay = f"replay of {rows:,} rows ({4 * rows * width / 2**20:,.0f} MB)"
        return f"{self.ratio:g} updates a row, batches of {self.batch}, {replay}"


#: Options of a run that suit algorithms with a replay buffer.
REPLAY_DEFAULTS: Mapping[str, Any] = {"num_steps_per_env": 1, "policy": {"hidden": [256, 256], "activation": "relu"}}

ALGORITHMS: Registry[Algorithm] = Registry("algorithm", "ALGORITHM", "freewheel.learn", leaf="config")
