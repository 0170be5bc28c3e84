"""One short run whose environments and learner write down when they work: python -m benchmarks._timeline_once '{"mode": ...}'."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import freewheel
from freewheel.core import Metrics
from freewheel.learn.ppo.learner import PPO
from freewheel.testing.straggler import Straggler


class Recorded(Straggler):
    """A Straggler that writes when its steps begin and end, in seconds of the monotonic clock, to a file of its own."""

    def __init__(self, folder: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._file = open(Path(folder) / f"{os.getpid()}-{id(self)}.env", "w", buffering=1)  # noqa: SIM115

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        begun = time.monotonic()
        answer = super().step(action)
        self._file.write(f"{begun} {time.monotonic()}\n")
        return answer


def spans(path: Path) -> list[list[float]]:
    return [[float(word) for word in line.split()] for line in path.read_text().splitlines()]


def main(order: Mapping[str, Any]) -> None:
    """Train, then print {"lanes": spans of each env, "learner": spans of updates}."""
    updates: list[list[float]] = []
    update = PPO.update

    def recorded(self: PPO) -> Metrics:
        begun = time.monotonic()
        metrics = update(self)
        updates.append([begun, time.monotonic()])
        return metrics

    PPO.update = recorded  # type: ignore[method-assign]
    folder = Path.cwd()
    world = {"folder": str(folder), **order["world"]}
    freewheel.train(Recorded, env_args=world, quiet=True, evals=0, **order["options"])
    files = sorted(folder.glob("*.env"), key=lambda path: path.stat().st_ctime)
    longest = sorted((spans(path) for path in files), key=len)[
        -order["options"]["num_envs"] :
    ]  # not those of the probe
    print(json.dumps({"lanes": longest, "learner": updates}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
