"""What a version of the policy costs beside a batched simulator, without arithmetic: one JSON object on standard output.

SAC on a few drones in `continuous`, one update and one step of the simulator a version. Their programs, which a GPU replays as
CUDA graphs, do nothing after the first few, so that the interpreter is all that is left: what is here is lost on a fast GPU. Run
as a file, with the package that is to be measured on PYTHONPATH: one script measures any commit.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from tempfile import TemporaryDirectory
from typing import Any

import freewheel

REAL = 60  # calls of a program before it does nothing
LANES = 64


def main() -> None:
    warm, measured = int(sys.argv[1]), int(sys.argv[2])  # versions
    try:
        graphs: Any = importlib.import_module("freewheel.rollout.graphs")
    except ImportError:
        graphs = importlib.import_module("freewheel.graphs")
    real, calls, moments = graphs.Program.__call__, dict[int, int](), dict[int, float]()
    learning: list[Any] = []  # the program of the update: the second one that is made

    def call(program: Any) -> None:
        number = calls[id(program)] = calls.get(id(program), 0) + 1
        if number <= REAL:
            real(program)
        if len(calls) > 1 and not learning:
            learning.append(program)
        if learning and program is learning[0]:
            moments[number] = time.perf_counter()

    graphs.Program.__call__ = call
    replay = {"batch": LANES, "replay_ratio": 1.0, "learning_starts": 5 * LANES, "buffer": 20_000}
    replay["first_temperature"] = 1.0
    options: dict[str, Any] = {"algo": "sac", "sac": replay, "mode": "continuous", "workers": 1, "num_envs": LANES}
    options |= {"steps": (warm + measured + 100) * LANES, "policy": {"hidden": (16, 16)}, "evals": 0, "seed": 1}
    with TemporaryDirectory() as folder:
        freewheel.train("freewheel/RoughDrone-v0", quiet=True, device="cpu", runs_dir=folder, **options)
    seconds = moments[warm + measured] - moments[warm]
    print(json.dumps({"versions_per_s": measured / seconds}))


if __name__ == "__main__":
    main()
