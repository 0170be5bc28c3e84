"""The fast world of CAGE 2 on one core: episodes a second, by red agent and how many games are played at once."""

from __future__ import annotations

import argparse
import json
import os
import time

import numpy as np

from benchmarks._common import Notebook
from freewheel_cage2.env import Cage2Vector
from freewheel_cage2.scenario import REDS

STEPS = 100
TARGET = 5_000  # episodes/s
GAMES = (1, 64, 256, 1024, 4096)
ROUNDS = 5


def episodes_per_s(red: str, games: int, seconds: float) -> float:
    """Of CPU time, random actions; whole episodes with their resets."""
    world, rng = Cage2Vector(games, red), np.random.default_rng(0)
    world.reset(seed=1)
    everything = np.ones(games, np.bool_)
    played, began = 0, time.process_time()
    while time.process_time() - began < seconds or not played:
        for action in rng.integers(145, size=(STEPS, games)):
            world.step(action)
        world.reset(options={"reset_mask": everything})
        played += games
    return played / (time.process_time() - began)


def main() -> int:
    """Rates in turn, over and over, so that what else the machine does strikes all alike."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="show that it works; nothing is kept")
    quick = parser.parse_args().quick
    notebook = Notebook("cage2_rates", "The fast world of CAGE 2 on one core", quick=quick)
    reds = [red for red in REDS if red != "SleepAgent"]
    rates: dict[tuple[str, int], list[float]] = {(red, games): [] for red in reds for games in GAMES}
    for _ in range(1 if quick else ROUNDS):
        for (red, games), found in rates.items():
            found.append(episodes_per_s(red, games, 0.2 if quick else 2.0))
    for (red, games), found in rates.items():
        notebook.keep({"red_agent": red, "games": games, "episodes_per_s": found, "load": os.getloadavg()[0]})
    lines = ["| red agent | " + " | ".join(f"{games:,} games" for games in GAMES) + " |", "|---|" + "---|" * len(GAMES)]
    for red in reds:
        cells = [f"{np.median(rates[red, games]):,.0f} ({min(rates[red, games]):,.0f})" for games in GAMES]
        lines.append(f"| {red} | " + " | ".join(cells) + " |")
    notebook.write("Episodes of 100 steps a second of CPU time, resets included, median (least).", "\n".join(lines))
    for red in ("B_lineAgent", "RedMeanderAgent"):
        best = max(float(np.median(rates[red, games])) for games in GAMES)
        notebook.judge(f"{red}: {best:,.0f} episodes/s, at least {TARGET:,}", best >= TARGET)
    print(json.dumps({f"{red} {games}": found for (red, games), found in rates.items()}))
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
