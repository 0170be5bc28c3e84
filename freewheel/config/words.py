"""Words that people bring from other libraries: which option of ours each one is, or what is done in its place.

A word is taken for an option only where both mean exactly the same; docs/migrate.md lists all of them. The last part of an
option of the chosen algorithm or of the policy needs no entry: --gamma is --ppo.gamma where PPO learns.
"""

from __future__ import annotations

from collections.abc import Collection

#: Modes.
MODES = {"v1": "continuous", "async": "continuous", "v2": "batch", "executor": "episodes", "sync": "lockstep"}

#: Options that every run has, or that modes have.
OPTIONS = {
    "algorithm": "algo",
    "env_id": "env",
    "task": "env",
    "exp_name": "run",
    "experiment_name": "run",
    "run_name": "run",
    "log_dir": "runs_dir",
    "output_dir": "runs_dir",
    "total_timesteps": "steps",
    "total_steps": "steps",
    "timesteps": "steps",
    "total_episodes": "episodes",
    "num_episodes": "episodes",
    "n_eval_episodes": "eval_episodes",
    "n_envs": "num_envs",
    "n_steps": "num_steps_per_env",
    "num_steps": "num_steps_per_env",
    "rollout_fragment_length": "collection_batch_size",
    "n_workers": "workers",
    "num_collectors": "workers",
    "num_env_runners": "workers",
    "num_rollout_workers": "workers",
    "num_workers": "workers",
    "num_envs_per_env_runner": "envs_per_worker",
    "num_envs_per_worker": "envs_per_worker",
    "wandb_project_name": "wandb_project",
}

#: Options of the algorithm or of the policy: the first of these names that the chosen one has.
LEARNER = {
    "learning_rate": ("lr",),
    "n_epochs": ("epochs",),
    "num_epochs": ("epochs",),
    "num_learning_epochs": ("epochs",),
    "num_sgd_iter": ("epochs",),
    "update_epochs": ("epochs",),
    "batch_size": ("minibatch", "batch"),
    "minibatch_size": ("minibatch", "batch"),
    "sgd_minibatch_size": ("minibatch",),
    "buffer_size": ("buffer",),
    "nstep": ("n_step",),
    "multi_step": ("n_step",),
    "per_alpha": ("priority_alpha",),
    "prioritized_replay_alpha": ("priority_alpha",),
    "per_beta": ("priority_beta",),
    "prioritized_replay_beta": ("priority_beta",),
    "clip_coef": ("clip",),
    "clip_param": ("clip",),
    "clip_range": ("clip",),
    "lam": ("gae_lambda",),
    "lambda": ("gae_lambda",),
    "ent_coef": ("entropy", "temperature"),
    "entropy_coef": ("entropy",),
    "entropy_coeff": ("entropy",),
    "alpha": ("temperature",),
    "target_entropy_scale": ("entropy_share",),
    "vf_coef": ("value",),
    "vf_loss_coeff": ("value",),
    "value_loss_coef": ("value",),
    "grad_clip": ("max_grad_norm",),
    "norm_adv": ("normalize_advantage",),
    "net_arch": ("hidden",),
    "hidden_dims": ("hidden",),
    "hidden_sizes": ("hidden",),
    "fcnet_hiddens": ("hidden",),
    "actor_hidden_dims": ("hidden",),
    "fcnet_activation": ("activation",),
    "empirical_normalization": ("normalize_obs",),
}

_ROWS = "an update learns from --num-envs × --num-steps-per-env rows"
_LOGS = "every run writes metrics.jsonl in its directory; --tensorboard and --wandb write there too"
_PRIORITY = "say --sac.priority td (rows by their error) or recent (by their age)"
_GPU = "say --device cuda (or cuda:N, several as cuda:0,cuda:1, auto, cpu)"
_MINIBATCHES = "say --ppo.minibatch ROWS, the rows of one minibatch, not how many minibatches there are"
_SAVES = "say --checkpoint-every MINUTES (default 5); freewheel resume RUN goes on from the newest checkpoint"
_GO_ON = "freewheel resume RUN goes on with a run; --init RUN begins a new one with the weights of another"
_SHAPE = "the policy is described by --policy.hidden, --policy.activation and --policy.module (your own network)"
_SEARCH = "freewheel tune ENV searches modes, workers, envs and fragments for speed; settings of the algorithm are not searched"
_ARGUMENTS = "say --env.KEY VALUE for each argument of the environment, or from Python env_args={...}"
_DRAWN = "leave it out: actions are drawn from the policy, and --sac.entropy-share says how random it stays"
#: Words for what is done in another way here.
ANSWERS = {
    "num_minibatches": _MINIBATCHES,
    "num_mini_batches": _MINIBATCHES,
    "train_batch_size": _ROWS,
    "train_batch_size_per_learner": _ROWS,
    "max_iterations": f"say --steps; {_ROWS}, so --steps is that times the iterations",
    "num_iterations": f"say --steps; {_ROWS}, so --steps is that times the iterations",
    "anneal_lr": "say --ppo.lr-schedule linear (or constant)",
    "schedule": "say --ppo.lr-schedule linear or constant; --ppo.target-kl ends an update early",
    "desired_kl": "say --ppo.target-kl, which ends an update early; the step size does not follow the KL divergence here",
    "kl_coeff": "say --ppo.target-kl, which ends an update early; there is no KL penalty here",
    "clip_range_vf": "leave it out: values are not clipped here",
    "clip_vloss": "leave it out: values are not clipped here",
    **dict.fromkeys(("env_args", "env_kwargs", "env_config"), _ARGUMENTS),
    "policy_lr": "say --sac.lr, which is for actor and critics alike",
    "q_lr": "say --sac.lr, which is for actor and critics alike",
    "gradient_steps": "say --sac.updates-per-row (updates for each row collected)",
    "train_freq": "say --sac.updates-per-row (updates for each row collected)",
    "use_per": _PRIORITY,
    "prioritized_replay": _PRIORITY,
    "prioritized_replay_eps": "leave it out: 1e-6 is added to every error",
    "target_update_interval": "say --sac.tau: targets follow the critics a little in every update",
    "target_network_frequency": "say --sac.tau: targets follow the critics a little in every update",
    "exploration_fraction": _DRAWN,
    "exploration_initial_eps": _DRAWN,
    "exploration_final_eps": _DRAWN,
    "start_e": _DRAWN,
    "end_e": _DRAWN,
    "autotune": "leave it out: the temperature is learned unless --sac.temperature gives it",
    "init_noise_std": "say --policy.log-std, its logarithm",
    "critic_hidden_dims": "say --policy.hidden, which is for actor and critic alike",
    "policy": _SHAPE,
    "policy_kwargs": _SHAPE,
    "normalize": "say --policy.normalize-obs for observations, --ppo.reward-scale returns for rewards",
    "cuda": _GPU,
    "gpu": _GPU,
    "num_gpus": _GPU,
    "track": "say --wandb",
    "tensorboard_log": "say --tensorboard: event files are written to the folder tensorboard of the run",
    "logger": _LOGS,
    "verbose": "leave it out; --console classic prints plain counters, and quiet=True in Python prints nothing",
    "capture_video": "train, then say freewheel play RUN --video",
    "render": "train, then say freewheel play RUN",
    "eval_freq": "say --evals N: so many evaluations, evenly spaced over the run",
    "save_interval": _SAVES,
    "save_freq": _SAVES,
    "checkpoint_freq": _SAVES,
    "checkpoint_frequency": _SAVES,
    "checkpoint_interval": _SAVES,
    "torch_deterministic": "leave it out: --mode lockstep, sequential and batch are repeatable with the same --seed",
    "n_trials": _SEARCH,
    "num_samples": _SEARCH,
    "optimize_hyperparameters": _SEARCH,
    "resume": _GO_ON,
    "resume_from": _GO_ON,
    "resume_from_checkpoint": _GO_ON,
    "restore": _GO_ON,
    "load_run": _GO_ON,
    "load_checkpoint": _GO_ON,
}

#: Options of some worlds that mean nothing in others, and why they need not be refused there: --headless asks for what is so.
IDLE = {"headless": "no window is opened"}


def learner_option(word: str, algo: str, known: Collection[str]) -> str | None:
    """The option of this algorithm or of the policy that a word names; `known` has the dotted names of all options."""
    names = (word, *LEARNER.get(word, ()))
    options = (f"{owner}.{name}" for name in names for owner in (algo, "policy"))
    return next((option for option in options if option in known), None)
