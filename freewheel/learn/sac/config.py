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

LEAST, MOST, UNREWARDED = 0.01, 1.0, 0.1  # bounds of a temperature from rewards; its value if all rewards are 0


def usual_size(rewards: NDArray) -> float:
    """Return the median size of a reward, which a few large ones do not change; if most are 0, the mean."""
    sizes = np.abs(rewards[np.isfinite(rewards)])
    return float(np.median(sizes) or sizes.mean()) if sizes.any() else 0.0


def first_temperature(rewards: NDArray) -> float:
    """Return half the usual reward, so that the entropy of up to seven equally likely actions counts less than it."""
    size = usual_size(rewards)
    return min(MOST, max(LEAST, size / 2)) if size else UNREWARDED


@dataclass(frozen=True)
class SACConfig(ReplayConfig):
    """Soft actor-critic."""

    name: ClassVar[str] = "sac"
    trains_together: ClassVar[bool] = True

    target_entropy: Annotated[float | None, Range(least=-1e9, most=1e9)] = None
    """Target of the entropy, which the temperature controls (default: minus the number of action columns; for discrete
    actions see entropy_share)."""
    entropy_share: Annotated[float, SHARE] = 0.5
    """For discrete actions: the target of the entropy as a share of its maximum, the log of the number of allowed
    actions. Near 1, policies stay almost uniform; near 0, they stop exploring."""
    temperature: Annotated[float | None, POSITIVE] = None
    """Weight of the entropy; a number fixes it (default: learned)."""
    first_temperature: Annotated[float | None, POSITIVE] = None
    """Initial value of a learned temperature (default: half the usual size of a reward in the first learning_starts
    rows). If it is larger than rewards, the policy learns little but entropy for thousands of updates."""
    critics: Annotated[int, Range(least=1, most=100)] = 2
    """Critics that are trained."""
    critic_subset: Annotated[int, Range(least=1, most=100)] = 2
    """Size of the random subset of critics whose smallest value is the target of an update. If it is smaller than
    `critics`, the actor follows the mean of all critics."""
    critic_norm: bool = False
    """Layer normalisation in the critics: more stable with many updates per row."""
    priority: Literal["uniform", "td", "recent"] = "uniform"
    """Rows of the replay buffer that are drawn more often. td: rows whose error was large when they were last drawn,
    with correcting weights in the critics' loss; recent: new rows, without weights."""
    priority_alpha: Annotated[float, Range(least=0, most=10)] = 0.6
    """With priority td: a row is drawn in proportion to its error to this power."""
    priority_beta: Annotated[float, SHARE] = 1.0
    """With priority td: how far the weights correct the loss towards that of uniform draws; 1: fully, 0: not at all."""
    recency: Annotated[float, Range(above=1, most=1e9)] = 10.0
    """With priority recent: how many times as often the newest row is drawn as the oldest. In between, the frequency
    falls exponentially with age."""
    n_step: Annotated[int, Range(least=1, most=1_000)] = 1
    """Rewards of real rows that a critic's target sums up before it adds a value. They come from the policies that
    acted then, and are not corrected: a few steps may learn faster, but many learn the values of old policies."""

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
