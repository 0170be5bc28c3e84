"""What each worker is doing: read from heartbeats and the supervisor's slots."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, cast

import pytest

from freewheel.core import WORKER_TIME
from freewheel.metrics.workers import WorkerState
from freewheel.rollout.factory import Timeouts
from freewheel.transport.shm.supervisor import Supervisor
from freewheel.transport.workers.heartbeats import CONSTRUCT, RESET, STEP, Heartbeats
from freewheel.transport.workers.states import worker_states

LANES = 2


@dataclass
class Process:
    pid: int = 99


class Crew:
    """Three workers of two lanes, which a test writes for."""

    def __init__(self, heartbeats: Heartbeats) -> None:
        self.heartbeats = heartbeats
        limits = Timeouts(construct=120.0, reset=60.0, step=30.0)
        self.supervisor = Supervisor(3, heartbeats, limits, cast(Any, None), cast(Any, None))
        for slot in self.supervisor.slots:
            slot.process = cast(Any, Process())

    def states(self) -> list[WorkerState]:
        return worker_states(self.supervisor, LANES)


@pytest.fixture
def crew() -> Iterator[Crew]:
    with closing(Heartbeats(3, LANES, "Env")) as heartbeats:
        crew = Crew(heartbeats)
        yield crew
        os.close(crew.supervisor._wake_read)
        os.close(crew.supervisor._wake_write)


def test_calls_of_environments_are_named(crew: Crew) -> None:
    memory = crew.heartbeats.memory
    memory["steps"][:], memory["lane"][:] = (100, 200, 0), (1, 0, 0)
    memory["seed"][:2], memory["before"][:2] = ((7, 8), (9, 10)), ((0, 90), (0, 0))
    for worker, phase in enumerate((STEP, RESET, CONSTRUCT)):
        crew.heartbeats.enter(worker, phase)
    step, reset, construct = crew.states()
    assert (step.state, step.lane, step.seed, step.step, step.limit_s) == ("step", 1, 8, 11, 30.0)
    assert (reset.state, reset.lane, reset.seed, reset.step, reset.limit_s) == ("reset", 2, 9, None, 60.0)
    assert (construct.state, construct.lane, construct.seed, construct.limit_s) == ("construct", 4, None, 120.0)
    assert [one.steps for one in (step, reset, construct)] == [200, 400, 0]  # of all lanes


@pytest.mark.parametrize("kind", ["wait-credit", "wait-slot", "wait-gate"])
def test_a_wait_has_its_kind_and_its_beginning(crew: Crew, kind: str) -> None:
    """Its heartbeat goes on meanwhile."""
    crew.heartbeats.wait(1, WORKER_TIME.index(kind), time.monotonic_ns() - 3_000_000_000)
    state = crew.states()[1]
    assert (state.state, state.lane, state.limit_s) == (kind, None, None)
    assert 3.0 <= state.since_s < 3.0 + 20.0


def test_a_worker_is_down_until_its_replacement_is_ready(crew: Crew) -> None:
    heartbeats, slot = crew.heartbeats, crew.supervisor.slots[2]
    heartbeats.enter(2, STEP)
    assert crew.states()[2].state == "step"
    heartbeats.memory["died"][2] = time.monotonic_ns()
    slot.process, slot.deaths = None, 1
    down = crew.states()[2]
    assert (down.state, down.pid, down.deaths, down.restarts) == ("down", None, 1, 0)
    slot.process, slot.restarts = cast(Any, Process(5)), 1
    heartbeats.enter(2, CONSTRUCT)
    assert (crew.states()[2].state, crew.states()[2].pid) == ("down", 5)
    heartbeats.memory["ready"][2] = time.monotonic_ns()
    heartbeats.enter(2, STEP)
    back = crew.states()[2]
    assert (back.state, back.restarts) == ("step", 1)
    assert back.died_s is not None
    slot.given_up, slot.process = True, None
    assert crew.states()[2].state == "lost"
