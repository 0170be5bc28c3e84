"""The options of SAC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from freewheel.learn.spec import REPLAY_DEFAULTS, Algorithm, LearnerSpec, ReplayConfig, require

if TYPE_CHECKING:
    from freewheel.core import Learner


@dataclass(frozen=True)
class SACConfig(ReplayConfig):
    """Soft actor-critic."""

    name: ClassVar[str] = "sac"

    target_entropy: float | None = None
    """Entropy that the temperature steers to (default: minus the number of action columns)."""
    temperature: float | None = None
    """Weight of the entropy; a number fixes it (default: learned)."""
    critic_norm: bool = False
    """Layer normalisation in the critics: steadier at many updates a row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, positive="temperature")

    def build(self, spec: LearnerSpec) -> Learner:
        from freewheel.learn.sac.learner import SAC

        return SAC(self, spec)


ALGORITHM = Algorithm(SACConfig.name, SACConfig, REPLAY_DEFAULTS)
