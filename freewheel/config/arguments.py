"""The keyword arguments of `freewheel.train`, for editors and type checkers; nothing imports this at run time.

`python -m freewheel.config.signature` writes this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict

import numpy.typing as npt

Table: TypeAlias = Sequence[Sequence[float]] | npt.NDArray[Any]  # [K, C]


class PolicyOptions(TypedDict, total=False):
    """Options of policy."""

    hidden: Sequence[int]
    activation: Literal["tanh", "relu", "elu", "silu"]
    head: str
    log_std: float
    normalize_obs: bool | Literal["auto"]
    module: str | Callable[..., Any]


class PPOOptions(TypedDict, total=False):
    """Options of ppo."""

    lr: float
    lr_schedule: Literal["constant", "linear"]
    epochs: int
    minibatch: int | Literal["auto"]
    gamma: float
    gae_lambda: float
    clip: float
    clip_schedule: Literal["constant", "linear"]
    entropy: float
    entropy_schedule: Literal["constant", "linear"]
    value: float
    max_grad_norm: float
    target_kl: float | None
    normalize_advantage: bool
    reward_scale: Literal["auto", "none", "returns"]
    rho_bar: float
    c_bar: float
    targets: Literal["corrected", "plain"]
    surrogate: Literal["decoupled", "behaviour"]
    gradient: Literal["auto", "autograd", "analytic"]


class SACOptions(TypedDict, total=False):
    """Options of sac."""

    lr: float
    batch: int
    gamma: float
    tau: float
    buffer: int
    learning_starts: int
    updates_per_row: float
    replay_ratio: float | None
    publish_every: int | None
    target_entropy: float | None
    entropy_share: float
    temperature: float | None
    first_temperature: float | None
    critics: int
    critic_subset: int
    critic_norm: bool
    priority: Literal["uniform", "td", "recent"]
    priority_alpha: float
    priority_beta: float
    recency: float
    n_step: int


class MBPOOptions(SACOptions, total=False):
    """Options of mbpo."""

    members: int
    elites: int
    model_hidden: Sequence[int]
    model_lr: float
    model_batch: int
    model_every: int
    model_rows: int
    max_epochs: int
    predict: Literal["delta", "direct", "affine"]
    predicted: Sequence[str]
    read: Sequence[str]
    reward: str
    termination: str
    rollouts_per_row: float
    rollout_schedule: Sequence[int]
    max_disagreement: float | None
    model_buffer: int
    keep_models: int
    real_ratio: float
    clock: Literal["auto", "serial", "async"]


class TrainOptions(TypedDict, total=False):
    """Options of a run, which `freewheel train --help` describes."""

    algo: Literal["mbpo", "ppo", "sac"]
    mode: Literal["auto", "batch", "continuous", "episodes", "lockstep", "ray", "sequential"]
    preset: str
    config: str | Path
    seed: int
    num_steps_per_env: int | Literal["auto"]
    init: str | Path
    context: Table
    steps: int | None
    minutes: float | None
    episodes: int | None
    evals: int
    eval_share: float
    eval_episodes: int
    eval_max_steps: int
    eval_seed: int
    run: str
    runs_dir: str | Path
    log_every: float
    checkpoint_every: float
    console: Literal["live", "classic"]
    tensorboard: bool
    wandb: bool
    wandb_project: str
    record_schedule: bool
    trace: bool
    device: str | Sequence[str]
    learners: int
    threads: int
    compile: Literal["off", "graphs"]
    substitute: bool
    workers: int | Literal["auto"]
    envs_per_worker: int | Literal["auto"]
    num_envs: int | Literal["auto"]
    collection_batch_size: int | None
    max_queue_size: int | None
    action_bounds: float | None
    clip_actions: float | None
    headless: bool
    max_episode_steps: int | None
    measures: Sequence[str]
    construct_timeout: float
    reset_timeout: float
    step_timeout: float
    overflow: Literal["block", "drop-oldest"]
    max_lag: int | None
    patience: float
    adapt: bool
    adapt_patience: int
    episodes_per_update: int | None
    wave: bool
    placement: Literal["auto", "inline", "processes"]
    env_args: Mapping[str, Any]
    mbpo: MBPOOptions
    policy: PolicyOptions
    ppo: PPOOptions
    sac: SACOptions
