"""PPO on the drone beside rsl_rl: the same graphed world, network, batch and settings, in turn on one GPU."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

import freewheel
from benchmarks.device_rates import drone
from freewheel.core import Compile
from freewheel.envs.family import register_ids
from freewheel.rollout.graphs import Program

STEPS, EPOCHS, PARTS, HIDDEN, LR, ENTROPY = 24, 5, 4, (256, 128, 64), 1e-3, 0.002


def rsl_rl(lanes: int, seconds: float, device: str, seed: int) -> dict[str, Any]:
    """rsl_rl's own runner over the graphed world, until the time is up."""
    for tracker in ("torch.utils.tensorboard", "git"):  # imported by rsl_rl, and of no use without a log directory
        sys.modules.setdefault(tracker, MagicMock(SummaryWriter=type("SummaryWriter", (), {})))
    from rsl_rl.env import VecEnv
    from rsl_rl.runners import OnPolicyRunner
    from tensordict import TensorDict

    register_ids()
    import gymnasium

    world: Any = gymnasium.make("freewheel/RoughDrone-v0", num_envs=lanes, device=device).unwrapped
    world.reset(seed=seed)
    action = torch.zeros(lanes, 3, device=device)
    found: dict[str, Any] = {}

    def body() -> None:
        found["obs"], found["reward"], found["terminated"], found["truncated"], found["extras"] = world.step(action)

    compiled: Compile = "graphs" if device == "cuda" else "off"
    program = Program(body, compiled, state=world.state_tensors(), generators=[world.generator])
    assert compiled == "off" or not program.fallback, program.fallback

    class Wrapped(VecEnv):  # type: ignore[misc]
        """The contract that rsl_rl wants; observations are cloned, for the world overwrites them."""

        def __init__(self) -> None:
            self.num_envs, self.num_actions, self.device = lanes, 3, device
            self.cfg: dict[str, Any] = {}
            self.max_episode_length = world.max_episode_length
            self.ended: list[torch.Tensor] = []  # successes, sum of returns, episodes
            self.running = torch.zeros(lanes, device=device)

        @property
        def episode_length_buf(self) -> Any:
            return world.episode_length_buf

        def get_observations(self) -> Any:
            seen = found.get("obs") or world.reset(seed=seed)[0]
            return TensorDict({name: value.clone() for name, value in seen.items()}, batch_size=[lanes])

        def step(self, actions: Any) -> Any:
            action.copy_(actions.clamp(-1, 1))
            program()
            over = found["terminated"] | found["truncated"]
            success = found["extras"]["measures"]["success"]
            self.running += found["reward"]
            self.ended.append(torch.stack([(success * over).sum(), (self.running * over).sum(), over.sum()]))
            self.running *= ~over
            return (
                self.get_observations(),
                found["reward"].clone(),
                over.long(),
                {"time_outs": found["truncated"].clone()},
            )

    env = Wrapped()
    mlp = {"class_name": "rsl_rl.models:MLPModel", "hidden_dims": list(HIDDEN), "activation": "elu"}
    law = {"class_name": "rsl_rl.modules.distribution:GaussianDistribution", "init_std": 1.0, "std_type": "log"}
    settings = {
        "class_name": "rsl_rl.algorithms:PPO", "num_learning_epochs": EPOCHS, "num_mini_batches": PARTS, "learning_rate": LR,
        "gamma": 0.99, "lam": 0.95, "clip_param": 0.2, "value_loss_coef": 0.5, "entropy_coef": ENTROPY, "max_grad_norm": 0.5,
        "schedule": "fixed", "use_clipped_value_loss": False, "normalize_advantage_per_mini_batch": True,
    }  # fmt: skip
    config = {
        "num_steps_per_env": STEPS, "save_interval": 10**9, "obs_groups": {"actor": ["policy"], "critic": ["critic"]},
        "algorithm": settings, "actor": {**mlp, "distribution_cfg": law}, "critic": mlp, "check_for_nan": False,
    }  # fmt: skip
    runner = OnPolicyRunner(env, config, log_dir=None, device=device)
    runner.learn(2)
    _wait(device)
    began, rounds = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        runner.learn(10)
        rounds += 10
    _wait(device)
    elapsed = time.perf_counter() - began
    successes, returns, ends = torch.stack(env.ended[-4 * STEPS :]).sum(0).tolist()
    figures = {"steps_per_s": rounds * STEPS * lanes / elapsed, "env_steps": (rounds + 2) * STEPS * lanes}
    return {"who": "rsl_rl", **figures, "return": returns / ends, "success": successes / ends}


def ours(lanes: int, steps: int, device: str, mode: str, seed: int) -> dict[str, Any]:
    """The same number of rows by this package; the rate after the first second of learning."""
    with tempfile.TemporaryDirectory() as folder:
        result = freewheel.train(
            "freewheel/RoughDrone-v0", num_envs=lanes, num_steps_per_env=STEPS, steps=steps, seed=seed, evals=0,
            options={"mode": mode, "device": device}, runs_dir=folder, log_every=0.5, quiet=True,
            ppo={"epochs": EPOCHS, "minibatch": lanes * STEPS // PARTS, "lr": LR, "entropy": ENTROPY},
            policy={"hidden": HIDDEN, "activation": "elu"},
        )  # fmt: skip
        rows = [json.loads(line) for line in (result.path / "metrics.jsonl").read_text().splitlines()]
    first = next(row for row in rows if row["updates"] >= 4)
    last = rows[-1]
    rate = (last["env_steps"] - first["env_steps"]) / (last["wall_s"] - first["wall_s"])
    return {
        "who": f"freewheel {mode}", "steps_per_s": rate, "env_steps": last["env_steps"], "return": last["return_mean"],
        "success": last["measure/success"], "lag_max": last["lag_max"],
    }  # fmt: skip


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lanes", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/device_rsl.jsonl"))
    options = parser.parse_args()
    register_ids()
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        program = drone(options.lanes, options.device, "graphs" if options.device == "cuda" else "off")
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < 2.0:
            program()
            count += 1
        _wait(options.device)
        rows.append({"who": "world alone", "steps_per_s": count * options.lanes / (time.perf_counter() - began)})
        print(rows[-1], flush=True)
    for seed in range(1, options.seeds + 1):
        theirs = rsl_rl(options.lanes, options.seconds, options.device, seed)
        rows.append({"seed": seed, **theirs})
        print(rows[-1], flush=True)
        for mode in ("lockstep", "continuous", "batch"):
            rows.append({"seed": seed, **ours(options.lanes, theirs["env_steps"], options.device, mode, seed)})
            print(rows[-1], f"{rows[-1]['steps_per_s'] / theirs['steps_per_s']:.2f} x rsl_rl", flush=True)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    with options.out.open("a") as file:
        for row in rows:
            file.write(json.dumps({"device": name, "torch": torch.__version__, "lanes": options.lanes, **row}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
