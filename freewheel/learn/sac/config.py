"""The options of SAC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from freewheel.errors import UsageError
from freewheel.learn.spec import REPLAY_DEFAULTS, Algorithm, LearnerSpec, require

if TYPE_CHECKING:
    from freewheel.core import Learner


@dataclass(frozen=True)
class SACConfig:
    """Soft actor-critic."""

    name: ClassVar[str] = "sac"
    on_policy: ClassVar[bool] = False
    schedules_need_steps: ClassVar[tuple[str, ...]] = ()

    lr: float = 3e-4
    """Adam's step size, for actor, critics and temperature."""
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
    target_entropy: float | None = None
    """Entropy that the temperature steers to (default: minus the number of action columns)."""
    temperature: float | None = None
    """Weight of the entropy; a number fixes it (default: learned)."""
    critic_norm: bool = False
    """Layer normalisation in the critics: steadier at many updates a row."""
    publish_every: int | None = None
    """Rows between two publications of the policy (default: --num-steps-per-env × envs)."""

    def __post_init__(self) -> None:
        positive = "lr batch tau buffer learning_starts updates_per_row replay_ratio temperature publish_every"
        require(self, positive=positive, shares="gamma")
        if self.learning_starts > self.buffer:
            rows = f"the {self.learning_starts} rows of learning_starts"
            raise UsageError(f"{self.name}.buffer {self.buffer} cannot hold {rows}")

    @property
    def executor(self) -> Literal["serial", "async", "auto"]:
        return "serial"

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

    def build(self, spec: LearnerSpec) -> Learner:
        from freewheel.learn.sac.learner import SAC

        return SAC(self, spec)


ALGORITHM = Algorithm(SACConfig.name, SACConfig, REPLAY_DEFAULTS)
