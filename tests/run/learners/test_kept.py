"""How many full checkpoints are kept where several learners have to agree on one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from freewheel.config.resolve import from_options
from freewheel.run.checkpoints import checkpoint
from freewheel.run.planning import plan
from freewheel.run.saved import RunDirectory
from tests.support.runs import IDENTITY


@pytest.mark.parametrize(("learners", "kept"), [(1, [3, 2]), (2, [3, 2, 1])])
def test_one_of_several_learners_may_die_in_the_save_before_last(
    tmp_path: Path, learners: int, kept: list[int]
) -> None:
    options = {"runs_dir": tmp_path, "num_envs": 4, "learners": learners, "mode": "lockstep", "placement": "inline"}
    directory = RunDirectory(plan(from_options(IDENTITY, options)), print)
    for step in (1, 2, 3):  # 2: the first learner has it, the other one was killed; 3: the first one's closing save
        state = dict.fromkeys((checkpoint.LEARNER, checkpoint.COLLECTOR, checkpoint.PROGRESS), b"{}")
        directory.store.save(step, {"w": np.zeros(1, np.float32)}, {}, state)
    assert [name.step for name in checkpoint.names(directory.store.root)] == kept
