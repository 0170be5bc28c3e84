"""Several learners in processes of their own, over gloo: `python -m tests.support.gloo_learner FOLDER PORT:COUNT ...`.

With every group of which it is a member each learns what tests/learn/{ppo,sac}/test_several_learners.py have in threads, and
writes what has become of it as FOLDER/COUNT-RANK.npz. They are forked once everything has been imported.
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from freewheel.learn.sac.config import SACConfig
from freewheel.transport.learners.group import Group
from freewheel.transport.learners.rank import RankInfo
from tests.learn.ppo.test_several_learners import NORMALISED, WHOLE, Case, alone, of_share
from tests.learn.sac.test_several_learners import learned

LIMIT = 60.0
SAC = SACConfig(batch=24, lr=1e-3)
UPDATES, STEPS = 3, 4


def cases(count: int) -> dict[str, Case]:
    """By the kind of engine: as many learners, with different numbers of rows."""
    shares = (1, 2, 3)[-count:]
    return {
        "numpy": Case("numpy", NORMALISED, WHOLE, shares=shares),
        "torch": Case("torch", config=WHOLE, shares=shares, gaps=True),
    }


def what_becomes(peers: Any, count: int) -> dict[str, Any]:
    """Weights and the last gradient of PPO and SAC; peers None: of one learner with all rows."""
    found: dict[str, Any] = {}
    for kind, case in cases(count).items():
        for updates in (1, UPDATES):
            one, story = alone(case, updates)
            state = (one if peers is None else of_share(case, story, peers)).state
            found |= {f"{kind}.{updates}.params": state["params"], f"{kind}.{updates}.mean": state["adam.mean"]}
    for kind in ("box", "discrete"):
        for steps in (1, STEPS):
            after = learned(kind, SAC, steps, peers)
            found |= {f"{kind}.{steps}.{name}": after[name] for name in ("params", "critics", "targets", "temperature")}
            found |= {f"{kind}.{steps}.mean": np.concatenate([after["adam.0.0"], after["adam.1.0"]])}
    return found


def learn(rank: int, folder: str, groups: list[list[int]]) -> None:
    for port, count in groups:
        if rank < count:
            place = RankInfo(rank, count, rank, count, port=port)
            group = Group(place, place.meet(LIMIT))
            np.savez(Path(folder) / f"{count}-{rank}.npz", **what_becomes(group, count))
            group.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    groups = [[int(part) for part in group.split(":")] for group in sys.argv[2:]]
    fork = multiprocessing.get_context("fork")
    learners = [fork.Process(target=learn, args=(r, sys.argv[1], groups)) for r in range(max(g[1] for g in groups))]
    for learner in learners:
        learner.start()
    for learner in learners:
        learner.join()
    sys.exit(any(learner.exitcode for learner in learners))
