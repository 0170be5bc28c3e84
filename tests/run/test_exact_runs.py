"""Whole runs that are stopped twice, by a hook and by a signal, and resumed: they equal the run that was never stopped."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import freewheel
from freewheel.run.hooks import Run
from tests.support.runs import train

WORLD = "tests.support.worlds:Wandering"  # episodes of any length: some are under way at every stop
REPLAYING = {"learning_starts": 38, "batch": 8, "updates_per_row": 0.5, "buffer": 500}
ALGORITHMS: Mapping[str, dict[str, Any]] = {
    "ppo": {"epochs": 2, "minibatch": 7},
    "sac": REPLAYING,
    "mbpo": REPLAYING
    | {"members": 2, "elites": 1, "model_hidden": [8], "model_every": 28, "model_batch": 16, "max_epochs": 2}
    | {"rollouts_per_row": 0.5, "keep_models": 2, "termination": "never", "clock": "serial"},
}
MODES: Mapping[str, dict[str, Any]] = {"sequential": {}, "lockstep": {"placement": "inline"}, "batch": {"workers": 2}}
USUAL: Mapping[str, Any] = {
    "seed": 3, "steps": 14 * 12, "evals": 0, "policy": {"hidden": [8]}, "run": "it", "num_envs": 2, "num_steps_per_env": 7,
}  # fmt: skip


class StopAt:
    """A hook that ends the run after so many rows: by its own call, or as Ctrl-C does."""

    def __init__(self, rows: int, *, by_signal: bool = False) -> None:
        self.rows, self.by_signal = rows, by_signal

    def on_update(self, run: Run, metrics: Mapping[str, float]) -> None:
        if run.env_steps >= self.rows and self.by_signal:
            os.kill(os.getpid(), signal.SIGINT)
        elif run.env_steps >= self.rows:
            run.stop("enough")


@pytest.mark.parametrize(
    ("algo", "mode", "switches", "world"),
    [
        *((algo, mode, {}, {}) for algo in ALGORITHMS for mode in MODES),
        ("sac", "batch", {"priority": "td", "n_step": 3}, {}),
        *((algo, "lockstep", {}, {"env_args": {"discrete": 5}}) for algo in ("sac", "mbpo")),
    ],
    ids=str,
)
def test_stopped_by_a_hook_and_by_a_signal_it_equals_a_run_that_was_not(
    tmp_path: Path, algo: str, mode: str, switches: dict[str, Any], world: dict[str, Any]
) -> None:
    algorithm = ALGORITHMS[algo] | switches
    options: dict[str, Any] = {**USUAL, **MODES[mode], **world, "algo": algo, "mode": mode, algo: algorithm}
    straight = train(tmp_path / "straight", WORLD, **options)
    first = train(tmp_path / "stopped", WORLD, **options, hooks=[StopAt(40)])
    with pytest.raises(KeyboardInterrupt):
        freewheel.resume(first, quiet=True, hooks=[StopAt(90, by_signal=True)])
    second = json.loads((first.path / "summary.json").read_text())
    assert (first.summary["ended"], second["ended"]) == ("enough", "interrupted (SIGINT)")
    last = freewheel.resume(first, quiet=True)
    same = ("weights_sha256", "env_steps", "updates", "episodes", "return_mean", "length_mean", "trained")
    assert {name: last.summary[name] for name in same} == {name: straight.summary[name] for name in same}
    assert len({one["weights_sha256"] for one in (first.summary, second, last.summary)}) == 3, (
        "each of them has learned"
    )
    states = [one.path / "checkpoints" / "latest" / "learner.safetensors" for one in (straight, last)]
    assert states[0].read_bytes() == states[1].read_bytes(), "optimisers, statistics, generators"
