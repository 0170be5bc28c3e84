"""The watchdog: the summary of a run that does not come to write it itself. What it does for whole runs: tests/faults."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from freewheel.rollout.factory import Timeouts
from freewheel.run.stopping import watchdog
from freewheel.run.stopping.stop import Interrupted, Stop
from freewheel.run.stopping.watchdog import EMERGENCY, HURRIED, Watchdog
from tests.support.trainers import wait_until


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
        with Watchdog(stop, "an env", Timeouts()) as dog:
            stop.attend(Ending(path))
            if written:
                path.unlink(missing_ok=True)
                path.write_text(written)
            dog._end("why", code, patience)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def overdue(stop: Stop, what: str) -> None:
    """A hook goes on for ever: after the time of the run, or after the training."""
    if what == "the training is over":
        stop.hook_limit = 0.2
    else:
        stop.time_up = monotonic() - watchdog.OVERTIME
    stop.spare(threading.Event().wait)()


@pytest.mark.parametrize("what", ["after the end of --minutes", "the training is over"])
def test_a_hook_that_does_not_return_is_named_and_ends_the_run(tmp_path: Path, what: str) -> None:
    path = tmp_path / "summary.json"
    pid = os.fork()
    if not pid:
        stop = Stop()
        with Watchdog(stop, "an env", Timeouts()):
            stop.attend(Ending(path))
            overdue(stop, what)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    error = json.loads(path.read_text())["error"]
    told = rf"the hook Event.wait \(.*threading.py:\d+\) did not return .*{what} \(it is at .*:\d+\)"
    assert re.fullmatch(told, error)


def test_a_hook_that_looks_at_the_time_goes_on() -> None:
    stop = Stop()
    looked = list[float]()

    def hook() -> None:
        wait_until(lambda: stop.hook_s > 0.05)
        stop.keep_time()
        looked.append(stop.hook_s)

    stop.spare(hook)()
    assert looked[0] < 0.05
    assert stop.hook_s == 0


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
