"""Entry point of the process of a measured training. `measure` starts it. It runs `freewheel train`
and records when each update ended."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freewheel.files import disk

if TYPE_CHECKING:
    from freewheel.core import Episode
    from freewheel.run.hooks import Run

FILE = "marks.json"
FINE = 1000  # upper bound on the number of marks, for a training that learns from a replay buffer
ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")  # as in `freewheel train`


class UpdateMarks:
    """A hook that writes the time and the counters at the end of every update to marks.json in the
    run directory."""

    def __init__(self) -> None:
        self._began = 0.0  # start of the training on time.monotonic, a clock that all processes share
        self._marks: list[list[float]] = []
        self._last: list[float] = []
        self._rows = 0
        self._stride = 0
        self._steps = 0  # env steps of finished episodes
        self._whole_episodes = False

    def on_start(self, run: Run) -> None:
        self._began = time.monotonic() - run.seconds
        config = run.config
        self._whole_episodes = config.collector.whole_episodes
        if config.learner.on_policy and not config.collector.episodes_per_update:
            self._rows = config.run.steps_per_env * config.collector.lanes
        else:
            self._stride = (config.run.budget.steps or 0) // FINE

    def on_episode(self, run: Run, episode: Episode) -> None:
        self._steps += episode.length

    def on_update(self, run: Run, metrics: Mapping[str, float]) -> None:
        rows = run.updates * self._rows or run.env_steps
        self._last = [run.seconds, rows, run.updates, run.episodes, self._steps]
        if not self._marks or rows >= self._marks[-1][1] + self._stride:
            self._marks.append(self._last)

    def on_stop(self, run: Run, ended: str) -> None:
        if self._marks and self._marks[-1] is not self._last:
            self._marks.append(self._last)
        noted: dict[str, Any] = {"began": self._began, "whole_episodes": self._whole_episodes, "marks": self._marks}
        disk.replace(Path(run.path, FILE), (json.dumps(noted) + "\n").encode())


def main(argv: Sequence[str]) -> int:
    """Train. Like `freewheel train`, report a failure as one line at the end of the output."""
    from freewheel.transport.command import end_with

    parent, *words = argv
    end_with(int(parent))
    for name in ONE_THREAD:
        os.environ.setdefault(name, "1")
    from freewheel.config import resolve
    from freewheel.errors import FreewheelError
    from freewheel.files.stdout import complain, lasting_output
    from freewheel.run.trainer import run

    trust = "--trust" in words
    try:
        with lasting_output():
            config = resolve.from_argv([word for word in words if word != "--trust"], trust=trust)
            return run(config, hooks=[UpdateMarks()]).exit_code
    except FreewheelError as error:
        complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    from freewheel.transport.command import leave_soon

    ended = main(sys.argv[1:])
    leave_soon(ended)
    raise SystemExit(ended)
