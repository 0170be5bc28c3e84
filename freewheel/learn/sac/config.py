"""The options of SAC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np

from freewheel.core import EnvSpec, NDArray
from freewheel.errors import POSITIVE, SHARE, Range, UsageError
from freewheel.files.memory import Need
from freewheel.learn.spec import REPLAY_DEFAULTS, Algorithm, LearnerSpec, ReplayConfig

if TYPE_CHECKING:
    from freewheel.core import Learner

LEAST, MOST, UNREWARDED = 0.01, 1.0, 0.1  # bounds of a temperature that follows from rewards; what it is if all are 0


def usual_size(rewards: NDArray) -> float:
    """Of a reward: the median, which a few large ones do not move; where most rewards are 0, the mean."""
    sizes = np.abs(rewards[np.isfinite(rewards)])
    return float(np.median(sizes) or sizes.mean()) if sizes.any() else 0.0


def first_temperature(rewards: NDArray) -> float:
    """Half the size of a usual reward: then the entropy of up to seven equally likely actions counts for less than a step."""
    size = usual_size(rewards)
    return min(MOST, max(LEAST, size / 2)) if size else UNREWARDED


@dataclass(frozen=True)
class SACConfig(ReplayConfig):
    """Soft actor-critic."""

    name: ClassVar[str] = "sac"
    trains_together: ClassVar[bool] = True

    target_entropy: Annotated[float | None, Range(least=-1e9, most=1e9)] = None
    """Entropy that the temperature steers to (default: minus the number of action columns; for discrete actions see
    entropy_share)."""
    entropy_share: Annotated[float, SHARE] = 0.5
    """For discrete actions: the entropy that the temperature steers to, as a share of the greatest one, log of the number of
    allowed actions. Close to 1, policies stay close to uniform; close to 0, they cease to explore."""
    temperature: Annotated[float | None, POSITIVE] = None
    """Weight of the entropy; a number fixes it (default: learned)."""
    first_temperature: Annotated[float | None, POSITIVE] = None
    """Where a learned temperature begins (default: half the usual size of a reward in the first learning_starts rows).
    Where it is larger than a step's reward, entropy counts for more through thousands of updates, and nothing else is learned."""
    critics: Annotated[int, Range(least=1, most=100)] = 2
    """Critics that are trained."""
    critic_subset: Annotated[int, Range(least=1, most=100)] = 2
    """How many of the critics, drawn anew in each update, the smallest target value is taken of. Fewer than all: the actor then
    follows the mean of all critics."""
    critic_norm: bool = False
    """Layer normalisation in the critics: steadier at many updates a row."""
    priority: Literal["uniform", "td", "recent"] = "uniform"
    """Which rows of the replay buffer are drawn more often. td: those with a large error when they were last drawn, with weights
    in the critics' loss that correct for it; recent: new ones, without weights."""
    priority_alpha: Annotated[float, Range(least=0, most=10)] = 0.6
    """With priority td: a row is drawn in proportion to its error to this power."""
    priority_beta: Annotated[float, SHARE] = 1.0
    """With priority td: how far the weights correct the loss towards that of uniform draws; 1: altogether, 0: not at all."""
    recency: Annotated[float, Range(above=1, most=1e9)] = 10.0
    """With priority recent: how many times as often as the oldest row the newest one is drawn; in between it falls exponentially
    with age."""
    n_step: Annotated[int, Range(least=1, most=1_000)] = 1
    """Rewards of real rows that a critic's target sums up before the value of what follows. They are those of the policy that
    acted then, which nothing corrects: a few steps may learn faster, many learn another policy's values."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.critic_subset > self.critics:
            there = f"{self.name}.critics {self.critics}"
            raise UsageError(f"{self.name}.critic_subset {self.critic_subset} cannot be more than {there}")
        for option, needed in (("priority_alpha", "td"), ("priority_beta", "td"), ("recency", "recent")):
            if self.priority != needed and getattr(self, option) != getattr(SACConfig, option):
                remedy = f"add {self.name}.priority {needed}, or leave it out"
                effect = f"no effect with {self.name}.priority {self.priority}"
                raise UsageError(f"{self.name}.{option} has {effect}: {remedy}")

    def usual(self, world: EnvSpec, rows: int | None) -> Mapping[str, Any]:
        numbers = world.obs_dtype == "float32" and not world.batched_on_device
        return {**super().usual(world, rows), "policy.normalize_obs": numbers}

    def about_rewards(self, rewards: NDArray) -> str:
        size, fits = usual_size(rewards), f"{first_temperature(rewards):.3g}"
        said = f"the temperature begins at {fits}"
        if self.temperature is not None:
            said = f"a learned temperature would begin at {fits}, this one stays at {self.temperature:g}"
        elif self.first_temperature is not None:
            said = f"the temperature would begin at {fits}, not at {self.first_temperature:g}"
        return f"{f'about {size:.3g} a step' if size else 'all were 0'}: {said}"

    def describe(self, spec: LearnerSpec) -> str:
        often = {"td": ", large errors more often", "recent": ", new ones more often"}.get(self.priority, "")
        return super().describe(spec) + often + (f", returns over {self.n_step} steps" if self.n_step > 1 else "")

    def needs(self, spec: LearnerSpec) -> Sequence[Need]:
        remembered = 8 * (self.priority == "td") + 8 * (self.n_step > 1)
        rows = Need(self.rows_kept(spec), "priorities and successors of rows", remembered, f"--{self.name}.buffer")
        return (*super().needs(spec), rows) if remembered else super().needs(spec)

    def build(self, spec: LearnerSpec) -> Learner:
        from freewheel.learn.sac.learner import SAC

        return SAC(self, spec)


ALGORITHM = Algorithm(SACConfig.name, SACConfig, REPLAY_DEFAULTS)
