"""What saving costs: a full replay buffer onto the disk and back, and the speed of runs that are saved now and then."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np

from benchmarks._common import Notebook, Row, number, rotated, spread, straggler, table

NAME = "checkpoint"
MOST_FULL_S, MOST_NEXT_S, MOST_STALL_S, MOST_RESUME_S, MOST_COST = 10.0, 1.0, 0.050, 10.0, 0.01
EVERY_S = (
    5.0  # seconds between two saves in the runs: twelve times as often as every minute, or noise would hide the cost
)
SLEEPY = {"law": "lognormal", "mean": 0.010, "kind": "sleep"}
WORLDS: dict[str, dict[str, Any]] = {
    "CartPole-v1 continuous": {"env": "CartPole-v1", "mode": "continuous", "workers": 2, "num_envs": 8},
    "100 sleepers": straggler("continuous", 100, SLEEPY, {}),
}


def buffers(notebook: Notebook, rows: int, rounds: int) -> None:
    order = {"kind": "replay", "rows": rows}
    found: list[Row] = [
        notebook.once("_checkpoint_once", order, {"part": "replay", "round": n + 1}) for n in range(rounds)
    ]
    limits = {
        "full_seconds": ("first save, all of it, s", MOST_FULL_S),
        "next_seconds": ("next save, 20,000 rows later, s", MOST_NEXT_S),
        "full_stall_s": ("the learner waits for the first, s", MOST_STALL_S),
        "next_stall_s": ("and for the next, s", MOST_STALL_S),
        "full_longest_add_s": ("longest `add` while it is saved, s", MOST_STALL_S),
        "resume_s": ("resume, verified, s", MOST_RESUME_S),
    }
    lines = [[text, spread([row[key] for row in found]), f"≤ {limit:g}"] for key, (text, limit) in limits.items()]
    size = f"{rows:,} rows, {number(found[0]['megabytes'])} MB, two networks of 256 × 256"
    notebook.write(f"## A replay buffer of {size}", table(("median (least .. greatest)", "measured", "target"), lines))
    for key, (text, limit) in limits.items():
        worst = max(row[key] for row in found)
        notebook.judge(f"{text}: {worst:.3f}, at most {limit:g}", worst <= limit)
    notebook.judge("every row came back as it was", all(row["same"] for row in found), exact=True)


def runs(notebook: Notebook, world: str, rounds: int, seconds: float) -> None:
    ways = {"not saved": 0.0, "saved": EVERY_S / 60}
    found: dict[str, list[Row]] = {way: [] for way in ways}
    for turn in range(rounds):
        for way in rotated(list(ways), turn):
            options = {**WORLDS[world], "checkpoint_every": ways[way]}
            order = {"kind": "run", "options": options, "seconds": seconds, "warm_s": seconds / 4}
            found[way].append(notebook.once("_checkpoint_once", order, {"part": world, "way": way, "round": turn + 1}))
    speeds = {way: [row["steps_per_s"] for row in rows] for way, rows in found.items()}
    loss = 1 - float(np.median(speeds["saved"])) / float(np.median(speeds["not saved"]))
    a_minute = max(0.0, loss) * EVERY_S / 60
    stall = max(row["longest_stall_s"] for row in found["saved"])
    lines = [[way, spread(values), str(sum(row["saved"] for row in found[way]))] for way, values in speeds.items()]
    notebook.write(
        f"## {world}, saved every {EVERY_S:g} s",
        table(("", "steps/s", "saves"), lines),
        f"Loss {loss:.2%} at one save in {EVERY_S:g} s: {a_minute:.2%} at one a minute. "
        f"The learner waited at most {1000 * stall:.1f} ms.",
    )
    notebook.judge(f"{world}: every minute costs {a_minute:.2%}, at most {MOST_COST:.0%}", a_minute <= MOST_COST)
    notebook.judge(f"{world}: the learner waits at most {1000 * stall:.1f} ms, target 50", stall <= MOST_STALL_S)
    saved = min(row["saved"] for row in found["saved"])
    notebook.judge(f"{world}: every run was saved ({saved} times at least)", saved >= 1, exact=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="show that it works: nothing is kept, no figure counts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("replay", *WORLDS), help="one part")
    given = parser.parse_args()
    notebook = Notebook(NAME, "Saving", quick=given.quick)
    rounds, seconds = (1, 8.0) if given.quick else (given.rounds, 14.0)
    if given.only in (None, "replay"):
        buffers(notebook, 100_000 if given.quick else 1_000_000, rounds)
    for world in WORLDS:
        if given.only in (None, world):
            runs(notebook, world, rounds, seconds)
    return notebook.close()


if __name__ == "__main__":
    sys.exit(main())
