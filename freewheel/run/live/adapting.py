"""Adaptive control of a run (--adapt): it reads every row of metrics, changes settings, and reports and logs why."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from freewheel.core import Collector, Learner
from freewheel.files.lines import Lines
from freewheel.pacing.control import Change, ControlState, Plant, Settings, decide, within
from freewheel.run.plan import Plan

FILE = "adapt.jsonl"  # in the run directory: one line for every change
BURSTS = 4  # largest factor on the updates at a time


class Adapting:
    """Applies the changes that pacing.control decides on."""

    def __init__(
        self,
        collector: Collector,
        settings: tuple[Settings, Settings, Settings],
        learner: Learner,
        path: Path,
        say: Callable[[str], None],
    ) -> None:
        """settings: least, present and most, from the collector's plant(); path: the run directory."""
        self._collector, self._learner, self._path, self._say = collector, learner, path / FILE, say
        least, present, most = settings
        least, present = replace(least, burst=learner.burst), replace(present, burst=learner.burst)
        most = replace(most, burst=BURSTS * learner.burst)
        self._plant, self._state = Plant(least, most), ControlState(present)

    def begin(self, lanes: int, patience: int, earlier: Mapping[str, Any] | None = None) -> None:
        """lanes: of one worker; earlier: the `state` of the session that is resumed."""
        self._plant = replace(self._plant, lanes=lanes, patience=patience)
        if earlier:
            self._state = ControlState(within(Settings(**earlier), self._plant.least, self._plant.most))
            self._apply()

    def take(self, row: Mapping[str, Any]) -> None:
        """Process a row of metrics."""
        self._state, change = decide(self._state, row, self._plant)
        if change is not None:
            self._apply()
            self._tell(change, row)

    def _apply(self) -> None:
        self._collector.adjust(self._state.settings)
        if self._learner.burst:
            self._learner.burst = self._state.settings.burst

    def _tell(self, change: Change, row: Mapping[str, Any]) -> None:
        self._say(str(change))
        line = {"wall_s": row.get("wall_s"), "env_steps": row.get("env_steps"), **change._asdict()}
        with closing(Lines(self._path, self._say, "changes")) as lines:
            lines.add(json.dumps(line).encode() + b"\n")

    def state(self) -> dict[str, Any]:
        """Return the state that a later session resumes from, for JSON."""
        return self._state.to_json()


def adapting(
    planned: Plan, collector: Collector, learner: Learner, say: Callable[[str], None], earlier: Mapping[str, Any] | None
) -> Adapting | None:
    """Return the adaptive control of a run; None: --adapt is not set, or the collector has no settings to adapt."""
    options, workers = planned.config.collector, planned.worker_config
    asked = workers is not None and getattr(options, "adapt", False)
    settings = collector.plant() if asked else None
    if workers is None or settings is None:
        return None
    found = Adapting(collector, settings, learner, planned.path, say)
    found.begin(workers.numbers.envs_per_worker, getattr(options, "adapt_patience", 5), earlier)
    return found
