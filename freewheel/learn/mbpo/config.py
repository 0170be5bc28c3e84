"""The options of MBPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from freewheel.errors import UsageError
from freewheel.learn.sac.config import SACConfig
from freewheel.learn.spec import REPLAY_DEFAULTS, Algorithm, LearnerSpec, require

if TYPE_CHECKING:
    from freewheel.core import Learner


@dataclass(frozen=True)
class MBPOConfig(SACConfig):
    """Model-based policy optimisation: SAC that learns from short rollouts of a learned model."""

    name: ClassVar[str] = "mbpo"

    updates_per_row: float = 20.0
    """Updates per row collected, held within hard bounds in every mode."""
    learning_starts: int = 5_000
    """Rows before the first model and the first update; until then the untrained policy acts, which is close to uniform."""
    members: int = 7
    """Networks of the ensemble."""
    elites: int = 5
    """How many of them are rolled out: those with the lowest error on held-out rows."""
    model_hidden: tuple[int, ...] = (200, 200, 200, 200)
    """Sizes of a member's hidden layers."""
    model_lr: float = 1e-3
    """Adam's step size for the model."""
    model_batch: int = 256
    """Rows a gradient step of a member."""
    model_every: int = 250
    """Rows between two fits of the model."""
    model_rows: int = 1_000_000
    """Rows that the model is fitted to; new rows replace the oldest."""
    max_epochs: int = 1000
    """Passes of one fit at most; it stops when held-out rows show no progress."""
    predict: Literal["delta", "direct"] = "delta"
    """What the model predicts: how the next observation differs from the present one, or the next observation itself."""
    reward: str = "learned"
    """Where rewards of model rows come from: learned, or your own package.module:function(obs, action, next_obs)."""
    termination: str = "auto"
    """When episodes in the model end: learned, never, your own package.module:function(obs, action, next_obs), or (auto) the
    known rule of a Gymnasium task, else learned."""
    rollouts_per_row: float = 400.0
    """Rollouts of the model per row collected."""
    rollout_schedule: tuple[int, int, int, int] = (0, 0, 1, 1)
    """Length of a rollout: from row A to row B it grows from C to D steps."""
    keep_models: int = 4
    """Models whose rows are kept; rows of older models expire."""
    real_ratio: float = 0.05
    """Share of real rows in an update's batch."""
    clock: Literal["auto", "serial", "async"] = "auto"
    """How the model is fitted: serial: in turn with updates; async: at the same time, on a stream (GPU) or in a process (CPU) of
    its own; auto: async in the modes that overlap collection and learning."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = "members elites model_lr model_batch model_every max_epochs keep_models rollouts_per_row"
        require(self, positive=positive, shares="real_ratio")
        if self.elites > self.members:
            raise UsageError(f"mbpo.elites {self.elites} cannot be more than mbpo.members {self.members}")
        begin, end, short, long = self.rollout_schedule
        if not (0 <= begin <= end and 1 <= short <= long):
            form = "FROM_ROW TO_ROW FROM_STEPS TO_STEPS, each pair rising, steps from 1"
            raise UsageError(f"mbpo.rollout_schedule is {form}")

    @property
    def executor(self) -> Literal["serial", "async", "auto"]:
        return self.clock

    def describe(self, spec: LearnerSpec) -> str:
        sizes = " - ".join(map(str, self.model_hidden))
        return f"{super().describe(spec)}; {self.members} models of {sizes}, fitted every {self.model_every} rows"

    def build(self, spec: LearnerSpec) -> Learner:
        from freewheel.learn.mbpo.learner import MBPO

        return MBPO(self, spec)


ALGORITHM = Algorithm(MBPOConfig.name, MBPOConfig, REPLAY_DEFAULTS)
