"""A task of Isaac Lab, by MBPO with eight collectors (v1).

Further options may follow: `python isaac_lab.py --dry-run` shows the plan. Where Isaac Lab or a GPU is missing, --substitute
takes our drone and the CPU, and says so.
"""

from __future__ import annotations

import sys

import freewheel
from freewheel.cli.main import main

RUN = "isaac-drone"
LINE = [
    *("train", "isaaclab:Isaac-Exploration-Rough-Drone-v0", "--substitute", "--headless", "--device", "cuda:0"),
    *("--preset", "isaac-64", "--minutes", "10", "--run", RUN),
]

if __name__ == "__main__":
    code = main([*LINE, *sys.argv[1:]])
    if code or "--dry-run" in sys.argv:
        sys.exit(code)
    score = freewheel.score(RUN, episodes=16)
    print(f"return {score.mean:.1f} ± {score.spread:.1f}; freewheel play {RUN} shows an episode")
