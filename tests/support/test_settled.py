"""In every mode a world that is warmed up is kept from the garbage collector, whose pauses are what makes slow steps slow."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import freewheel
from tests.support.settled import LENGTH, LookedAt

MODES: Mapping[str, dict[str, Any]] = {
    "sequential": {"num_envs": 2},
    "lockstep": {"num_envs": 2, "placement": "inline"},
    "lockstep, in processes": {"num_envs": 2, "placement": "processes"},
    "batch": {"workers": 1, "num_envs": 2},
    "continuous": {"workers": 1, "num_envs": 2},
    "episodes": {"workers": 2},
}
UPDATES = 5


@pytest.mark.parametrize("mode", MODES)
def test_a_world_that_is_warmed_up_is_frozen(mode: str, tmp_path: Path) -> None:
    """In turn with the learner the first rows are the warm-up; whoever evaluates is frozen as well."""
    before = gc.get_freeze_count()
    rows = 2 * LENGTH  # of each env an update
    run = freewheel.train(
        "tests.support.settled:LookedAt", quiet=True, runs_dir=tmp_path,
        mode=mode.partition(",")[0], measures=["frozen"], evals=1,
        eval_episodes=2, num_steps_per_env=rows, steps=UPDATES * 2 * rows, policy={"hidden": [4]}, log_every=1e-9, **MODES[mode],
    )  # fmt: skip
    last = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])
    in_turn = mode in ("sequential", "lockstep")
    assert last["measure/frozen"] == pytest.approx(1 - 1 / UPDATES if in_turn else 1.0)
    assert run.summary["eval/frozen"] == 1.0
    assert gc.get_freeze_count() == before


def test_the_world_can_tell() -> None:
    world = LookedAt()
    for frozen in (0.0, 1.0, 0.0):
        if frozen:
            gc.freeze()
        world.reset()
        info = [world.step(0)[4] for _ in range(LENGTH)][-1]
        gc.unfreeze()
        assert info == {"frozen": frozen}
