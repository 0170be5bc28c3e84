"""The options of MBPO."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from freewheel.errors import POSITIVE, SHARE, Range, UsageError
from freewheel.files.memory import Need
from freewheel.learn.sac.config import SACConfig
from freewheel.learn.spec import REPLAY_DEFAULTS, Algorithm, LearnerSpec, row_bytes
from freewheel.policies.spec import WIDTH

if TYPE_CHECKING:
    from freewheel.core import Learner
    from freewheel.policies.spec import PolicySpec


Predict: TypeAlias = Literal["delta", "direct", "affine"]


@dataclass(frozen=True)
class MBPOConfig(SACConfig):
    """Model-based policy optimisation: SAC that learns from short rollouts of a learned model."""

    name: ClassVar[str] = "mbpo"

    updates_per_row: Annotated[float, Range(above=0, most=10_000)] = 20.0
    """Updates per row collected, held within hard bounds in every mode."""
    learning_starts: Annotated[int, Range(least=1, most=10**10)] = 5_000
    """Rows before the first model and the first update; until then the untrained policy acts, almost uniformly."""
    critic_norm: bool = True
    """Layer normalisation in the critics: without it, or a small tau, values diverge with many updates per row."""
    members: Annotated[int, Range(least=1, most=1_000)] = 7
    """Networks of the ensemble."""
    elites: Annotated[int, Range(least=1, most=1_000)] = 5
    """How many networks make rollouts: those with the lowest error on held-out rows."""
    model_hidden: Annotated[tuple[int, ...], WIDTH] = (200, 200, 200, 200)
    """Sizes of a network's hidden layers."""
    model_lr: Annotated[float, POSITIVE] = 1e-3
    """Adam's step size for the model."""
    model_batch: Annotated[int, Range(least=1, most=10**7)] = 256
    """Rows per gradient step of a network."""
    model_every: Annotated[int, Range(least=1, most=10**9)] = 250
    """Rows between two fits of the model."""
    model_rows: Annotated[int, Range(least=1, most=10**10)] = 1_000_000
    """Rows that the model is fitted to; new rows replace the oldest."""
    max_epochs: Annotated[int, Range(least=1, most=10**6)] = 1000
    """Most passes of one fit, which stops earlier when the error on held-out rows does not improve."""
    predict: Predict = "delta"
    """What the model predicts. delta: the difference between next and present observation; direct: the next
    observation; affine: the difference as f(obs) + G(obs) × action, where G is a matrix of observation columns × action
    columns. If the environment has this form, affine is also right for actions that were never tried."""
    predicted: tuple[str, ...] = ()
    """Observations that the model predicts: groups, or columns of one as policy[0:12] (default: the state that the
    simulator declares, else all). All others stay constant in rollouts of the model."""
    read: tuple[str, ...] = ()
    """Observations that the model reads in addition to those it predicts. Needs mbpo.predicted."""
    reward: str = "auto"
    """The source of rewards in the model: learned, your package.module:function(obs, action, next_obs), or auto: the
    simulator's model_task, else learned."""
    termination: str = "auto"
    """When episodes in the model end: learned, never, your package.module:function(obs, action, next_obs), or auto: the
    simulator's model_task or the known rule of a Gymnasium task, else learned."""
    rollouts_per_row: Annotated[float, Range(above=0, most=1e6)] = 100.0
    """Rollouts of the model per row collected."""
    rollout_schedule: Annotated[tuple[int, int, int, int], Range(least=0, most=10**12)] = (0, 0, 5, 5)
    """Length of a rollout as A B C D: from row A to row B it grows from C to D steps. With a length of 1, the values of
    states in which no rollout begins diverge."""
    max_disagreement: Annotated[float | None, Range(above=0, most=1e9)] = None
    """A rollout stops when the predictions of two networks diverge more than this many times the 95th percentile at the
    rollouts' first states, which are real. The schedule then gives the greatest length. Default: no such stop."""
    model_buffer: Annotated[int, Range(least=1, most=10**10)] = 1_000_000
    """Most rows of rollouts that are kept; new rows replace the oldest."""
    keep_models: Annotated[int, Range(least=1, most=1_000)] = 4
    """Models whose rows are kept; rows of older models expire."""
    real_ratio: Annotated[float, SHARE] = 0.05
    """Share of real rows in an update's batch."""
    clock: Literal["auto", "serial", "async"] = "auto"
    """How the model is fitted. serial: in turn with updates; async: at the same time, on a separate stream (GPU) or in
    a separate process (CPU); auto: async in modes that overlap collection and learning."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.elites > self.members:
            raise UsageError(f"mbpo.elites {self.elites} cannot be more than mbpo.members {self.members}")
        if self.max_disagreement is not None and self.elites < 2:
            raise UsageError("mbpo.max_disagreement compares two models; set mbpo.elites to 2 or more")
        if self.read and not self.predicted:
            raise UsageError("mbpo.read needs mbpo.predicted: name what the model predicts as well")
        begin, end, short, long = self.rollout_schedule
        if not (0 <= begin <= end and 1 <= short <= long):
            form = "FROM_ROW TO_ROW FROM_STEPS TO_STEPS, each pair rising, steps from 1"
            raise UsageError(f"mbpo.rollout_schedule is {form}")

    @property
    def executor(self) -> Literal["serial", "async", "auto"]:
        return self.clock

    def needs(self, spec: LearnerSpec) -> Sequence[Need]:
        policy, each = spec.policy, row_bytes(spec.policy)
        effects = self._effects(policy)
        sizes = (policy.obs_size + policy.action_size, *self.model_hidden, 2 * (policy.obs_size + 1) + effects)
        weights = sum(before * after for before, after in itertools.pairwise(sizes))
        models = Need(self.members * weights, "weights of models", 20, "--mbpo.model-hidden")
        batch = self.members * self.model_batch
        drawn = Need(batch, "rows of a model's batch", each + 8 * effects, "--mbpo.model-batch")
        rollouts, option = self.rollouts * self.rollout_schedule[3], "--mbpo.rollouts-per-row"
        rolled = Need(rollouts, "rows of a model's rollouts", each, option)
        kept = Need(self.rows_of_models, "rows of all rollouts", each, "--mbpo.model-buffer")
        steps = Need(self.rollouts, "steps of rollouts with effects of actions", 8 * effects, option)
        return (*super().needs(spec), models, drawn, rolled, kept, steps)

    @property
    def rollouts(self) -> int:
        """The rollouts that begin with every new model."""
        return round(self.rollouts_per_row * self.model_every)

    @property
    def rows_of_models(self) -> int:
        """Most rows of rollouts that are kept."""
        return min(self.model_buffer, self.keep_models * self.rollouts * self.rollout_schedule[3])

    def _effects(self, policy: PolicySpec) -> int:
        """Return how many outputs describe the effect of an action on an observation and a reward."""
        return (policy.obs_size + 2) * policy.action_size if self.predict == "affine" else 0

    def describe(self, spec: LearnerSpec) -> str:
        sizes = " - ".join(map(str, self.model_hidden))
        effects = self._effects(spec.policy)
        affine = f" and {effects:,} effects of an action" if effects else ""
        fitted = f"fitted every {self.model_every} rows, which predict {self._predictions(spec)}"
        return f"{super().describe(spec)}; {self.members} models of {sizes}{affine}, {fitted}"

    def _predictions(self, spec: LearnerSpec) -> str:
        if self.predicted:
            return " ".join(self.predicted)
        task = spec.world.model_task
        return "all columns" if task is None else f"{task.predicted} numbers, by the simulator's model_task"

    def build(self, spec: LearnerSpec) -> Learner:
        from freewheel.learn.mbpo.learner import MBPO

        return MBPO(self, spec)


ALGORITHM = Algorithm(MBPOConfig.name, MBPOConfig, REPLAY_DEFAULTS)
