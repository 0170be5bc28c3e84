"""The options of SAC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from freewheel.errors import POSITIVE, Range
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
    critic_norm: bool = False
    """Layer normalisation in the critics: steadier at many updates a row."""

    def build(self, spec: LearnerSpec) -> Learner:
        from freewheel.learn.sac.learner import SAC

        return SAC(self, spec)


ALGORITHM = Algorithm(SACConfig.name, SACConfig, REPLAY_DEFAULTS)
