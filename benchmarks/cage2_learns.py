"""Defenders trained on the fast world of CAGE 2, 100 000 episodes each: what they are worth there and on the real simulator."""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks._common import Notebook, run_python

EPISODES, STEPS = 100_000, 100
MINUTES = 10.0  # for all of it, learning included, on 2 cores
BAR = -20.0  # greedy, on the real simulator, 100 steps
REDS = ("B_lineAgent", "RedMeanderAgent")
MIXTURE = "mixture"
SEEDS = (1, 2, 3)
EXAM = 5  # seed of the episodes that are scored


def train(red: str, seed: int, episodes: int, folder: str) -> dict[str, Any]:
    """One run of the preset; its summary, and how long the whole command took."""
    began = time.monotonic()
    name = f"{red}-{seed}"
    command = [
        "-m",
        "freewheel",
        "train",
        "freewheel/Cage2-v0",
        "--preset",
        "cage2",
        "--red-agent",
        red,
        "--seed",
        seed,
    ]
    run_python(*command, "--steps", episodes * STEPS, "--run", name, "--runs-dir", folder, "--evals", 4, cwd=folder)
    summary = json.loads((Path(folder) / name / "summary.json").read_text())
    return {
        "minutes": (time.monotonic() - began) / 60,
        **{key: summary[key] for key in ("episodes", "steps_per_s", "updates")},
    }


def score(run: Path, red: str, world: str, episodes: int) -> list[float]:
    """Greedy returns; on the real simulator by two processes."""
    shares, lanes = (2, 1) if world == "real" else (1, episodes)
    order = {"run": str(run), "which": "latest", "world": world, "red_agent": red, "lanes": lanes}
    orders = [{**order, "episodes": episodes // shares, "seed": EXAM + share} for share in range(shares)]

    def play(order: dict[str, Any]) -> list[float]:
        answer = run_python("-m", "benchmarks._cage2_score", json.dumps(order), cwd=str(run))
        returns: list[float] = json.loads(answer.splitlines()[-1])["returns"]
        return returns

    with ThreadPoolExecutor(shares) as pool:
        return [value for returns in pool.map(play, orders) for value in returns]


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half of its 95 % interval."""
    return float(np.mean(values)), float(1.96 * np.std(values, ddof=1) / np.sqrt(len(values)))


def measure(red: str, seed: int, options: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    """Train once, then score against each red agent that it was trained for; a row each."""
    trained = train(red, seed, options.episodes, folder)
    rows = []
    for against in REDS if red == MIXTURE else (red,):
        run = Path(folder) / f"{red}-{seed}"
        fast = interval(score(run, against, "fast", options.fast_episodes))
        real = interval(score(run, against, "real", options.real_episodes))
        row = {"trained_against": red, "red_agent": against, "seed": seed, **trained, "fast": fast, "real": real}
        print(json.dumps(row), flush=True)
        rows.append({**row, "load": os.getloadavg()[0]})
    return rows


def main() -> int:
    """Train, score, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="show that it works; nothing is kept")
    parser.add_argument("--episodes", type=int, default=EPISODES, help="to train for")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--reds", nargs="+", default=[*REDS, MIXTURE])
    parser.add_argument("--fast-episodes", type=int, default=1000, help="to score on the fast world")
    parser.add_argument("--real-episodes", type=int, default=300, help="to score on the real simulator")
    options = parser.parse_args()
    if options.quick:
        options.episodes, options.seeds, options.fast_episodes, options.real_episodes = 500, (1,), 100, 4
        options.reds = options.reds[:1]
    notebook = Notebook("cage2_learns", "Defenders of CAGE 2, trained on the fast world", quick=options.quick)
    rows = []
    for seed in options.seeds:
        for red in options.reds:
            with TemporaryDirectory() as folder:
                rows += [notebook.keep(row) for row in measure(red, seed, options, folder)]
    lines = [
        "| trained against | scored against | seed | minutes | fast world | real simulator |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        scores = [f"{row[world][0]:.2f} ± {row[world][1]:.2f}" for world in ("fast", "real")]
        lines.append(
            f"| {row['trained_against']} | {row['red_agent']} | {row['seed']} | {row['minutes']:.1f} | "
            + " | ".join(scores)
            + " |"
        )
    notebook.write(f"{options.episodes:,} episodes each; mean greedy return and its 95 % interval.", "\n".join(lines))
    slowest = max(row["minutes"] for row in rows)
    notebook.judge(f"the slowest training took {slowest:.1f} minutes, at most {MINUTES:.0f}", slowest <= MINUTES)
    for row in rows:
        (fast, around), (real, about) = row["fast"], row["real"]
        who = f"{row['trained_against']}, seed {row['seed']}, against {row['red_agent']}"
        apart = abs(fast - real)
        notebook.judge(
            f"{who}: fast and real are {apart:.2f} apart, at most {around + about:.2f}", apart <= around + about
        )
        if row["trained_against"] != MIXTURE:
            notebook.judge(f"{who}: {real:.2f} on the real simulator, at least {BAR:.0f}", real >= BAR)
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
