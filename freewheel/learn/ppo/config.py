"""The options of PPO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from freewheel.core import Auto, EnvSpec
from freewheel.errors import POSITIVE, SHARE, Range, check_ranges
from freewheel.learn.spec import Algorithm, AlgorithmConfig, LearnerSpec, Schedule

if TYPE_CHECKING:
    from freewheel.core import Learner

WEIGHT = Range(least=0, most=1e12)  # weight of a term of the loss
ROWS = 2_048  # rows of an update
PARTS, LEAST = 32, 64  # minibatches of an epoch, and the fewest rows of each
LIGHTER = (2, 4)  # factors for minibatch, in units of LEAST, and lr, if the learner does not keep up otherwise
SIMULATED = 256  # rows of a minibatch with a batched simulator


@dataclass(frozen=True)
class PPOConfig(AlgorithmConfig):
    """Proximal policy optimisation."""

    name: ClassVar[str] = "ppo"
    on_policy: ClassVar[bool] = True
    trains_together: ClassVar[bool] = True

    lr: Annotated[float, POSITIVE] = 3e-4
    """Adam's step size."""
    lr_schedule: Schedule = "constant"
    """linear: the step size falls to 0 over --steps."""
    epochs: Annotated[int, Range(least=1, most=10_000)] = 10
    """Passes over each batch."""
    minibatch: Annotated[int | Auto, Range(least=1, most=10**9)] = "auto"
    """Rows per gradient step, at most the whole batch. auto: a 32nd of the batch, at least 64; with a batched simulator
    256; 128 or 256, with `lr` two or four times as large, if the learner would not keep up with the workers."""
    gamma: Annotated[float, SHARE] = 0.99
    """Discount of the future."""
    gae_lambda: Annotated[float, SHARE] = 0.95
    """λ of generalised advantage estimation: how far advantages look ahead before they rely on the critic."""
    clip: Annotated[float, POSITIVE] = 0.2
    """How far an update may move the policy, as a ratio of probabilities."""
    clip_schedule: Schedule = "constant"
    """linear: the clip falls to 0 over --steps."""
    entropy: Annotated[float, WEIGHT] = 0.0
    """Weight of the entropy bonus."""
    entropy_schedule: Schedule = "constant"
    """linear: the entropy bonus falls to 0 over --steps."""
    value: Annotated[float, WEIGHT] = 0.5
    """Weight of the value loss."""
    max_grad_norm: Annotated[float, POSITIVE] = 0.5
    """Gradients with a larger norm are scaled down to this norm."""
    target_kl: Annotated[float | None, POSITIVE] = None
    """End an update when the policy has moved more than 1.5 times this far (approximate KL); none: never."""
    normalize_advantage: bool = True
    """Standardise advantages within each minibatch."""
    reward_scale: Literal["auto", "none", "returns"] = "auto"
    """returns: divide rewards by the running deviation of the discounted return, and clip them at ±10; auto: returns
    for Box actions, none for discrete ones and with a batched simulator."""
    rho_bar: Annotated[float, POSITIVE] = 100.0
    """Bound of the importance weight on the error of each row from an older version. It is meant for outliers. At 1,
    actions that the present policy prefers more than the old one count no more, and learning under lag is slower."""
    c_bar: Annotated[float, POSITIVE] = 1.0
    """Bound of the importance weight on later errors that flow back through a row, for rows of older versions."""
    targets: Literal["corrected", "plain"] = "corrected"
    """corrected: targets weight rows of older versions by the probability ratio of their action; plain: no weights."""
    surrogate: Literal["decoupled", "behaviour"] = "decoupled"
    """decoupled: clip against the policy at the update's start, weighted by rho; behaviour: against the acting one."""
    gradient: Literal["auto", "autograd", "analytic"] = "auto"
    """How to compute gradients. analytic: faster than autograd, for plain MLPs on a CPU; auto: analytic if possible."""

    def __post_init__(self) -> None:
        check_ranges(self, f"{self.name}.")

    @property
    def schedules_need_steps(self) -> tuple[str, ...]:
        names = ("lr_schedule", "clip_schedule", "entropy_schedule")
        return tuple(name for name in names if getattr(self, name) == "linear")

    @property
    def normalises_rewards(self) -> bool:
        return self.reward_scale == "returns"

    def rows_per_update(self, world: EnvSpec) -> int:
        return super().rows_per_update(world) if world.batched_on_device else ROWS

    def usual(self, world: EnvSpec, rows: int | None) -> Mapping[str, Any]:
        box = world.action.kind == "box" and not world.batched_on_device
        numbers = box and world.obs_dtype == "float32"
        chosen = {"ppo.reward_scale": "returns" if box else "none", "policy.normalize_obs": numbers}
        if world.batched_on_device:
            return chosen | {"ppo.minibatch": SIMULATED}
        return chosen if rows is None else chosen | {"ppo.minibatch": self.size(rows)}

    def lighter(self) -> Sequence[Mapping[str, Any]]:
        return [{"ppo.minibatch": LEAST * times, "ppo.lr": self.lr * times} for times in LIGHTER]

    def size(self, rows: int) -> int:
        """Return the rows of a minibatch in an update on `rows` rows."""
        return max(LEAST, rows // PARTS) if self.minibatch == "auto" else min(self.minibatch, rows)

    def gradient_steps(self, spec: LearnerSpec) -> int:
        return self.epochs * -(-spec.batch.rows // self.size(spec.batch.rows))

    def describe(self, spec: LearnerSpec) -> str:
        whole = spec.batch.episodes is not None and self.minibatch == "auto"  # rows are not known in advance
        size = f"up to {PARTS} minibatches" if whole else f"minibatches of {self.size(spec.batch.rows)}"
        return f"{self.epochs} epochs of {size}"

    def build(self, spec: LearnerSpec) -> Learner:
        from freewheel.learn.ppo.learner import PPO

        return PPO(self, spec)


ALGORITHM = Algorithm(PPOConfig.name, PPOConfig)
