"""One run of SAC, by this package or by stable-baselines3, with the same settings; answers with one line of JSON."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch

BATCH, LR, GAMMA, TAU, HIDDEN = 256, 3e-4, 0.99, 0.005, (256, 256)
EPISODES, EVAL_SEED = 20, 5000


def ours(order: dict[str, Any]) -> dict[str, Any]:
    import freewheel

    with tempfile.TemporaryDirectory() as folder:
        result = freewheel.train(
            order["env"], algo="sac", mode="sequential", num_envs=1, steps=order["steps"], seed=order["seed"], evals=0,
            runs_dir=folder, quiet=True, log_every=order.get("log_every", 1.0),
            sac={
                "batch": BATCH, "lr": LR, "gamma": GAMMA, "tau": TAU, "learning_starts": order["starts"],
                "first_temperature": 1.0,
            },
            policy={"hidden": HIDDEN, "normalize_obs": False},
        )  # fmt: skip
        summary = result.summary
        rows = [json.loads(line) for line in (result.path / "metrics.jsonl").read_text().splitlines()]
        from freewheel.run.saved import open_run

        actor, _ = open_run(result.path.name, folder).actor("latest")
    rng = np.random.default_rng(0)
    first = next(row for row in rows if row["updates"] > 0)
    rate = (summary["updates"] - first["updates"]) / (rows[-1]["wall_s"] - first["wall_s"])
    low, high = _bounds(order["env"])

    def act(obs: Any) -> Any:
        scaled = actor.act(np.asarray(obs, np.float32)[None], rng, greedy=True).action[0]
        return low + (scaled + 1) / 2 * (high - low)

    return {"updates_per_s": rate, "updates": summary["updates"], "returns": play(order, act)}


def theirs(order: dict[str, Any]) -> dict[str, Any]:
    from stable_baselines3 import SAC

    model = SAC(
        "MlpPolicy", order["env"], learning_rate=LR, batch_size=BATCH, gamma=GAMMA, tau=TAU, learning_starts=order["starts"],
        buffer_size=order["steps"] + 1, train_freq=1, gradient_steps=1, policy_kwargs={"net_arch": list(HIDDEN)},
        device="cpu", seed=order["seed"],
    )  # fmt: skip
    model.learn(order["starts"] + 20)
    began = time.perf_counter()
    model.learn(order["steps"] - order["starts"] - 20, reset_num_timesteps=False)
    updates = order["steps"] - order["starts"] - 20
    rate = updates / (time.perf_counter() - began)
    found = play(order, lambda obs: model.predict(obs, deterministic=True)[0])
    return {"updates_per_s": rate, "updates": updates, "returns": found}


def play(order: Mapping[str, Any], act: Any) -> list[float]:
    """Greedy episodes from the same starts for everyone."""
    world, returns = gymnasium.make(order["env"]), []
    for episode in range(order.get("episodes", EPISODES)):
        obs, _ = world.reset(seed=EVAL_SEED + episode)
        total, over = 0.0, False
        while not over:
            obs, reward, terminated, truncated, _ = world.step(act(obs))
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    return returns


def _bounds(env: str) -> tuple[Any, Any]:
    space: Any = gymnasium.make(env).action_space
    return space.low, space.high


if __name__ == "__main__":
    torch.set_num_threads(1)
    wanted = json.loads(sys.argv[1])
    print(json.dumps((ours if wanted["who"] == "freewheel" else theirs)(wanted)))
