"""One measurement of saving, in this process: a large replay buffer, or the speed of a run that is saved now and then."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

import freewheel
from freewheel.core import ActionSpec, Array, BatchSpec, EnvSpec, Slice, Snapshot
from freewheel.files.outage import Outage
from freewheel.learn.sac.config import SACConfig
from freewheel.learn.sac.learner import SAC
from freewheel.learn.spec import LearnerSpec
from freewheel.policies.spec import PolicyConfig
from freewheel.run.checkpoints import checkpoint
from freewheel.run.checkpoints.run_progress import Earlier, RunProgress
from freewheel.run.checkpoints.saver import Saver
from freewheel.run.checkpoints.store import Store

BLOCK, CHUNK = 50_000, 64  # rows added at a time: to fill the buffer, and while it is saved
NEW = 20_000  # rows between two checkpoints
BOX = ActionSpec("box", 3, (-1.0,) * 3, (1.0,) * 3)
WORLD = EnvSpec("Hopper-sized", 1, 11, "float32", (Slice("policy", 0, 11, (11,)),), BOX)  # 28 numbers a row


class NoCollector:
    """Nothing acts here."""

    def state_dict(self) -> dict[str, Array]:
        return {"lanes": np.zeros(8)}


class Directory:
    """A folder for checkpoints alone. Implements saver.Directory."""

    def __init__(self, folder: Path) -> None:
        self.store, self.about = Store(folder / "checkpoints"), dict[str, Any]()
        self.outages = {"checkpoints": Outage("checkpoints", print)}

    def keep(self) -> None:
        """Nothing to keep."""

    def save(self, step: int, snapshot: Snapshot, *, best: bool = False) -> Path | None:
        return None


def build(rows: int, folder: Path) -> tuple[SAC, Saver]:
    policy = PolicyConfig(hidden=(256, 256), activation="relu", head="squashed", normalize_obs=False).resolve(WORLD)
    learner = SAC(SACConfig(buffer=rows), LearnerSpec(policy=policy, batch=BatchSpec(1, 1), seed=0))
    saver: Any = Saver(Directory(folder), learner)
    saver.collector = NoCollector()
    saver.progress = lambda ended: RunProgress({"env_steps": learner.replay.added, "ended": ended})
    return learner, saver


def save(learner: SAC, saver: Saver) -> dict[str, float]:
    """A save in the background while rows go on coming: its seconds, the learner's wait for it, its longest `add` meanwhile."""
    rows, saver.counts.longest_stall_s = torch.rand(CHUNK, learner.replay.columns.width), 0.0
    began, longest = perf_counter(), 0.0
    saver.begin()
    while saver.look(0.001) is None:
        at = perf_counter()
        learner.replay.add(rows)
        longest = max(longest, perf_counter() - at)
    return {"seconds": perf_counter() - began, "stall_s": saver.counts.longest_stall_s, "longest_add_s": longest}


def replay(order: Mapping[str, Any]) -> dict[str, Any]:
    """A buffer that is full and goes round: the first save writes all of it, the second what is new."""
    torch.set_num_threads(1)
    learner, saver = build(order["rows"], Path.cwd())
    while learner.replay.added < order["rows"] + BLOCK:
        learner.replay.add(torch.rand(BLOCK, learner.replay.columns.width))
    row: dict[str, Any] = {"megabytes": learner.replay.bytes / 1e6}
    row |= {f"full_{name}": value for name, value in save(learner, saver).items()}
    learner.replay.add(torch.rand(NEW, learner.replay.columns.width))
    row |= {f"next_{name}": value for name, value in save(learner, saver).items()}
    saver.now("end")
    saver.close()
    began = perf_counter()
    twin, other = build(order["rows"], Path.cwd())
    built = perf_counter() - began
    began = perf_counter()
    other.go_on_from(Earlier(Path.cwd(), *checkpoint.load_state(Path.cwd() / "checkpoints")))
    same = torch.equal(twin.replay.newest(twin.replay.count), learner.replay.newest(learner.replay.count))
    return row | {
        "resume_s": perf_counter() - began,
        "build_s": built,
        "same": same and twin.replay.count == order["rows"],
    }


def run(order: Mapping[str, Any]) -> dict[str, Any]:
    """Steps per second of a run, after its first seconds."""
    options = dict(order["options"])
    result = freewheel.train(options.pop("env"), quiet=True, evals=0, minutes=order["seconds"] / 60, **options)
    lines = (result.path / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["wall_s"] > order["warm_s"]]
    first, last = rows[0], rows[-2]  # the last one comes after the end
    rate = (last["env_steps"] - first["env_steps"]) / (last["wall_s"] - first["wall_s"])
    return {"steps_per_s": rate, **result.summary["checkpoints"]}


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps({"order": asked, **(replay if asked["kind"] == "replay" else run)(asked)}))
