"""What a learner is given, and what an algorithm declares about itself; torch-free, so that help texts and workers stay light."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from freewheel.core import BatchSpec, Compile, EnvSpec
from freewheel.errors import UsageError
from freewheel.registry import Registry

if TYPE_CHECKING:
    from freewheel.core import Learner, MakeExecutor
    from freewheel.policies.spec import PolicySpec, Start

ROWS = 512  # of an on-policy update, unless its algorithm says otherwise
SIMULATED_STEPS = 64  # of each lane, with a batched simulator
Schedule = Literal["constant", "linear"]  # linear: falls to 0 over --steps


def _keep_waiting() -> None:
    """Nothing ends the wait."""


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


@dataclass(frozen=True, kw_only=True)
class Services:
    """What a run offers to its learner."""

    executors: MakeExecutor | None = None  # runs a part of the learner elsewhere; for learners that have such a part
    while_waiting: Callable[[], None] = _keep_waiting  # called again and again; what it raises ends the wait


@dataclass(frozen=True, kw_only=True)
class LearnerSpec:
    """What a learner has to do, apart from how its algorithm does it."""

    policy: PolicySpec
    batch: BatchSpec
    seed: int
    total_steps: int | None = None  # rows of the whole run, where the budget is in steps
    compute: Compute = Compute()
    world: WorldFacts = WorldFacts()
    start: Start | None = None  # weights to begin with; None: drawn
    services: Services = Services()


class AlgorithmConfig(Protocol):
    """The options of one algorithm, and what the rest of a run has to know about it; options derive from this."""

    name: ClassVar[str] = ""  # for error messages
    on_policy: ClassVar[bool]  # whether rows are worth less the older the policy is that wrote them
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

    def describe(self, spec: LearnerSpec) -> str:
        """One line of the plan."""
        return f"{spec.batch.rows} rows an update"

    def build(self, spec: LearnerSpec) -> Learner: ...  # may import torch


@dataclass(frozen=True)
class Algorithm:
    """One entry of the registry."""

    name: str
    config: type[AlgorithmConfig]
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of run options, where they differ from the usual ones


def require(config: AlgorithmConfig, *, positive: str = "", shares: str = "", not_negative: str = "") -> None:
    """UsageError about the first of these options, named in one string, that is set and outside of its range."""
    name = config.name
    for option, value in ((option, getattr(config, option)) for option in positive.split()):
        if value not in (None, "auto") and not value > 0:
            raise UsageError(f"{name}.{option} must be positive, not {value}")
    for option, value in ((option, getattr(config, option)) for option in shares.split()):
        if not 0 <= value <= 1:
            raise UsageError(f"{name}.{option} must lie in 0..1, not {value}")
    for option, value in ((option, getattr(config, option)) for option in not_negative.split()):
        if not value >= 0:
            raise UsageError(f"{name}.{option} must not be negative, but is {value}")


@dataclass(frozen=True)
class ReplayConfig(AlgorithmConfig):
    """Options of algorithms with a replay buffer."""

    on_policy: ClassVar[bool] = False

    lr: float = 3e-4
    """Adam's step size."""
    batch: int = 256
    """Rows an update draws from the replay buffer."""
    gamma: float = 0.99
    """Discount of the future."""
    tau: float = 0.005
    """How far the target critics follow the critics in each update."""
    buffer: int = 1_000_000
    """Rows that the replay buffer keeps; new rows replace the oldest."""
    learning_starts: int = 1_000
    """Rows before the first update; until then the untrained policy acts, which is close to uniform."""
    updates_per_row: float = 1.0
    """Updates per row collected, held within hard bounds in every mode."""
    replay_ratio: float | None = None
    """The same in rows: rows drawn per row collected (updates × batch / rows). Replaces updates_per_row."""
    publish_every: int | None = None
    """Rows between two publications of the policy (default: --num-steps-per-env × envs)."""

    def __post_init__(self) -> None:
        positive = "lr batch tau buffer learning_starts updates_per_row replay_ratio publish_every"
        require(self, positive=positive, shares="gamma")
        if self.learning_starts > self.buffer:
            rows = f"the {self.learning_starts} rows of learning_starts"
            raise UsageError(f"{self.name}.buffer {self.buffer} cannot hold {rows}")

    @property
    def ratio(self) -> float:
        """Updates per row."""
        return self.updates_per_row if self.replay_ratio is None else self.replay_ratio / self.batch

    def rows_kept(self, spec: LearnerSpec) -> int:
        """Capacity of the replay buffer: no more than the run will bring."""
        return self.buffer if spec.total_steps is None else min(self.buffer, spec.total_steps + 2 * spec.batch.rows)

    def describe(self, spec: LearnerSpec) -> str:
        rows, width = self.rows_kept(spec), 2 * spec.policy.obs_size + spec.policy.action_size + 3
        replay = f"replay of {rows:,} rows ({4 * rows * width / 2**20:,.0f} MB)"
        return f"{self.ratio:g} updates a row, batches of {self.batch}, {replay}"


#: Options of a run that suit algorithms with a replay buffer.
REPLAY_DEFAULTS: Mapping[str, Any] = {
    "num_steps_per_env": 1,
    "policy": {"hidden": [256, 256], "activation": "relu", "head": "squashed"},
}

ALGORITHMS: Registry[Algorithm] = Registry("algorithm", "ALGORITHM", "freewheel.learn", leaf="config")
