"""Rates of one device: the drone simulated, and updates of SAC and of the ensemble, launched one by one and from graphs."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from freewheel.core import ActionSpec, BatchSpec, Compile, EnvSpec, Slice
from freewheel.envs.batched import BatchedConfig
from freewheel.envs.family import register_ids
from freewheel.learn.mbpo.config import MBPOConfig
from freewheel.learn.mbpo.dynamics import ModelSpec
from freewheel.learn.mbpo.fitting import Fitter
from freewheel.learn.replay.rows import Columns
from freewheel.learn.sac.config import SACConfig
from freewheel.learn.sac.learner import SAC
from freewheel.learn.spec import Compute, LearnerSpec
from freewheel.policies.spec import PolicyConfig
from freewheel.rollout.graphs import Program
from freewheel.seeding import training_episodes


def rate(call: Callable[[], None], seconds: float, device: str) -> float:
    """Calls a second: the median of five windows."""
    wait: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(3):
        call()
    wait()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < seconds / 10:
        call()
        calls += 1
    wait()
    each = (time.perf_counter() - began) / calls
    windows = []
    for _ in range(5):
        count = max(1, int(seconds / 5 / each))
        began = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        windows.append(count / (time.perf_counter() - began))
    return sorted(windows)[2]


def drone(lanes: int, device: str, compile: Compile, **options: Any) -> Program:  # noqa: A002
    env = BatchedConfig("freewheel/RoughDrone-v0", options, device=device).make(range(lanes))
    env.reset([training_episodes(1, lane) for lane in range(1)])
    action = torch.rand(lanes, *env.spec.action.shape, device=device) * 2 - 1

    def step() -> None:
        env.step(action)

    return Program(step, compile, state=env.state_tensors(), generators=env.generators)


def sac(batch: int, device: str, compile: Compile) -> Callable[[], None]:  # noqa: A002
    spec = EnvSpec(
        "probe", 1, 17, "float32", (Slice("policy", 0, 17, (17,)),), ActionSpec("box", 6, (-1.0,) * 6, (1.0,) * 6)
    )
    policy = PolicyConfig(hidden=(256, 256), activation="relu", head="squashed").resolve(spec)
    task = LearnerSpec(
        policy=policy,
        batch=BatchSpec(1, 1),
        seed=0,
        total_steps=50_000,
        compute=Compute(device=device, compile=compile),
    )
    learner = SAC(SACConfig(batch=batch), task)
    learner.replay.add(torch.randn(20_000, learner.replay.columns.width, device=device))
    learner.updater.step()
    assert compile == "off" or not learner.updater.fallback, learner.updater.fallback
    return learner.updater.step


def ensemble(device: str, compile: Compile) -> Callable[[], None]:  # noqa: A002
    spec = ModelSpec(Columns(11, 3), 7, (200,) * 4, "delta", True, False)
    fitter = Fitter(spec, MBPOConfig(), 0, device, compile)
    fitter._append(torch.randn(16_000, spec.columns.width, device=device))
    fitter._draw()

    def step() -> None:
        fitter._column %= 10_000
        fitter._step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/device_rates.jsonl"))
    options = parser.parse_args()
    device, rows = options.device, []
    register_ids()
    modes: list[Compile] = ["off", "graphs"] if device == "cuda" else ["off"]
    torch.set_num_threads(1)
    worlds = (
        [(4096, True), (4096, False), (16384, True)] if device == "cuda" else [(256, False), (1024, False), (256, True)]
    )
    with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else torch.no_grad():
        for compile in modes:  # noqa: A001
            for lanes, lidar in worlds:
                program = drone(lanes, device, compile, lidar=lidar)
                steps = rate(program, options.seconds, device) * lanes
                rows.append(
                    {"what": "drone", "lanes": lanes, "lidar": lidar, "compile": compile, "env_steps_per_s": steps}
                )
                print(rows[-1], program.fallback, flush=True)
        torch.set_grad_enabled(True)
        for compile in modes:  # noqa: A001
            for batch in (256, 4096):
                figure = rate(sac(batch, device, compile), options.seconds, device)
                rows.append({"what": "sac", "batch": batch, "compile": compile, "updates_per_s": figure})
                print(rows[-1], flush=True)
            figure = rate(ensemble(device, compile), options.seconds, device)
            rows.append({"what": "ensemble", "batch": 256, "compile": compile, "updates_per_s": figure})
            print(rows[-1], flush=True)
    name = torch.cuda.get_device_name() if device == "cuda" else "1 CPU thread"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as file:
        for row in rows:
            file.write(json.dumps({"device": name, "torch": torch.__version__, **row}) + "\n")


if __name__ == "__main__":
    main()
