"""The watchdog: the summary of a run that does not come to write it itself. What it does for whole runs: tests/faults."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from freewheel.rollout.factory import Timeouts
from freewheel.run.process import Interrupted, Stop
from freewheel.run.watchdog import EMERGENCY, HURRIED, Watchdog


class Ending:
    """A run whose own thread has begun to end it."""

    saving = False

    def __init__(self, path: Path) -> None:
        self._path = path

    def log(self) -> None:
        raise AssertionError("no row is due")

    def emergency_end(self, reason: str, exit_code: int, *, save: bool) -> bool:
        return False

    def last_known(self) -> tuple[Path, Mapping[str, Any]]:
        return self._path, {"run": "it", "produced": 8}


def end(path: Path, code: int, patience: float, *, written: str = "") -> int:
    """In a process of its own: a watchdog ends this run; returns the exit code."""
    pid = os.fork()
    if not pid:
        stop = Stop()
        with Watchdog(stop, "an env", Timeouts()) as watchdog:
            stop.attend(Ending(path))
            if written:
                path.unlink(missing_ok=True)
                path.write_text(written)
            watchdog._end("why", code, patience)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(
    ("code", "patience", "told"),
    [
        (130, HURRIED, ("interrupted (SIGINT)", None)),
        (143, EMERGENCY, ("interrupted (SIGTERM)", None)),
        (1, EMERGENCY, ("failed", "why")),
    ],
)
@pytest.mark.parametrize("earlier", [False, True])
def test_a_summary_is_written_for_a_run_that_has_not_come_to_it(
    tmp_path: Path, code: int, patience: float, told: tuple[str, str | None], earlier: bool
) -> None:
    path = tmp_path / "summary.json"
    if earlier:
        path.write_text("{}")
    assert end(path, code, patience) == code
    summary = json.loads(path.read_text())
    assert (summary["ended"], summary["error"]) == told
    assert (summary["exit_code"], summary["produced"], summary["problems"]) == (code, 8, ["why"])
    assert os.listdir(tmp_path) == ["summary.json"]


def test_the_runs_own_summary_is_kept(tmp_path: Path) -> None:
    assert end(tmp_path / "summary.json", 130, HURRIED, written="its own") == 130
    assert (tmp_path / "summary.json").read_text() == "its own"


def test_a_signal_that_cuts_an_update_is_told_from_one_in_an_environment() -> None:
    stop = Stop()
    stop.begin()
    stop.ask(signal.SIGINT, None)
    assert not stop.cut
    with pytest.raises(Interrupted):
        stop.ask(signal.SIGINT, None)
    assert stop.cut
