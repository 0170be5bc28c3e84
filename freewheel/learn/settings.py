"""What can be set about each algorithm; torch-free, so that help texts and workers stay light."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from freewheel.core import Compile
from freewheel.errors import UsageError

if TYPE_CHECKING:
    from freewheel.core import Learner, MakeExecutor
    from freewheel.policies.spec import PolicySpec, Start

Schedule = Literal["constant", "linear"]


def _patiently() -> None:
    """Wait on."""


@dataclass(frozen=True)
class LearnerSpec:
    """What a learner is told about the run it belongs to."""

    policy: PolicySpec
    rows: int  # S: rows an on-policy update consumes
    lanes: int
    seed: int
    total_steps: int | None  # rows of the whole run, where the budget is in steps
    device: str = "cpu"
    max_lag: int | None = None  # rows older than this are never learned from
    episodes: int | None = None  # learn from this many chunks, each a whole episode, instead of from S rows
    compile: Compile = "off"
    algo: str = "ppo"
    world: str = ""  # its name, by which known rules of it are found
    batched_on_device: bool = False  # whether rows come as tensors, from a batched simulator
    start: Start | None = None  # weights to begin with; None: drawn
    has_final_obs: bool = True  # whether the true successor of an episode's last row is known
    executors: MakeExecutor | None = None  # where a part of the learner runs; for learners that have such a part
    waiting: Callable[[], None] = _patiently  # called while a learner waits; what it raises ends the wait


@dataclass(frozen=True)
class PPOConfig:
    """Proximal policy optimisation."""

    on_policy: ClassVar[bool] = True

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

    def describe(self, task: LearnerSpec) -> str:
        """The plan for a person."""
        return f"{self.epochs} epochs of minibatches of {min(self.minibatch, task.rows)}"

    def build(self, assignment: LearnerSpec) -> Learner:
        """The learner; imports torch."""
        if assignment.batched_on_device:
            from freewheel.learn.ppo.device_learner import DevicePPO

            return DevicePPO(self, assignment)
        from freewheel.learn.ppo.learner import PPO

        return PPO(self, assignment)


@dataclass(frozen=True)
class SACConfig:
    """Soft actor-critic."""

    on_policy: ClassVar[bool] = False

    lr: float = 3e-4
    """Adam's step size, for actor, critics and temperature."""
    batch: int = 256
    """Rows an update draws from the replay buffer."""
    gamma: float = 0.99
    """Discount of the future."""
    tau: float = 0.005
    """How far the target critics follow the critics in each update."""
    buffer: int = 1_000_000
    """Rows that the replay buffer keeps; the oldest make room."""
    learning_starts: int = 1_000
    """Rows before the first update; until then the untrained policy acts, which is close to uniform."""
    updates_per_row: float = 1.0
    """Updates per row collected, held within hard bounds in every mode."""
    replay_ratio: float | None = None
    """The same said in rows: rows drawn per row collected (updates × batch / rows). Instead of updates_per_row."""
    target_entropy: float | None = None
    """Entropy that the temperature steers to (default: minus the number of action columns)."""
    temperature: float | None = None
    """Weight of the entropy; a number fixes it (default: learned)."""
    critic_norm: bool = False
    """Layer normalisation in the critics: steadier at many updates a row."""
    publish_every: int | None = None
    """Rows between two publications of the policy (default: --num-steps-per-env × envs)."""

    def __post_init__(self) -> None:
        name = type(self).__name__.removesuffix("Config").lower()
        for field in ("lr", "batch", "tau", "buffer", "learning_starts", "updates_per_row"):
            if not getattr(self, field) > 0:
                raise UsageError(f"{name}.{field} must be positive, not {getattr(self, field)}")
        for field in ("replay_ratio", "temperature", "publish_every"):
            if (value := getattr(self, field)) is not None and not value > 0:
                raise UsageError(f"{name}.{field} must be positive, not {value}")
        if not 0 <= self.gamma <= 1:
            raise UsageError(f"{name}.gamma must lie in 0..1, not {self.gamma}")
        if self.learning_starts > self.buffer:
            raise UsageError(
                f"{name}.buffer {self.buffer} cannot hold the {self.learning_starts} rows of learning_starts"
            )

    def rows_kept(self, task: LearnerSpec) -> int:
        """What the replay buffer holds: no more than the run will bring."""
        return self.buffer if task.total_steps is None else min(self.buffer, task.total_steps + 2 * task.rows)

    def describe(self, task: LearnerSpec) -> str:
        """The plan for a person."""
        rows, width = self.rows_kept(task), 2 * task.policy.obs_size + task.policy.action_size + 3
        replay = f"replay of {rows:,} rows ({4 * rows * width / 2**20:,.0f} MB)"
        return f"{self.ratio:g} updates a row, batches of {self.batch}, {replay}"

    @property
    def ratio(self) -> float:
        """Updates per row."""
        return self.updates_per_row if self.replay_ratio is None else self.replay_ratio / self.batch

    def build(self, assignment: LearnerSpec) -> Learner:
        """The learner; imports torch."""
        from freewheel.learn.sac.learner import SAC

        return SAC(self, assignment)


@dataclass(frozen=True)
class MBPOConfig(SACConfig):
    """Model-based policy optimisation: SAC that learns from short rollouts of a learned model."""

    updates_per_row: float = 20.0
    """Updates per row collected, held within hard bounds in every mode."""
    learning_starts: int = 5_000
    """Rows before the first model and the first update; until then the untrained policy acts, which is close to uniform."""
    members: int = 7
    """Networks of the ensemble."""
    elites: int = 5
    """Of these, how many are rolled out: those with the lowest error on held-out rows."""
    model_hidden: tuple[int, ...] = (200, 200, 200, 200)
    """Sizes of a member's hidden layers."""
    model_lr: float = 1e-3
    """Adam's step size for the model."""
    model_batch: int = 256
    """Rows a gradient step of a member."""
    model_every: int = 250
    """Rows between two fits of the model."""
    model_rows: int = 1_000_000
    """Rows that the model is fitted to; the oldest make room."""
    max_epochs: int = 1000
    """Passes of one fit at most; it stops when held-out rows show no progress."""
    predict: Literal["delta", "direct"] = "delta"
    """What the model says of the next observation: how it differs, or itself."""
    reward: str = "learned"
    """Where imagined rewards come from: learned, or your own package.module:function(obs, action, next_obs)."""
    termination: str = "auto"
    """When imagined episodes end: learned, never, your own package.module:function(obs, action, next_obs), or (auto) the known
    rule of a Gymnasium task, else learned."""
    rollouts_per_row: float = 400.0
    """Imagined rollouts begun per row collected."""
    rollout_schedule: tuple[int, int, int, int] = (0, 0, 1, 1)
    """Length of a rollout: from row A to row B it grows from C to D steps."""
    keep_models: int = 4
    """Models whose imagined rows are kept; older ones expire."""
    real_ratio: float = 0.05
    """Share of real rows in an update's batch."""
    clock: Literal["auto", "serial", "async"] = "auto"
    """serial: fitting in turn with updates; async: beside them, on a stream (GPU) or in a process (CPU) of its own; auto: async
    in the modes that overlap collection and learning."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = ("members", "elites", "model_lr", "model_batch", "model_every", "max_epochs", "keep_models")
        for field in (*positive, "rollouts_per_row"):
            if not getattr(self, field) > 0:
                raise UsageError(f"mbpo.{field} must be positive, not {getattr(self, field)}")
        if self.elites > self.members:
            raise UsageError(f"mbpo.elites {self.elites} cannot be more than mbpo.members {self.members}")
        if not 0 <= self.real_ratio <= 1:
            raise UsageError(f"mbpo.real_ratio must lie in 0..1, not {self.real_ratio}")
        begin, end, short, long = self.rollout_schedule
        if not (0 <= begin <= end and 1 <= short <= long):
            raise UsageError(
                "mbpo.rollout_schedule is FROM_ROW TO_ROW FROM_STEPS TO_STEPS, each pair rising, steps from 1"
            )

    def describe(self, task: LearnerSpec) -> str:
        """The plan for a person."""
        sizes = " - ".join(map(str, self.model_hidden))
        return f"{super().describe(task)}; {self.members} models of {sizes}, fitted every {self.model_every} rows"

    def build(self, assignment: LearnerSpec) -> Learner:
        """The learner; imports torch."""
        from freewheel.learn.mbpo.learner import MBPO

        return MBPO(self, assignment)
