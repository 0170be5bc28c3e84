"""A model of the drone saves env steps: greedy success against env steps and seconds, of PPO, SAC and MBPO."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks._common import ONE_THREAD, ROOT, Notebook, number, table
from freewheel.config.resolve import presets

GOAL = 0.9  # share of greedy episodes that reach their goal
ENV = "freewheel/RoughDrone-v0"
#: What SAC and MBPO share in arms of equal updates per row; the preset drone-mbpo says it for MBPO.
SHARED = ("batch", "updates_per_row", "lr", "tau", "first_temperature", "critic_norm", "learning_starts", "buffer")
MARKS = (1_000, 2_000, 4_000, 8_000, 100_000, 1_000_000, 10_000_000)  # env steps at which arms are compared
SECONDS = (10, 20, 30, 45, 60)
#: The same on a CPU in minutes: no lidar and no scan, small networks, short fits.
SMALL: dict[str, Any] = {
    "device": "cpu",
    "mode": "sequential",
    "num-envs": 32,
    "env.lidar": False,
    "env.height_scan": False,
    "policy.hidden": "64 64",
}
SMALL_MODEL: dict[str, Any] = {
    "mbpo.members": 3,
    "mbpo.elites": 2,
    "mbpo.model-hidden": "64 64",
}
QUICK: dict[str, Any] = {"steps": 700, "minutes": 1, "evals": 2, "eval-episodes": 8}
QUICK_MODEL: dict[str, Any] = {
    "mbpo.max-epochs": 2,
    "mbpo.rollouts-per-row": 1,
    "mbpo.learning-starts": 256,
    "mbpo.updates-per-row": 1,
}


def flags(options: Mapping[str, Any]) -> list[str]:
    return [word for key, value in options.items() for word in (f"--{key}", *str(value).split())]


def arms(small: bool) -> dict[str, list[str]]:
    """The options of every arm."""
    preset = presets()["drone-mbpo"]
    model, lanes = preset["mbpo"], preset["num_envs"]
    shared = {f"sac.{key.replace('_', '-')}": model[key] for key in SHARED if key in model}
    sac = flags({"algo": "sac", "mode": "continuous", "num-envs": lanes, **shared})
    found = {
        "mbpo": ["--preset", "drone-mbpo"],
        "sac, same lanes and updates": sac,
        "sac, same lanes, an update a vector step": [*sac, "--sac.updates-per-row", str(1 / lanes)],
        "sac, preset": ["--preset", "drone-sac"],
        "ppo, preset": ["--preset", "drone-ppo"],
    }
    if small:
        own = {"mbpo": SMALL_MODEL, "ppo, preset": {"ppo.minibatch": 384}}
        own["sac, preset"] = {"sac.learning-starts": 2048, "sac.batch": 256}
        found = {arm: [*words, *flags(SMALL | own.get(arm, {}))] for arm, words in found.items()}
    return found


def start(arm: str, seed: int, words: Sequence[str], folder: Path) -> tuple[subprocess.Popen[str], Path]:
    run = f"{arm.replace(', ', '-').replace(' ', '-')}-{seed}"
    command = [sys.executable, "-m", "freewheel", "train", ENV, *words, "--seed", str(seed)]
    command += ["--runs-dir", str(folder), "--run", run]
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True), folder / run


def curve(run: Path) -> list[dict[str, float]]:
    """Every evaluation, at the metrics row that first tells it; the closing one at the end."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found, last = list[dict[str, float]](), None
    for row in rows:
        told = row.get("eval/success"), row.get("eval_return")
        if told[0] is not None and told != last:
            last = told
            seen = {"env_steps": row["env_steps"], "wall_s": row["wall_s"], "success": told[0], "return": told[1]}
            found.append({**seen, "updates": row["updates"], "training_success": row.get("measure/success") or 0.0})
    return found


def reached(points: Sequence[Mapping[str, float]], key: str) -> float:
    """env_steps or wall_s of the first evaluation that has the goal."""
    return next((point[key] for point in points if point["success"] >= GOAL), float("inf"))


def at(points: Sequence[Mapping[str, float]], key: str, mark: float) -> str:
    """Success at the last evaluation until then; - where a run ended long before."""
    before = [point for point in points if point[key] <= mark]
    over = not points or points[-1][key] < mark / 2
    return "-" if over or not before else f"{before[-1]['success']:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(arms(False)), default=list(arms(False)))
    parser.add_argument("--minutes", type=float, default=0.6, help="of each run")
    parser.add_argument("--steps", type=int, default=0, help="of each run at most; 0: no bound")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--small", action="store_true", help="a form for a CPU")
    parser.add_argument("--quick", action="store_true", help="a few hundred steps, nothing kept")
    options = parser.parse_args()
    small, seeds = options.small or options.quick, options.seeds[: 1 if options.quick else None]
    budget = {"minutes": options.minutes, "evals": 24, "eval-share": 0.3, "eval-episodes": 128}
    budget |= {"steps": options.steps} if options.steps else {}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() and not small else "CPU"
    notebook = Notebook(
        "drone_mbpo", f"RoughDrone: env steps and seconds to {GOAL} success, {device}", quick=options.quick
    )
    every, jobs = arms(small), list[tuple[str, int, list[str]]]()
    for arm in options.arms:
        more = budget if not options.quick else QUICK | (QUICK_MODEL if arm == "mbpo" else {})
        jobs += [(arm, seed, [*every[arm], *flags(more)]) for seed in seeds]
    curves = dict[tuple[str, int], list[dict[str, float]]]()
    with TemporaryDirectory() as folder:
        for first in range(0, len(jobs), options.jobs):
            group = jobs[first : first + options.jobs]
            running = [start(*job, Path(folder)) for job in group]
            for (arm, seed, _), (process, run) in zip(group, running, strict=True):
                said, _ = process.communicate(timeout=3600)
                if process.returncode:
                    raise SystemExit(f"{arm}, seed {seed} failed:\n{said}")
                curves[arm, seed] = curve(run)
                for point in curves[arm, seed]:
                    notebook.keep({"arm": arm, "seed": seed, "device": device, "jobs": options.jobs, **point})
                print(arm, seed, *(f"{p['env_steps']}:{p['success']:.2f}" for p in curves[arm, seed]), flush=True)
    tell(notebook, curves)
    return notebook.close()


def tell(notebook: Notebook, curves: Mapping[tuple[str, int], Sequence[Mapping[str, float]]]) -> None:
    rows = []
    for (arm, seed), points in curves.items():
        goal = [number(reached(points, key)) for key in ("env_steps", "wall_s")]
        best = max((point["success"] for point in points), default=0.0)
        marks = [at(points, "env_steps", mark) for mark in MARKS] + [at(points, "wall_s", mark) for mark in SECONDS]
        rows.append([arm, str(seed), *goal, f"{best:.2f}", *marks])
    heads = [f"{mark:,} steps" for mark in MARKS] + [f"{mark} s" for mark in SECONDS]
    notebook.write(table(["arm", "seed", f"steps to {GOAL}", "seconds", "best", *heads], rows))
    notebook.judge("every run was evaluated", all(curves.values()), exact=True)
    for seed in sorted({seed for arm, seed in curves if arm == "mbpo"}):
        ours = reached(curves["mbpo", seed], "env_steps")
        others = {arm: reached(points, "env_steps") for (arm, other), points in curves.items() if other == seed}
        sac = min((steps for arm, steps in others.items() if arm.startswith("sac")), default=float("inf"))
        text = f"seed {seed}: MBPO reaches {GOAL} after {number(ours)} env steps, SAC after {number(sac)}"
        notebook.judge(text, ours < sac)


if __name__ == "__main__":
    sys.exit(main())
