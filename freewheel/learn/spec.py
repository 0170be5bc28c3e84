"""The inputs of a learner and the base of algorithm options. No torch here, so help texts and workers stay light."""

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

ROWS = 512  # rows of an on-policy update, unless its algorithm sets another number
SIMULATED_STEPS = 64  # steps of each lane in an update, with a batched simulator
Schedule = Literal["constant", "linear"]  # linear: falls to 0 over --steps


def go_on() -> None:
    """Do nothing: the default of services that may end a run."""


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Where and how a learner computes."""

    device: str = "cpu"
    compile: Compile = "off"


@dataclass(frozen=True, kw_only=True)
class WorldFacts:
    """The facts about the world that a learner may use."""

    name: str = ""  # used to find the known rules of a task
    batched_on_device: bool = False  # rows come as tensors, from a batched simulator
    has_final_obs: bool = True  # the true successor of an episode's last row is known
    slices: tuple[Slice, ...] = ()  # groups of the observation
    model_task: Any = None  # the learn.mbpo.task.ModelTask that the simulator declares, or None


class Peers(Protocol):
    """Learners that train together: each has its share of the rows, and all have the same weights."""

    @property
    def rank(self) -> int: ...  # of this learner, from 0
    @property
    def count(self) -> int: ...
    # Sums an array in place over all learners, with the same bits in each. All call it at the same points, in the same
    # order, with one shape and dtype. A tensor may be on the learner's device. PeerLostError: a learner is gone.
    def sum(self, array: Array) -> None: ...


class NoPeers:
    """The peers of a single learner, which has all rows. Implements Peers."""

    rank, count = 0, 1

    def sum(self, array: Array) -> None:
        """Do nothing: the array already is the sum."""


ALONE = NoPeers()


@dataclass(frozen=True, kw_only=True)
class Services:
    """The services that a run offers to its learner."""

    executors: MakeExecutor | None = None  # for learners that run a part of their work elsewhere
    # Each of these three writes a row of metrics if one is due. Long work has to call one of them at least every 0.1 s.
    while_waiting: Callable[[], None] = go_on  # during waits and repeatable work; an exception from it ends the run
    between_steps: Callable[[], None] = go_on  # where the state can be saved; ends a run out of time, ignores signals
    report: Callable[[], None] = go_on  # inside work that must be finished; never ends the run
    span: Callable[[str], AbstractContextManager[object]] = (
        nullcontext  # times a block as one kind of core.LEARNER_TIME
    )
    peers: Peers = ALONE  # learners that train together with this one


@dataclass(frozen=True, kw_only=True)
class LearnerSpec:
    """The inputs of a learner, without the options of its algorithm."""

    policy: PolicySpec
    batch: BatchSpec
    seed: int
    total_steps: int | None = None  # rows of the whole run, if its budget is in steps
    compute: Compute = Compute()
    world: WorldFacts = WorldFacts()
    start: StartWeights | None = None  # initial weights; None: random ones
    services: Services = Services()


class AlgorithmConfig(Protocol):
    """The options of one algorithm, and what the rest of a run needs to know about it. Options derive from this."""

    name: ClassVar[str] = ""  # for error messages
    on_policy: ClassVar[bool]  # whether rows lose value as the policy that wrote them gets older
    #: Whether its learner sums gradients over Services.peers. Options count for all learners together: each takes
    #: its share of them. The BatchSpec and total_steps of a LearnerSpec already are those of one learner.
    trains_together: ClassVar[bool] = False
    publish_every: int | None = None  # rows between two publications; None: BatchSpec.rows

    @property
    def schedules_need_steps(self) -> tuple[str, ...]:
        """The names of options whose schedule depends on --steps."""
        return ()

    @property
    def executor(self) -> Literal["serial", "async", "auto"]:
        """How the learner's executors run."""
        return "serial"

    @property
    def normalises_rewards(self) -> bool:
        """Whether the learner scales rewards itself."""
        return False

    def rows_per_update(self, world: EnvSpec) -> int:
        """Return the rows of an update in this world, if the steps of each lane are "auto". The result must not depend
        on the number of lanes, unless they are one simulation."""
        return SIMULATED_STEPS * world.lanes if world.batched_on_device else ROWS

    def usual(self, world: EnvSpec, rows: int | None) -> Mapping[str, Any]:
        """Return values for "auto" options in this world, by dotted name ("policy.normalize_obs"). They suit its kind
        of actions and the rows of an update, if these are known. An option that is not in the result stays "auto"."""
        return {"policy.normalize_obs": False}

    def about_rewards(self, rewards: NDArray) -> str:
        """Return a remark for the user about rewards like these; empty: none."""
        return ""

    def lighter(self) -> Sequence[Mapping[str, Any]]:
        """Return options by dotted name, with less and less work per row. A run may use the first that keeps up."""
        return ()

    def describe(self, spec: LearnerSpec) -> str:
        """Return one line for the plan."""
        return f"{spec.batch.rows} rows an update"

    def needs(self, spec: LearnerSpec) -> Sequence[Need]:
        """Return the least memory of the learner: the network and its optimiser, and the rows of an update."""
        networks = () if spec.policy.module else (network_need(spec.policy),)
        return (*networks, Need(spec.batch.rows, "rows of an update", row_bytes(spec.policy), "--num-steps-per-env"))

    def rows_before_update(self, spec: LearnerSpec) -> int:
        """Return the rows that have to arrive before the first update."""
        return spec.batch.rows

    @property
    def starts_option(self) -> str:
        """The option that sets `rows_before_update`, if there is one."""
        return ""

    def gradient_steps(self, spec: LearnerSpec) -> int:
        """Return the gradient steps of one update, which nothing can interrupt."""
        return 1

    def build(self, spec: LearnerSpec) -> Learner: ...  # may import torch


def make_learner(config: AlgorithmConfig, spec: LearnerSpec) -> Learner:
    """Build a learner, and give it the defaults of the base Learner for what it lacks."""
    return with_defaults(config.build(spec), Learner)


def row_bytes(policy: PolicySpec) -> int:
    """Return the bytes of a transition: both observations, the action and a few numbers."""
    width = 1 if policy.obs_dtype == "uint8" else 4
    return 2 * width * policy.obs_size + 4 * (policy.action_columns + 3)


def network_need(policy: PolicySpec, copies: int = 10) -> Need:
    """Return the memory of networks. `copies` was measured for PPO at 2,000 x 2,000, with moments and backups."""
    from freewheel.policies.spec import full_layout

    count = sum(math.prod(shape) for shape in full_layout(policy).values())
    return Need(count, "weights", 4 * copies, "--policy.hidden")


#: Prefix of running statistics in Learner.learned(): [mean, square, count] in one vector (learn/moments.py).
STATISTICS = "statistics."
OBS_STATISTICS, RETURN_STATISTICS = f"{STATISTICS}observations", f"{STATISTICS}returns"
POLICY = "policy."  # prefix of the weights that act, and of those of PPO's critic


@dataclass(frozen=True)
class Algorithm:
    """One entry of the registry."""

    name: str
    config: type[AlgorithmConfig]
    defaults: Mapping[str, Any] = field(default_factory=dict)  # run options that differ from the usual defaults


@dataclass(frozen=True)
class ReplayConfig(AlgorithmConfig):
    """Options of algorithms with a replay buffer."""

    on_policy: ClassVar[bool] = False

    lr: Annotated[float, POSITIVE] = 3e-4
    """Adam's step size."""
    batch: Annotated[int, Range(least=1, most=10**7)] = 256
    """Rows that an update draws from the replay buffer."""
    gamma: Annotated[float, SHARE] = 0.99
    """Discount of the future."""
    tau: Annotated[float, Range(above=0, most=1)] = 0.005
    """How far the target critics follow the critics in each update."""
    buffer: Annotated[int, Range(least=1, most=10**10)] = 1_000_000
    """Rows that the replay buffer keeps; new rows replace the oldest."""
    learning_starts: Annotated[int, Range(least=1, most=10**10)] = 1_000
    """Rows before the first update; until then the untrained policy acts, almost uniformly."""
    updates_per_row: Annotated[float, Range(above=0, most=10_000)] = 1.0
    """Updates per row collected, held within hard bounds in every mode."""
    replay_ratio: Annotated[float | None, Range(above=0, most=1e9)] = None
    """Rows drawn per row collected (updates × batch / rows). Replaces updates_per_row."""
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
        """Return the capacity of one learner's replay buffer, which is at most what the run can fill."""
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
