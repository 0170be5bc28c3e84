"""One training run of one library with its own defaults, then greedy episodes: one JSON object on standard output.

Nothing is given but the env, the algorithm, the steps and the seed. Both libraries play the same episodes at the end.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from statistics import fmean
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from freewheel.core import Episode

EPISODES, EVAL_SEED = 20, 2000  # the same worlds for every run, and none that a run chose its best weights by
TAIL = 20  # training episodes


def ours(order: Mapping[str, Any]) -> dict[str, Any]:
    """What `freewheel train ENV --algo ALGO --steps N --seed S` does."""
    import freewheel

    returns: list[float] = []

    class Watch(freewheel.Hook):
        def on_episode(self, run: freewheel.Run, episode: Episode) -> None:
            returns.append(episode.ret)

    with TemporaryDirectory() as folder:
        options = {name: order[name] for name in ("algo", "steps", "seed")}
        result = freewheel.train(order["env"], runs_dir=folder, quiet=True, hooks=[Watch()], **options)
        latest, best = (
            freewheel.score(str(result.path), episodes=EPISODES, which=which, seed=EVAL_SEED).returns
            for which in ("latest", "best")
        )
        config = json.loads((result.path / "config.json").read_text())
    kept = {name: config[name] for name in (order["algo"], "policy", "num_envs", "num_steps_per_env") if name in config}
    facts = {"best": fmean(best), "updates": result.summary["updates"], "resolved": kept}
    return {"env_steps": result.summary["env_steps"], "final": fmean(latest), **tail(returns), **facts}


def theirs(order: Mapping[str, Any]) -> dict[str, Any]:
    """What stable-baselines3's first example does: a model of the env by its name, and learn."""
    import gymnasium
    import stable_baselines3
    import torch

    from freewheel.seeding import evaluation_episodes

    torch.set_num_threads(1)
    model = getattr(stable_baselines3, order["algo"].upper())(
        "MlpPolicy", order["env"], seed=order["seed"], device="cpu"
    )
    finished: list[float] = []

    def after_step(scope: Mapping[str, Any], _: Mapping[str, Any]) -> bool:
        finished.extend(float(info["episode"]["r"]) for info in scope["infos"] if "episode" in info)
        return True

    model.learn(total_timesteps=order["steps"], callback=after_step)
    world: Any = gymnasium.make(order["env"])
    played = []
    for number in range(EPISODES):
        obs, _ = world.reset(seed=evaluation_episodes(EVAL_SEED, number, 1).seed(0))
        total, over = 0.0, False
        while not over:
            obs, reward, terminated, truncated, _ = world.step(model.predict(obs, deterministic=True)[0])
            total, over = total + float(reward), terminated or truncated
        played.append(total)
    return {"env_steps": model.num_timesteps, "final": fmean(played), **tail(finished)}


def tail(returns: list[float]) -> dict[str, Any]:
    """What training itself saw last."""
    return {"episodes": len(returns), f"return_{TAIL}": fmean(returns[-TAIL:]) if returns else None}


LIBRARIES: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "freewheel": ours,
    "stable-baselines3": theirs,
}

if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    began = perf_counter()
    answer = LIBRARIES[asked["library"]](asked)
    print(json.dumps({**asked, **answer, "seconds": perf_counter() - began}))
