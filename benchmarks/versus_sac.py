"""SAC beside stable-baselines3: the same settings and steps, each on a core of its own at the same time."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np

from benchmarks._common import ONE_THREAD, ROOT, append, context

TASKS: dict[str, dict[str, Any]] = {
    "pendulum": {"env": "Pendulum-v1", "steps": 6_000, "starts": 200},
    "halfcheetah": {"env": "HalfCheetah-v5", "steps": 10_000, "starts": 1_000},
}
LIBRARIES = ("freewheel", "stable-baselines3")
TARGET = 1.3


def start(order: dict[str, Any], core: int) -> subprocess.Popen[str]:
    command = ["taskset", "-c", str(core), sys.executable, "-m", "benchmarks._sac_once", json.dumps(order)]
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def interval(values: list[float]) -> tuple[float, float, float]:
    """Mean and its 95 % bootstrap interval."""
    draws = np.random.default_rng(0).choice(values, (10_000, len(values))).mean(1)
    low, high = np.quantile(draws, (0.025, 0.975))
    return float(np.mean(values)), float(low), float(high)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a few updates, one seed, nothing kept")
    options = parser.parse_args()
    missed, cores = False, sorted(os.sched_getaffinity(0))[:2]
    for name in options.tasks:
        task, rows = TASKS[name], list[dict[str, Any]]()
        for seed in range(1, 2 if options.quick else options.seeds + 1):
            quick = {"starts": 100, "steps": 200, "episodes": 1, "log_every": 0.05} if options.quick else {}
            orders = [{**task, **quick, "who": who, "seed": seed} for who in LIBRARIES]
            running = [start(order, cores[(i + seed) % len(cores)]) for i, order in enumerate(orders)]
            for order, process in zip(orders, running, strict=True):
                answer, _ = process.communicate(timeout=3600)
                row = {**order, **json.loads(answer.splitlines()[-1])}
                rows.append(row)
                told = f"{row['updates_per_s']:.1f} updates/s, return {np.mean(row['returns']):.1f}"
                print(name, seed, row["who"], told, flush=True)
                if not options.quick:
                    append("versus_sac", {**row, **context()})
        ours, theirs = ([row for row in rows if row["who"] == who] for who in LIBRARIES)
        ratios = [one["updates_per_s"] / other["updates_per_s"] for one, other in zip(ours, theirs, strict=True)]
        means = [[float(np.mean(row["returns"])) for row in side] for side in (ours, theirs)]
        for who, values in zip(LIBRARIES, means, strict=True):
            mean, low, high = interval(values)
            print(f"{name}: {who} return {mean:.1f} ({low:.1f} .. {high:.1f})")
        not_worse = interval(means[0])[2] >= interval(means[1])[1]
        met = bool(np.median(ratios) >= TARGET) and not_worse
        spread = f"{np.median(ratios):.2f} x updates/s ({min(ratios):.2f} .. {max(ratios):.2f})"
        print(f"{'PASS' if met else 'FAIL'}: {name}: {spread}, returns {'overlap' if not_worse else 'are below'}")
        missed |= not met
    print("missed: see FAIL above" if missed and not options.quick else "all targets that count are met")
    return int(missed and not options.quick)


if __name__ == "__main__":
    sys.exit(main())
