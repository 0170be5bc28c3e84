"""This tree beside the last release, or another checkout of the project, by turns: nothing may have become slower."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks._common import ROOT, Notebook, number, rotated, run_python, spread, straggler, table

NAME = "beside"
BASELINE, CHECKOUTS = ROOT / "benchmarks" / "BASELINE", ROOT / "build" / "beside"
DRONES = "freewheel/RoughDrone-v0"
LEAST = 0.98  # of the other tree's speed
SLEEP = {"law": "lognormal", "mean": 0.010, "kind": "sleep", "length": 100}
BURN = {"law": "lognormal", "mean": 0.001, "kind": "burn", "length": 100}
CAGE2 = {"env": "freewheel/Cage2-v0", "preset": "cage2", "seed": 1, "evals": 0}
SAC = {"env": "Pendulum-v1", "algo": "sac", "mode": "sequential", "seed": 1, "evals": 0}


@dataclass(frozen=True)
class Way:
    """One measurement: what to start, and which figure of its last line counts."""

    arguments: tuple[str, ...]
    key: str
    lower_is_better: bool = False


def ways(given: argparse.Namespace) -> dict[str, Way]:
    times = {"warm_s": given.warm, "window_s": given.window}

    def collect(mode: str, workers: int, world: Mapping[str, Any], key: str, **order: Any) -> Way:
        asked = {"num_steps_per_env": 64, "seed": 1, "ppo": {"epochs": 5, "minibatch": 1600}}
        order = {"options": straggler(mode, workers, world, asked), **times, **order}
        return Way(("-m", "benchmarks._collect_once", json.dumps(order)), key, key == "started_s")

    def train(options: Mapping[str, Any], steps: int) -> Way:
        order = {"options": {**options, "steps": steps}}
        return Way(("-m", "benchmarks._train_once", json.dumps(order)), "steps_per_s")

    def ppo(task: str, steps: int) -> Way:
        return Way(("-m", "benchmarks._ppo_once", "freewheel", task, "1", str(steps)), "steps_per_s")

    few = given.quick
    return {
        **{f"straggler, {mode}": collect(mode, given.workers, SLEEP, "share") for mode in ("continuous", "episodes")},
        **{
            f"burn, {mode}": collect(mode, 8, BURN, "share", learner="none", cores=2)
            for mode in ("continuous", "episodes")
        },
        "start-up": collect("continuous", given.workers, SLEEP, "started_s", learner="none", warm_s=0.5, window_s=0.5),
        "PPO, CartPole": ppo("cartpole", 5_000 if few else 200_000),
        "PPO, HalfCheetah": ppo("halfcheetah", 5_000 if few else 150_000),
        "SAC, Pendulum": train(SAC, 1_500 if few else 6_000),
        "SAC beside a simulator, no arithmetic": Way(
            (str(ROOT / "benchmarks" / "_version_once.py"), *(("100", "200") if few else ("2000", "8000"))),
            "versions_per_s",
        ),
        "CAGE 2, the world alone": Way(("-m", "benchmarks.cage2_rates", "--quick"), "cage2"),
        "CAGE 2, training": train(CAGE2, 50_000 if few else 1_500_000),
    }


def device_ways(given: argparse.Namespace) -> dict[str, Way]:
    """On a GPU; a quick form without one has a CPU and few drones."""
    few, device = given.quick, given.device
    lanes = 64 if few else 4096
    if few and not shutil.which("nvidia-smi"):
        device = "cpu"

    def train(key: str, **options: Any) -> Way:
        budget = {"steps": 150 * lanes, "log_every": 0.01} if few else {"minutes": given.seconds / 60, "log_every": 0.5}
        order = {"env": DRONES, "options": {**options, **budget, "device": device}}
        return Way((str(ROOT / "benchmarks" / "_device_once.py"), json.dumps(order)), key)

    replay = {"batch": lanes, "replay_ratio": 1.0, "learning_starts": (5 if few else 20) * lanes, "buffer": 500_000}
    replay["first_temperature"] = 1.0
    beside = {"mode": "continuous", "workers": 1, "num_envs": lanes}
    return {
        "SAC, 4,096 drones": train("updates_per_s", **beside, algo="sac", sac=replay),
        "PPO, 4,096 drones": train("steps_per_s", preset="drone-ppo", num_envs=lanes),
        "MBPO's learner, 64 drones": train("updates_per_s", preset="drone-mbpo"),
    }


def checkout() -> Path:
    """The commit that benchmarks/BASELINE names, with its own compiled code; made once."""
    commit = next(line for line in BASELINE.read_text().splitlines() if not line.startswith("#")).strip()
    folder = CHECKOUTS / commit[:7]
    if not folder.is_dir():
        archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=False)
        if archive.returncode:
            raise SystemExit(f"this clone has no commit {commit[:7]} (benchmarks/BASELINE): git fetch --unshallow")
        part = folder.with_name(f".part-{folder.name}")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        subprocess.run(["tar", "x", "-C", str(part)], input=archive.stdout, check=True)
        part.rename(folder)
    return folder


def require_kernel(tree: Path) -> None:
    """Compile what is compiled in this tree, or the other one would be slow for no reason of its own."""

    def compiled(root: Path) -> bool:
        return any((root / "freewheel").rglob("_kernel*.so"))

    if compiled(ROOT) and not compiled(tree):
        print(f"compiling the kernel in {tree}", flush=True)
        build = [sys.executable, "-c", "import setuptools; setuptools.setup()", "build_ext", "--inplace"]
        done = subprocess.run(build, cwd=tree, capture_output=True, text=True, check=False)
        if not compiled(tree):
            raise SystemExit(f"this tree has its kernel compiled and {tree} cannot be:\n{done.stdout}{done.stderr}")


def commit_of(tree: Path) -> str:
    """What a checkout is called: its commit, or its folder."""
    asked = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    known = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return (known if (tree / ".git").exists() else "") or tree.resolve().name


def measure(tree: Path, way: Way) -> float:
    """The figure of one run in a process of its own, with the code of this tree."""
    with TemporaryDirectory() as folder:
        output = run_python(*way.arguments, cwd=folder, tree=tree)
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if way.key == "cage2":
        return float(np.mean([np.median(rates) for name, rates in lines[-1].items() if name.endswith(" 4096")]))
    return float(lines[-1][way.key])


def ratio(way: Way, ours: float, theirs: float) -> float:
    return theirs / ours if way.lower_is_better else ours / theirs


def cells(name: str, way: Way, found: Mapping[str, Sequence[float]]) -> list[str]:
    pairs = zip(found["ours"], found["theirs"], strict=True)
    ratios = [ratio(way, ours, theirs) for ours, theirs in pairs]
    return [name, way.key, *(number(float(np.median(found[side]))) for side in ("theirs", "ours")), spread(ratios)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "other", type=Path, nargs="?", help="the other checkout (default: commit of benchmarks/BASELINE)"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: what trains on a GPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--warm", type=float, default=5.0, help="seconds before the window")
    parser.add_argument("--window", type=float, default=12.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run on a GPU")
    parser.add_argument("--only", nargs="+", default=[], help="only measurements whose name holds one of these words")
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.workers, given.warm, given.window = 1, 10, 0.5, 1.0
    other = given.other or (ROOT if given.quick else checkout())
    if given.device == "cpu":
        require_kernel(other)
    commit = commit_of(other)
    name = NAME if given.device == "cpu" else f"{NAME}_{given.device}"
    notebook = Notebook(name, f"This tree beside {commit}", quick=given.quick)
    trees = {"theirs": other.resolve(), "ours": ROOT}
    lines, slow = [], []
    for name, way in (ways if given.device == "cpu" else device_ways)(given).items():
        if given.only and not any(word in name for word in given.only):
            continue
        found: dict[str, list[float]] = {"theirs": [], "ours": []}
        for turn in range(given.rounds):
            for side in rotated(list(trees), turn):
                found[side].append(measure(trees[side], way))
        lines.append(cells(name, way, found))
        notebook.keep({"way": name, "key": way.key, "other": commit, **found, "load": os.getloadavg()[0]})
        middle = float(np.median([ratio(way, *pair) for pair in zip(found["ours"], found["theirs"], strict=True)]))
        print(*lines[-1], sep="  ", flush=True)
        slow += [f"{name} {middle:.3f}"] if middle < LEAST else []
    header = ("measurement", "figure", "other", "this tree", "ratio, median (least .. greatest)")
    notebook.write(table(header, lines))
    notebook.judge(f"below {LEAST} of the other tree: {', '.join(slow) or 'none'}", not slow)
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
