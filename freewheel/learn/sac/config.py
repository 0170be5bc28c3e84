"""The options of SAC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from freewheel.errors import POSITIVE, Range, UsageError
from freewheel.learn.spec import REPLAY_DEFAULTS, Algorithm, LearnerSpec, ReplayConfig

if TYPE_CHECKING:
    from freewheel.core import Learner


@dataclass(frozen=True)
class SACConfig(ReplayConfig):
    """Soft actor-critic."""

    name: ClassVar[str] = "sac"

    target_entropy: Annotated[float | None, Range(least=-1e9, most=1e9)] = None
    """Entropy that the temperature steers to (default: minus the number of action columns)."""
    temperature: Annotated[float | None, POSITIVE] = None
    """Weight of the entropy; a number fixes it (default: learned)."""
    first_temperature: Annotated[float, POSITIVE] = 1.0
    """Where a learned temperature begins. Set it to about the size of a step's reward where that is small: at 1, entropy counts
    for more than such rewards through thousands of updates, and nothing else is learned."""
    critics: Annotated[int, Range(least=1, most=100)] = 2
    """Critics that are trained."""
    critic_subset: Annotated[int, Range(least=1, most=100)] = 2
    """How many of the critics, drawn anew in each update, the smallest target value is taken of. Fewer than all: the actor then
    follows the mean of all critics."""
    critic_norm: bool = False
    """Layer normalisation in the critics: steadier at many updates a row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.critic_subset > self.critics:
            there = f"{self.name}.critics {self.critics}"
            raise UsageError(f"{self.name}.critic_subset {self.critic_subset} cannot be more than {there}")

    def build(self, spec: LearnerSpec) -> Learner:
        from freewheel.learn.sac.learner import SAC

        return SAC(self, spec)


ALGORITHM = Algorithm(SACConfig.name, SACConfig, REPLAY_DEFAULTS)
