"""The progress of a run outside its learner and collector, written to progress.json and read back on resume."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from freewheel.core import Collector, Learner, NDArray, RowCounts, Snapshot
from freewheel.metrics.meter import Meter
from freewheel.registry import installed_version
from freewheel.run.checkpoints.checkpoint import Checkpoint, SavedState
from freewheel.run.evaluation.schedule import EvaluationSchedule


class RunProgress(NamedTuple):
    """The progress to store in a checkpoint."""

    about: Mapping[str, Any]  # for JSON
    best: Snapshot | None = None  # the weights that evaluations have chosen so far

    @property
    def env_steps(self) -> int:
        return int(self.about["env_steps"])


def progress_of(
    meter: Meter, learner: Learner, schedule: EvaluationSchedule | None, contexts: NDArray, **others: Any
) -> RunProgress:
    """Return counters, schedules, contexts and versions of a run; `others` are further JSON entries."""
    candidate = None if schedule is None else schedule.candidate
    about = {
        "env_steps": meter.done["env_steps"],
        "done": learner.rows().done,
        "meter": meter.state(),
        "evaluation": None if schedule is None else schedule.state(),
        "best_version": None if candidate is None else candidate.snapshot.version,
        "contexts": contexts.tolist(),
        "versions": {"freewheel": installed_version(), "python": platform.python_version(), **_libraries()},
        **others,
    }
    return RunProgress(about, None if candidate is None else candidate.snapshot)


@cache
def _libraries() -> dict[str, str]:
    """Return the versions of the libraries whose arithmetic affects a run."""
    return {name: metadata.version(name) for name in ("numpy", "torch", "gymnasium")}


@dataclass(frozen=True)
class Earlier:
    """The earlier session that a resumed run continues; the run directory is locked."""

    path: Path
    saved: Checkpoint
    state: SavedState

    @property
    def progress(self) -> Mapping[str, Any]:
        return self.state.progress

    @property
    def contexts(self) -> NDArray | None:
        """Return the context table, which hooks may have changed; None: there was none."""
        return np.array(table, np.float32) if (table := self.progress["contexts"]) else None

    def restore_schedule(self, schedule: EvaluationSchedule) -> None:
        """Restore the state of the evaluations and the weights that they had chosen."""
        if (evaluated := self.progress["evaluation"]) is not None:
            best = Snapshot(self.progress["best_version"], self.state.best) if self.state.best else None
            schedule.restore(evaluated, best)

    @staticmethod
    def lost(collector: Collector, learner: Learner) -> RowCounts:
        """Return rows that were in flight at the save and that neither the collector nor the learner has restored."""
        here, there = collector.rows(), learner.rows()
        found = (rows.trained + rows.queued + rows.open + sum(rows.dropped.values()) for rows in (here, there))
        missing = here.produced - sum(found)
        return RowCounts(dropped={"shutdown": missing} if missing > 0 else {})
