"""Exceptions that do strange things, answers that are none, a close() that raises: wherever an environment runs, the report is
short text, and what can go on goes on. (In the run's own process: tests/envs/test_lane.py.)"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from freewheel.core import EnvSpec
from freewheel.envs.gym import GymConfig
from freewheel.errors import EnvError
from freewheel.rollout.factory import Timeouts, WorkerSpec
from freewheel.seeding import training_episodes
from tests.support.collecting import collecting, shown
from tests.support.odd_worlds import STEPS
from tests.support.surveys import survey

WORLD = "tests.support.odd_worlds:Odd"
LIMITS = WorkerSpec(timeouts=Timeouts(construct=30.0, reset=30.0, step=30.0))
IN_CLOSE = "Odd raised MuteError in close(): (no text: __str__ raised RuntimeError)"
LONGEST = 30_000  # characters of a report


def world(how: str, **args: Any) -> GymConfig:
    return GymConfig(WORLD, {"how": how, **args})


@pytest.fixture(scope="module")
def spec() -> Iterator[EnvSpec]:
    with closing(world("nothing").make(range(1))) as env:
        yield env.spec


def assert_report(report: str, text: str) -> None:
    assert text in report
    assert len(report) < LONGEST
    report.encode()


@pytest.mark.parametrize("how", STEPS)
def test_workers_go_on_and_report_it_once(how: str, spec: EnvSpec) -> None:
    """It happens in every third episode or so: one row each is lost."""
    cause = "shape" if how.startswith("terminated") else "env_error"
    with collecting(WORLD, spec, mode="continuous", workers=2, num_envs=2, env_args={"how": how, "every": 3}) as on:
        on.until(lambda: on.collector.rows().dropped.get(cause, 0) >= 2 and STEPS[how] in shown(on.messages))
    assert on.collector.summary()["worker_restarts"] == 0
    reports = [message for message in on.messages if message.startswith("lane ")]
    assert len(reports) == len({report.split(" of ")[0] for report in reports}), "once for each lane at most"
    for report in reports:
        assert_report(report, STEPS[how])


def test_a_close_that_raises_in_workers_is_told_once_and_the_run_ends_well(spec: EnvSpec) -> None:
    options: dict[str, Any] = {"mode": "continuous", "workers": 2, "num_envs": 4, "env_args": {"how": "close"}}
    with collecting(WORLD, spec, **options) as on:
        on.until(lambda: on.rows > 0)
    assert [message for message in on.messages if IN_CLOSE in message] == [f"tests.support.odd_worlds:{IN_CLOSE}"]
    assert on.collector.summary()["worker_restarts"] == 0


@pytest.mark.parametrize("how", STEPS)
def test_the_survey_says_what_it_was(how: str) -> None:
    with pytest.raises(EnvError) as caught:
        survey(world(how, at=1).make, "Odd", LIMITS, budget=0.05)
    assert_report(str(caught.value), STEPS[how])


def test_a_close_that_raises_does_not_spoil_the_survey() -> None:
    with pytest.warns(RuntimeWarning, match=re.escape(IN_CLOSE)):
        cost = survey(world("close").make, "Odd", LIMITS, budget=0.05)
    assert (cost.spec.obs_size, cost.closed) == (1, True)


@pytest.mark.parametrize("how", STEPS)
def test_a_process_reports_it(how: str) -> None:
    with closing(world(how).make(range(1), processes=True)) as env:
        env.reset([training_episodes(0, 0)])
        for _ in range(2):
            env.step(np.zeros(1, np.int64))
        with pytest.raises(EnvError) as caught:
            env.step(np.zeros(1, np.int64))
    assert_report(str(caught.value), STEPS[how])
    assert str(caught.value).startswith("lane 0 of tests.support.odd_worlds:Odd ")


def test_a_close_that_raises_in_processes_is_told_once() -> None:
    env = world("close").make(range(2), processes=True)
    env.reset([training_episodes(0, lane) for lane in range(2)])
    assert env.step(np.zeros(2, np.int64)).valid.all()
    with pytest.warns(RuntimeWarning, match=re.escape(IN_CLOSE)) as told:
        env.close()
    assert len(told) == 1
    with warnings.catch_warnings(action="error"):
        env.close()
