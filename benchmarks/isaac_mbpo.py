"""MBPO on Isaac Lab's own Cartpole on the CPU: greedy returns beside SAC after equal env steps, and beside random actions."""

from __future__ import annotations

import argparse
import importlib.util
import sys

from benchmarks._common import Notebook, table

ARMS = ("mbpo", "sac", "mbpo, task given")
RISE = 12.0  # of the return over random actions', which is about -16; at most it is 5
NEEDED = "benchmarks.isaac_mbpo needs Isaac Lab: make .venv-isaac/.ready, then .venv-isaac/bin/python -m benchmarks.isaac_mbpo"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4_800)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--arms", choices=ARMS, nargs="+", default=list(ARMS))
    parser.add_argument("--quick", action="store_true", help="2,000 steps, one seed, MBPO alone, nothing kept")
    options = parser.parse_args()
    if importlib.util.find_spec("isaaclab") is None:
        sys.exit(NEEDED)
    if options.quick:
        options.steps, options.seeds, options.arms = 2_000, [1], ["mbpo"]
    notebook = Notebook("isaac_mbpo", "MBPO on Isaac-Cartpole-Direct, on the CPU", quick=options.quick)
    random = notebook.once("_isaac_once", {"arm": "random"}, {"arm": "random"})["final_eval"]
    rows = []
    for arm in options.arms:
        for seed in options.seeds:
            order = {"arm": arm, "seed": seed, "steps": options.steps}
            rows.append(notebook.once("_isaac_once", order, {"arm": arm, "seed": seed}))
    lines = [(row["arm"], str(row["seed"]), f"{row['final_eval']:.1f}", f"{row['wall_s']:.0f}") for row in rows]
    header = ("", "seed", f"after {options.steps:,} env steps", "seconds")
    notebook.write(f"Greedy returns. Random actions earn {random:.1f}.", table(header, lines))
    for arm in options.arms:
        least = min(row["final_eval"] for row in rows if row["arm"] == arm)
        if arm != "sac":
            notebook.judge(f"{arm}: {least:.1f} at least, random actions {random:.1f}", least >= random + RISE)
    return notebook.close()


if __name__ == "__main__":
    sys.exit(main())
