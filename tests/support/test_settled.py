"""In every mode an environment is excluded from garbage collection after its warm-up, because pauses make steps slow."""

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
def test_an_env_is_frozen_after_its_warm_up(mode: str, tmp_path: Path) -> None:
    """In serial modes the first rows are the warm-up; environments of evaluations are frozen as well."""
    before = gc.get_freeze_count()
    rows = 2 * LENGTH  # of each env in an update
    run = freewheel.train(
        "tests.support.settled:LookedAt", quiet=True, runs_dir=tmp_path,
        mode=mode.partition(",")[0], measures=["frozen"], evals=1,
        eval_episodes=2, num_steps_per_env=rows, steps=UPDATES * 2 * rows, policy={"hidden": [4]}, log_every=1e-9, **MODES[mode],
    )  # fmt: skip
    last = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])
    serial = mode in ("sequential", "lockstep")
    assert last["measure/frozen"] == pytest.approx(1 - 1 / UPDATES if serial else 1.0)
    assert run.summary["eval/frozen"] == 1.0
    assert gc.get_freeze_count() == before


def test_the_env_reports_whether_it_is_frozen() -> None:
    env = LookedAt()
    for frozen in (0.0, 1.0, 0.0):
        if frozen:
            gc.freeze()
        env.reset()
        info = [env.step(0)[4] for _ in range(LENGTH)][-1]
        gc.unfreeze()
        assert info == {"frozen": frozen}
