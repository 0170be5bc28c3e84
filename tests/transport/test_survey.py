"""An env is tried out in a process of its own: its time-outs hold, its end is named, and nothing of it is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from freewheel.envs.gym import GymConfig
from freewheel.errors import EnvError, SetupError
from freewheel.rollout.factory import Timeouts, WorkerSpec
from freewheel.rollout.probe import EnvCost
from freewheel.transport import survey as survey_module
from freewheel.transport.clock import clock
from freewheel.transport.survey import Survey
from freewheel.transport.workers import call_tracker as place
from tests.support.surveys import survey
from tests.support.trainers import wait_until
from tests.support.worlds import Counter, Crawls, Dies, Hangs, Raises

LONG = WorkerSpec(timeouts=Timeouts(construct=30.0, reset=30.0, step=30.0))
MARGIN = 15.0  # seconds that the answer may take beyond the time-out on a busy machine: less than without one


def surveyed(world: Any, *, limits: WorkerSpec = LONG, budget: float = 0.05, **options: Any) -> EnvCost:
    with Survey(GymConfig("World", factory=world).make, "World", limits, budget=budget, **options) as running:
        return running.result()


class Ends(Dies):
    """Ends its process by `how`."""

    def __init__(self, how: str, **faults: Any) -> None:
        super().__init__(**faults)
        self.how = how

    def fail(self, observation: Any) -> Any:
        if self.how == "exit":
            sys.exit(5)
        os._exit(6) if self.how == "_exit" else os.abort()


class NeverMade(Counter):
    """Its constructor never returns."""

    def __init__(self) -> None:
        super().__init__()
        time.sleep(60.0)


def test_the_cost_is_measured_in_another_process() -> None:
    cost = surveyed(lambda: Crawls(seconds=0.01, at=0))
    assert (cost.spec.lanes, cost.spec.obs_size, cost.closed) == (1, 2, True)
    assert cost.wall > 0.009
    assert cost.duty < 0.3
    assert cost.steps >= 3


@pytest.mark.parametrize(
    ("world", "limit", "text"),
    [
        (NeverMade, {"construct": 0.3}, r"World did not return within 0.3 s from its constructor; .*--construct-timeout allows"),
        (lambda: Hangs(at=0), {"reset": 0.3}, r"World did not return within 0.3 s from reset\(\) with seed 0; .*--reset-timeout"),
        (lambda: Hangs(at=1, deaf=True), {"step": 0.3}, r"0.3 s from step 1 of the episode with seed 38257410; .*--step-timeout"),
        (lambda: Hangs(at=5), {"step": 0.3}, r"World did not return within 0.3 s from step 5 of"),
    ],
)  # fmt: skip
def test_an_env_that_hangs_is_named_within_its_time_out(world: Any, limit: dict[str, float], text: str) -> None:
    began = time.monotonic()
    with pytest.raises(EnvError, match=text):
        surveyed(world, limits=WorkerSpec(timeouts=replace(LONG.timeouts, **limit)))
    assert 0.3 <= time.monotonic() - began < 0.3 + MARGIN


@pytest.mark.parametrize(
    ("world", "text"),
    [
        (lambda: Ends("exit", at=1), r"World ended its process \(exit code 5\) in step 1 of the episode with seed 38257410"),
        (lambda: Ends("_exit", at=2), r"World ended its process \(exit code 6\) in step 2 of"),
        (lambda: Ends("abort", at=0), r"World was killed \(SIGABRT\) in reset\(\) with seed 0"),
        (lambda: os._exit(0), r"World ended its process \(exit code 0\) in its constructor"),
        (lambda: Raises(at=1), r"lane 0 of World raised ValueError: boom \(episode 2, seed \d+, step 1(.|\n)*in fail"),
        (lambda: 1 / 0, r"lane 0 of World raised ZeroDivisionError: division by zero \(in its constructor\)"),
    ],
)  # fmt: skip
def test_an_env_that_ends_or_raises_is_named(world: Any, text: str) -> None:
    with pytest.raises(EnvError, match=text):
        surveyed(world, patient=True)


@pytest.mark.parametrize("world", [Dies, Hangs])
def test_where_workers_are_replaced_a_few_good_steps_are_enough(world: Any) -> None:
    limits = WorkerSpec(timeouts=replace(LONG.timeouts, step=0.3))
    made = lambda: world(at=14, length=30)  # noqa: E731
    with pytest.raises(EnvError, match="step 14 of"):
        surveyed(made, limits=limits)
    assert surveyed(made, limits=limits, patient=True).steps == 10
    with pytest.raises(EnvError, match="step 4 of"):
        surveyed(lambda: world(at=4, length=30), limits=limits, patient=True)


class Spawns(Hangs):
    """Starts two processes, one in a session of its own, and hangs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(at=1)
        children = [subprocess.Popen(["sleep", "60"], start_new_session=new) for new in (False, True)]
        (folder / "pids").write_text(" ".join(str(child.pid) for child in children))


def test_what_a_hanging_env_has_started_ends_with_it(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match="step 1 of"):
        surveyed(lambda: Spawns(tmp_path), limits=WorkerSpec(timeouts=replace(LONG.timeouts, step=0.3)))
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))


def test_leaving_early_ends_the_process() -> None:
    with Survey(GymConfig("World", factory=NeverMade).make, "World", WorkerSpec()) as running:
        assert running is not None
    # the fixture of all tests looks for processes that are left


class ClosesSlowly(Counter):
    def close(self) -> None:
        time.sleep(60.0)


def test_an_env_that_does_not_close_is_measured_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "CLOSE_LIMIT", 0.1)
    cost = surveyed(ClosesSlowly)
    assert cost.steps > 0
    assert not cost.closed


class Warns(Counter):
    def judge(self, action: Any) -> float:
        warnings.warn("old, very old", UserWarning, stacklevel=1)
        return super().judge(action)


def test_warnings_are_shown_here_and_once() -> None:
    with pytest.warns(UserWarning, match="old, very old") as caught:
        surveyed(Warns)
    assert len(caught) == 1


def test_what_cannot_be_sent_is_refused_at_once() -> None:
    lock = __import__("threading").Lock()
    with pytest.raises(SetupError, match="World cannot be pickled for another process"):
        surveyed(lambda: lock)


@pytest.mark.parametrize(("spins", "computes"), [(False, False), (True, True)])
def test_a_long_step_is_not_always_waited_for(spins: bool, computes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey_module, "HURRY", 0.4)

    class Slow(Counter):
        def judge(self, action: Any) -> float:
            until = time.monotonic() + 60.0
            while time.monotonic() < until:
                if not spins:
                    time.sleep(60.0)
            return 0.0

    began = time.monotonic()
    cost = surveyed(Slow, patient=True, hurried=True)
    assert time.monotonic() - began < survey_module.HURRY + MARGIN
    assert cost.spec.obs_size == 2
    assert survey_module.HURRY < cost.wall == cost.usual < survey_module.HURRY + MARGIN
    assert (cost.duty > 0.05) == computes, "another process may have had the processor"
    with pytest.raises(EnvError, match="step 1 of"):
        surveyed(Slow, limits=WorkerSpec(timeouts=replace(LONG.timeouts, step=0.3)), hurried=True)


class Noted(Counter):
    """Leaves a file for every time it was made."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        (folder / str(os.getpid())).touch()


@pytest.mark.parametrize(("seconds", "surveys"), [(0.6, 2), (0.0, 1)])
def test_a_survey_begins_anew_if_all_slept_while_the_env_was_called(
    seconds: float, surveys: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = iter([8.0, 0.0])
    monkeypatch.setattr(clock, "slept_since", lambda moment: next(slept))

    def made() -> Noted:
        time.sleep(seconds)
        return Noted(tmp_path)

    assert surveyed(made).wall < 1.0
    assert len(list(tmp_path.iterdir())) == surveys


STUCK = """
import ctypes
library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
for _ in range(2):
    library.pthread_mutex_lock(mutex)  # holds the interpreter, and no signal ends it
"""


@pytest.mark.parametrize(
    ("source", "limit", "text"),
    [
        ("import time; time.sleep(60.0)", 0.5, r"^it:Env did not return within 0.5 s from its constructor; .*--construct-time"),
        (STUCK, 0.5, r"^it:Env did not return within 0.5 s from its constructor; .*--construct-timeout allows more$"),
        ("def deep(): raise ValueError('no')\ndeep()", 30.0, r"it raised ValueError: no\nTraceback(.|\n)*in deep"),
    ],
)  # fmt: skip
def test_a_module_that_hangs_or_raises_at_import_is_named(source: str, limit: float, text: str, tmp_path: Path) -> None:
    """Whatever was started for it is gone, as the fixture of all tests sees."""
    (tmp_path / "it.py").write_text(source)
    config, began = GymConfig(f"{tmp_path}/it.py:Env"), time.monotonic()
    limits = WorkerSpec(timeouts=replace(LONG.timeouts, construct=limit), modules=config.modules)
    with pytest.raises((EnvError, SetupError), match=text):
        survey(config.make, config.label, limits)
    assert time.monotonic() - began < limit + MARGIN


def test_the_minutes_of_a_run_end_its_survey_which_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey_module, "QUIET", 0.1)
    told = list[str]()
    running = Survey(GymConfig("World", factory=NeverMade).make, "World", LONG)
    reason = "--minutes was over while World was measured, in its constructor: give the run more than 0.5 s"
    with pytest.raises(SetupError, match=f"^{reason}$"), running.within(0.5, told.append):
        running.result()
    assert told[0].startswith("measuring World for ")
    assert told[0].endswith(" s in its constructor")
