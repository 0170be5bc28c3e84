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
from typing import Any
from unittest import mock

HIDDEN = (64, 64)  # tanh, of the actor and of the critic apart
GAMMA, GAE_LAMBDA, CLIP, ENTROPY, VALUE, MAX_GRAD_NORM = 0.99, 0.95, 0.2, 0.0, 0.5, 0.5
WINDOW = 20  # training episodes that a goal is judged by


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


TASKS: Mapping[str, Task] = {
    "cartpole": Task("CartPole-v1", steps=100_000, num_steps=32, epochs=20, lr=1e-3, goal=475.0),
    "halfcheetah": Task("HalfCheetah-v5", steps=150_000, num_steps=256, epochs=10, lr=3e-4),
}


@dataclass
class Watch:
    """What a run has come to, update by update."""

    goal: float | None
    began: float = 0.0
    seconds: float = 0.0
    steps: int = 0
    returns: list[float] = field(default_factory=list)
    reached: tuple[float, int] | None = None  # seconds and env steps at the goal

    def start(self) -> None:
        self.began = perf_counter()

    def updated(self, steps: int, returns: Sequence[float]) -> None:
        """An update has ended after so many env steps; episodes with these returns ended since the one before."""
        self.seconds, self.steps = perf_counter() - self.began, steps
        self.returns += returns
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


def freewheel(task: Task, seed: int, steps: int, watch: Watch) -> None:
    """The product as it is: a whole run with its directory, meter and ledger, only its loop looked at from outside."""
    from freewheel import run
    from freewheel.config import from_options
    from freewheel.core import Collector, Learner, Tick
    from freewheel.loop import loop
    from freewheel.meter import Meter

    def watched(collector: Collector, learner: Learner, meter: Meter) -> Iterator[Tick]:
        watch.start()
        for tick in loop(collector, learner, meter):
            watch.updated(tick.env_steps, [episode.ret for chunk in tick.chunks for episode in chunk.episodes])
            yield tick

    ppo = {
        "lr": task.lr,
        "epochs": task.epochs,
        "minibatch": task.minibatch,
        "gamma": GAMMA,
        "gae_lambda": GAE_LAMBDA,
        "clip": CLIP,
        "entropy": ENTROPY,
        "value": VALUE,
        "max_grad_norm": MAX_GRAD_NORM,
    }
    with TemporaryDirectory() as folder, mock.patch.object(run, "loop", watched):
        options = {"mode": "lockstep", "placement": "inline", "evals": 0, "runs_dir": folder, "threads": 1}
        options |= {"num_envs": task.num_envs, "num_steps_per_env": task.num_steps, "steps": steps, "seed": seed}
        policy = {"hidden": HIDDEN, "activation": "tanh"}
        run.run(from_options(task.env, {**options, "ppo": ppo, "policy": policy}), quiet=True)


def stable_baselines3(task: Task, seed: int, steps: int, watch: Watch) -> None:
    """PPO as its users call it: one process, a Monitor around each env."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    model = PPO(
        "MlpPolicy",
        make_vec_env(task.env, n_envs=task.num_envs, seed=seed),
        learning_rate=task.lr,
        n_steps=task.num_steps,
        batch_size=task.minibatch,
        n_epochs=task.epochs,
        gamma=GAMMA,
        gae_lambda=GAE_LAMBDA,
        clip_range=CLIP,
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
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("seed", type=int)
    parser.add_argument("steps", type=int)
    given = parser.parse_args()
    watch = Watch(TASKS[given.task].goal)
    LIBRARIES[given.library](TASKS[given.task], given.seed, given.steps, watch)
    print(json.dumps(vars(given) | watch.result()))


def _tail_mean(values: Sequence[float], count: int) -> float | None:
    tail = values[-count:]
    return sum(tail) / len(tail) if tail else None


if __name__ == "__main__":
    main()
