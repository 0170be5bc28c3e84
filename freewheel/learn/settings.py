"""What can be set about each algorithm; torch-free, so that help texts and workers stay light."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from freewheel.errors import UsageError

if TYPE_CHECKING:
    from freewheel.core import Learner
    from freewheel.policies.spec import PolicySpec

Schedule = Literal["constant", "linear"]


@dataclass(frozen=True)
class Assignment:
    """What a learner is told about the run it belongs to."""

    policy: PolicySpec
    rows: int  # S: rows an on-policy update consumes
    lanes: int
    seed: int
    total_steps: int | None  # rows of the whole run, where the budget is in steps
    device: str = "cpu"
    max_lag: int | None = None  # rows older than this are never learned from
    episodes: int | None = None  # learn from this many chunks, each a whole episode, instead of from S rows


@dataclass(frozen=True)
class PPOConfig:
    """Proximal policy optimisation."""

    lr: float = 3e-4
    """Adam's step size."""
    lr_schedule: Schedule = "constant"
    """linear: the step size falls to 0 over --steps."""
    epochs: int = 10
    """Passes over each batch."""
    minibatch: int = 256
    """Rows a gradient step; larger than the batch means the whole batch."""
    gamma: float = 0.99
    """Discount of the future."""
    gae_lambda: float = 0.95
    """How far advantages look ahead before they trust the critic."""
    clip: float = 0.2
    """How far the policy may move from where the update started, as a ratio of probabilities."""
    clip_schedule: Schedule = "constant"
    """linear: the clip falls to 0 over --steps."""
    entropy: float = 0.0
    """Weight of the entropy bonus."""
    entropy_schedule: Schedule = "constant"
    """linear: the entropy bonus falls to 0 over --steps."""
    value: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Gradients longer than this are scaled down to it."""
    target_kl: float | None = None
    """Stop an update's epochs when the policy has moved this far (approximate KL); none: never."""
    normalize_advantage: bool = True
    """Standardise advantages within each minibatch."""
    reward_scale: Literal["none", "returns"] = "none"
    """returns: divide rewards by the running deviation of the discounted return."""
    rho_bar: float = 100.0
    """Bound of the importance weight on each row's own error, for rows of older versions: for outliers only. At 1, rows that the
    present policy likes better than the old one did no longer count for more, and learning under lag slows down."""
    c_bar: float = 1.0
    """Bound of the importance weight on what flows back through a row, for rows of older versions."""
    targets: Literal["corrected", "plain"] = "corrected"
    """corrected: targets weigh rows of older versions by how likely the present policy would act so; plain: as if it had."""
    surrogate: Literal["decoupled", "behaviour"] = "decoupled"
    """decoupled: clip against the policy at the update's start, weighted by rho once; behaviour: against the one that acted."""
    gradient: Literal["auto", "autograd", "analytic"] = "auto"
    """How gradients are computed: analytic is a fast path for plain MLPs on a CPU, equal to autograd; auto takes it if it can."""

    def __post_init__(self) -> None:
        positive = ["lr", "epochs", "minibatch", "clip", "max_grad_norm", "rho_bar", "c_bar"]
        for name in positive if self.target_kl is None else [*positive, "target_kl"]:
            if not getattr(self, name) > 0:
                raise UsageError(f"ppo.{name} must be positive, not {getattr(self, name)}")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"ppo.{name} must lie in 0..1, not {getattr(self, name)}")
        for name in ("entropy", "value"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"ppo.{name} must not be negative, but is {getattr(self, name)}")

    def build(self, assignment: Assignment) -> Learner:
        """The learner; imports torch."""
        from freewheel.learn.ppo import PPO

        return PPO(self, assignment)
