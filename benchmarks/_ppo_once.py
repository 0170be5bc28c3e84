"""One PPO training run of one library in this process, timed from its first env step: one JSON object on standard output.

Both libraries are watched at the same place, the end of each update, and both train to the same number of env steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from freewheel.run.naming import Result

HIDDEN = (64, 64)  # tanh, of the actor and of the critic apart
CLIP, ENTROPY, VALUE, MAX_GRAD_NORM = 0.2, 0.0, 0.5, 0.5
WINDOW = 20  # training episodes that a goal is judged by
CURVE_S = 0.05  # seconds between two points of a learning curve


@dataclass(frozen=True)
class Task:
    """A world and the settings that both libraries train on it with."""

    env: str
    steps: int
    num_steps: int  # of each env, an update
    epochs: int
    lr: float
    num_envs: int = 8
    minibatch: int = 256
    goal: float | None = None  # mean training return that counts as solved
    gamma: float = 0.99
    gae_lambda: float = 0.95
    lr_fades: bool = False  # to 0 over the run
    clip_fades: bool = False
    normalize_obs: bool = False


TASKS: Mapping[str, Task] = {
    "cartpole": Task("CartPole-v1", steps=100_000, num_steps=32, epochs=20, lr=1e-3, goal=475.0),
    "halfcheetah": Task("HalfCheetah-v5", steps=150_000, num_steps=256, epochs=10, lr=3e-4),
}
PRESETS: Mapping[str, tuple[str, str]] = {  # tasks whose settings are those of a preset
    "cartpole-preset": ("CartPole-v1", "cartpole"),
    "halfcheetah-preset": ("HalfCheetah-v5", "halfcheetah"),
}


def find_task(name: str) -> Task:
    """A task by its name; that of a preset is read from the preset."""
    if name in TASKS:
        return TASKS[name]
    from freewheel.config.resolve import from_options
    from freewheel.learn.ppo.config import PPOConfig

    env, preset = PRESETS[name]
    config = from_options(env, {"preset": preset})
    ppo, run = config.learner, config.run
    assert isinstance(ppo, PPOConfig)
    assert ppo.minibatch != "auto", "the presets give it"
    return Task(
        env=env,
        steps=150_000,
        num_steps=run.steps_per_env,
        epochs=ppo.epochs,
        lr=ppo.lr,
        minibatch=ppo.minibatch,
        gamma=ppo.gamma,
        gae_lambda=ppo.gae_lambda,
        lr_fades=ppo.lr_schedule == "linear",
        clip_fades=ppo.clip_schedule == "linear",
        normalize_obs=config.policy.normalize_obs is True,
    )


@dataclass
class Watch:
    """What a run has come to, update by update."""

    goal: float | None
    began: float = 0.0
    seconds: float = 0.0
    steps: int = 0
    returns: list[float] = field(default_factory=list)
    reached: tuple[float, int] | None = None  # seconds and env steps at the goal
    curve: list[tuple[float, int, float | None]] = field(default_factory=list)  # seconds, env steps, return_100

    def start(self) -> None:
        self.began = perf_counter()

    def updated(self, steps: int, returns: Sequence[float]) -> None:
        """An update has ended after so many env steps; episodes with these returns ended since the one before."""
        self.seconds, self.steps = perf_counter() - self.began, steps
        self.returns += returns
        if not self.curve or self.seconds - self.curve[-1][0] >= CURVE_S:
            self.curve.append((round(self.seconds, 3), steps, _tail_mean(self.returns, 100)))
        if self.goal is None or self.reached is not None or len(self.returns) < WINDOW:
            return
        if sum(self.returns[-WINDOW:]) >= WINDOW * self.goal:
            self.reached = self.seconds, self.steps

    def result(self) -> dict[str, Any]:
        seconds_to_goal, steps_to_goal = self.reached or (None, None)
        return {
            "env_steps": self.steps,
            "seconds": self.seconds,
            "steps_per_s": self.steps / self.seconds,
            "seconds_to_goal": seconds_to_goal,
            "steps_to_goal": steps_to_goal,
            "episodes": len(self.returns),
            "return_20": _tail_mean(self.returns, 20),
            "return_100": _tail_mean(self.returns, 100),
        }


def train(env: str, options: Mapping[str, Any], watch: Watch) -> Result:
    """The product as it is: a whole run with its directory, meter and ledger, only its loop looked at from outside."""
    from freewheel.config.resolve import from_options
    from freewheel.core import Collector, Learner, Tick
    from freewheel.loop import loop
    from freewheel.metrics.meter import Meter
    from freewheel.run import session
    from freewheel.run.trainer import run

    def watched(collector: Collector, learner: Learner, meter: Meter, **options: Any) -> Iterator[Tick]:
        watch.start()
        returns: list[float] = []
        for tick in loop(collector, learner, meter, **options):
            returns += [episode.ret for chunk in tick.chunks for episode in chunk.episodes]
            if tick.metrics is not None:
                watch.updated(learner.rows().trained, returns)
                returns = []
            yield tick

    with TemporaryDirectory() as folder, mock.patch.object(session, "loop", watched):
        return run(from_options(env, {"runs_dir": folder, **options}), quiet=True)


def freewheel(task: Task, seed: int, steps: int, watch: Watch) -> None:
    """Lockstep, every env in this process."""
    ppo = {
        "lr": task.lr,
        "lr_schedule": "linear" if task.lr_fades else "constant",
        "epochs": task.epochs,
        "minibatch": task.minibatch,
        "gamma": task.gamma,
        "gae_lambda": task.gae_lambda,
        "clip": CLIP,
        "clip_schedule": "linear" if task.clip_fades else "constant",
        "entropy": ENTROPY,
        "value": VALUE,
        "max_grad_norm": MAX_GRAD_NORM,
    }
    policy = {"hidden": HIDDEN, "activation": "tanh", "normalize_obs": task.normalize_obs}
    options = {"mode": "lockstep", "placement": "inline", "evals": 0, "threads": 1, "ppo": ppo, "policy": policy}
    options |= {"num_envs": task.num_envs, "num_steps_per_env": task.num_steps, "steps": steps, "seed": seed}
    train(task.env, options, watch)


def stable_baselines3(task: Task, seed: int, steps: int, watch: Watch) -> None:
    """PPO as its users call it: one process, a Monitor around each env."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    def faded(value: float, fades: bool) -> float | Callable[[float], float]:
        return (lambda left: value * left) if fades else value

    torch.set_num_threads(1)
    envs = make_vec_env(task.env, n_envs=task.num_envs, seed=seed)
    model = PPO(
        "MlpPolicy",
        VecNormalize(envs, norm_reward=False) if task.normalize_obs else envs,
        learning_rate=faded(task.lr, task.lr_fades),
        n_steps=task.num_steps,
        batch_size=task.minibatch,
        n_epochs=task.epochs,
        gamma=task.gamma,
        gae_lambda=task.gae_lambda,
        clip_range=faded(CLIP, task.clip_fades),
        ent_coef=ENTROPY,
        vf_coef=VALUE,
        max_grad_norm=MAX_GRAD_NORM,
        policy_kwargs={"net_arch": {"pi": list(HIDDEN), "vf": list(HIDDEN)}, "activation_fn": torch.nn.Tanh},
        seed=seed,
        device="cpu",
    )
    update, finished = model.train, list[float]()

    def watched() -> None:
        update()
        watch.updated(model.num_timesteps, finished)
        finished.clear()

    def after_step(scope: Mapping[str, Any], _: Mapping[str, Any]) -> bool:
        finished.extend(float(info["episode"]["r"]) for info in scope["infos"] if "episode" in info)
        return True

    with mock.patch.object(model, "train", watched):
        watch.start()
        model.learn(total_timesteps=steps, callback=after_step)


LIBRARIES: Mapping[str, Callable[[Task, int, int, Watch], None]] = {
    "freewheel": freewheel,
    "stable-baselines3": stable_baselines3,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("task", choices=[*TASKS, *PRESETS])
    parser.add_argument("seed", type=int)
    parser.add_argument("steps", type=int)
    given = parser.parse_args()
    task = find_task(given.task)
    watch = Watch(task.goal)
    LIBRARIES[given.library](task, given.seed, given.steps, watch)
    print(json.dumps(vars(given) | watch.result()))


def _tail_mean(values: Sequence[float], count: int) -> float | None:
    tail = values[-count:]
    return sum(tail) / len(tail) if tail else None


if __name__ == "__main__":
    main()
