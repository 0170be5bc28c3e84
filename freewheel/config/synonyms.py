"""Names of options in other libraries: for each one the option of ours, or advice if there is none.

A word stands for an option only if both mean exactly the same; docs/migrating.md lists all words. The last part of an
option of the chosen algorithm or of the policy needs no entry: --gamma means --ppo.gamma if PPO learns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

T = TypeVar("T")


def _each(table: Mapping[str, T]) -> dict[str, T]:
    """Return the meaning of each word; a key of the table has all words with the same meaning."""
    return {word: meaning for words, meaning in table.items() for word in words.split()}


#: Other names of modes.
MODES = {"v1": "continuous", "async": "continuous", "v2": "batch", "executor": "episodes", "sync": "lockstep"}

#: Options of all runs and of modes.
OPTIONS = _each({
    "algorithm": "algo",
    "env_id task": "env",
    "exp_name experiment_name run_name": "run",
    "log_dir output_dir": "runs_dir",
    "total_timesteps total_steps timesteps": "steps",
    "total_episodes num_episodes": "episodes",
    "n_eval_episodes": "eval_episodes",
    "n_envs": "num_envs",
    "n_steps num_steps": "num_steps_per_env",
    "rollout_fragment_length": "collection_batch_size",
    "n_workers num_collectors num_env_runners num_rollout_workers num_workers": "workers",
    "num_envs_per_env_runner num_envs_per_worker": "envs_per_worker",
    "wandb_project_name": "wandb_project",
})  # fmt: skip

#: Options of the algorithm or of the policy: a word means the first of these names that exists there.
LEARNER: dict[str, tuple[str, ...]] = _each({
    "learning_rate": ("lr",),
    "n_epochs num_epochs num_learning_epochs num_sgd_iter update_epochs": ("epochs",),
    "batch_size minibatch_size": ("minibatch", "batch"),
    "sgd_minibatch_size": ("minibatch",),
    "buffer_size": ("buffer",),
    "nstep multi_step": ("n_step",),
    "per_alpha prioritized_replay_alpha": ("priority_alpha",),
    "per_beta prioritized_replay_beta": ("priority_beta",),
    "clip_coef clip_param clip_range": ("clip",),
    "lam lambda": ("gae_lambda",),
    "ent_coef": ("entropy", "temperature"),
    "entropy_coef entropy_coeff": ("entropy",),
    "alpha": ("temperature",),
    "target_entropy_scale": ("entropy_share",),
    "vf_coef vf_loss_coeff value_loss_coef": ("value",),
    "grad_clip": ("max_grad_norm",),
    "norm_adv": ("normalize_advantage",),
    "net_arch hidden_dims hidden_sizes fcnet_hiddens actor_hidden_dims": ("hidden",),
    "fcnet_activation": ("activation",),
    "empirical_normalization": ("normalize_obs",),
})  # fmt: skip

_ROWS = "an update learns from --num-envs × --num-steps-per-env rows"
_STACK = "gymnasium.wrappers.FrameStackObservation(env, 4) in the function that makes the environment"
#: Advice for words without an exact equivalent here.
ANSWERS = _each({
    "num_minibatches num_mini_batches": "say --ppo.minibatch ROWS, the rows of one minibatch, not how many minibatches there are",
    "train_batch_size train_batch_size_per_learner": _ROWS,
    "max_iterations num_iterations": f"say --steps; {_ROWS}, so --steps is that times the iterations",
    "anneal_lr": "say --ppo.lr-schedule linear (or constant)",
    "schedule": "say --ppo.lr-schedule linear or constant; --ppo.target-kl ends an update early",
    "desired_kl kl_coeff":
        "say --ppo.target-kl, which ends an update early; there is no KL penalty, and no step size that follows the divergence",
    "clip_range_vf clip_vloss": "leave it out: values are not clipped here",
    "env_args env_kwargs env_config": "say --env.KEY VALUE for each argument of the environment",
    "policy_lr q_lr": "say --sac.lr, which is for actor and critics alike",
    "gradient_steps train_freq": "say --sac.updates-per-row (updates for each row collected)",
    "use_per prioritized_replay": "say --sac.priority td (rows by their error) or recent (by their age)",
    "prioritized_replay_eps": "leave it out: 1e-6 is added to every error",
    "target_update_interval target_network_frequency":
        "say --sac.tau: targets follow the critics a little in every update",
    "exploration_fraction exploration_initial_eps exploration_final_eps start_e end_e":
        "leave it out: actions are drawn from the policy, and --sac.entropy-share says how random it stays",
    "autotune": "leave it out: the temperature is learned unless --sac.temperature gives it",
    "init_noise_std": "say --policy.log-std, its logarithm",
    "use_sde sde_sample_freq": "leave it out: noise is drawn anew in every step; --policy.log-std says how large it is at first",
    "critic_hidden_dims": "say --policy.hidden, which is for actor and critic alike",
    "policy policy_kwargs":
        "the policy is described by --policy.hidden, --policy.activation and --policy.module (your own network)",
    "recurrent use_lstm lstm_hidden_size n_lstm_layers":
        f"there are no recurrent policies here; give the policy its past with {_STACK}",
    "frame_stack framestack n_stack": f"use {_STACK}",
    "normalize": "say --policy.normalize-obs true for observations, with any algorithm; --ppo.reward-scale returns is for "
        "the rewards of PPO",
    "cuda gpu num_gpus": "say --device cuda (or cuda:N, several as cuda:0,cuda:1, auto, cpu)",
    "framework": "leave it out: every learner uses torch",
    "vec_env vec_env_type":
        "say --placement processes (lockstep: one process for each env) or --mode batch (workers with several envs each)",
    "track": "say --wandb",
    "tensorboard_log": "say --tensorboard: event files are written to the folder tensorboard of the run",
    "logger": "every run writes metrics.jsonl in its directory; --tensorboard and --wandb write there too",
    "stats_window_size": "leave it out: return_mean is over the newest tenth of the episodes, at least 10 and at most 100",
    "verbose": "leave it out; --console classic prints plain counters, and quiet=True in Python prints nothing",
    "progress_bar": "leave it out: a run shows its progress anyway",
    "callback callbacks": "say --hooks ./file.py:Name, your own code that is called during the run; see docs/hooks.md",
    "capture_video": "train, then say freewheel play RUN --video",
    "render": "train, then say freewheel play RUN",
    "deterministic": "leave it out: evaluations use the likeliest actions, and training draws them from the policy",
    "eval_freq": "say --evals N for N evaluations, evenly spaced over the run",
    "save_interval save_freq checkpoint_freq checkpoint_frequency checkpoint_interval":
        "say --checkpoint-every MINUTES (default 5); freewheel resume RUN continues from the newest checkpoint",
    "save_path model_path": "say --run NAME, and --runs-dir for the folder of all runs; weights are saved in the run's directory",
    "hub push_to_hub": "freewheel export RUN --out FOLDER writes the policy to files that you can upload",
    "torch_deterministic": "leave it out: --mode lockstep, sequential and batch are repeatable with the same --seed",
    "n_trials num_samples optimize_hyperparameters":
        "freewheel tune ENV searches modes, workers, envs and fragments for speed; settings of the algorithm are not searched",
    "resume resume_from resume_from_checkpoint restore load_run load_checkpoint":
        "freewheel resume RUN continues a run; --init RUN begins a new one with the weights of another",
})  # fmt: skip

#: Advice in commands about existing runs.
ABOUT_RUNS = _each({
    "deterministic": "leave it out: the likeliest actions are used anyway",
    "n_eval_episodes num_episodes n_episodes": "say --episodes N",
    "host": "leave it out: the page is for this machine alone, and says how to open it from another one (ssh -L)",
})  # fmt: skip

PLAY = ABOUT_RUNS | _each({
    "record record_video capture_video film mp4": "say --video",
    "gif": "say --render gif",
    "png": "say --render png",
    "render_mode": "say --render human, ansi, gif, mp4 or png",
    "output": "say --out NAME.mp4",
})  # fmt: skip

_REPLAY = "say --algo sac, which learns from a replay buffer and takes Discrete actions too"
#: Algorithms of other libraries, and what to use instead.
ALGORITHMS = _each({
    "a2c a3c": "say --algo ppo; with --ppo.epochs 1 and --ppo.minibatch of a whole update it does the same",
    "trpo": "say --algo ppo; --ppo.target-kl ends an update early",
    "maskableppo ppo_mask maskable_ppo": "say --algo ppo, which reads an action_mask in the observation or in info",
    "recurrentppo ppo_lstm ppo_recurrent": f"say --algo ppo; there are no recurrent policies, but {_STACK}",
    "impala appo": "say --algo ppo --mode continuous, which corrects for the age of rows as V-trace does",
    "dqn ddqn double_dqn qrdqn c51": _REPLAY,
    "rainbow": f"{_REPLAY}, and add --sac.n-step 3 --sac.priority td",
    "td3 ddpg": "say --algo sac; TD3 is a separate package in examples/td3 of the repository, to install with pip",
})  # fmt: skip

#: Other names of commands.
COMMANDS = _each({
    "learn fit": "say freewheel train ENV",
    "enjoy render video": "say freewheel play RUN",
    "test evaluate score predict": "say freewheel eval RUN",
    "list ls": "say freewheel runs",
    "tensorboard dashboard": "say freewheel watch",
})  # fmt: skip

#: Options of some worlds that all others accept, because what they ask for is always true there; and that fact.
IDLE = {"headless": "no window is opened"}


def learner_option(word: str, algo: str, known: Collection[str]) -> str | None:
    """Return the option of this algorithm or of the policy that a word means; `known` has all dotted names."""
    names = (word, *LEARNER.get(word, ()))
    options = (f"{owner}.{name}" for name in names for owner in (algo, "policy"))
    return next((option for option in options if option in known), None)
