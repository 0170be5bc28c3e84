"""What the process of a lane does when it is asked: here in a thread, over the same pipes and the same shared memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import pytest

from freewheel.core import NO_CONTEXT, EpisodePrefix
from freewheel.envs import processes
from freewheel.envs.gym import GymConfig
from freewheel.envs.processes import Ready, _fields, serve
from freewheel.errors import EnvError, SetupError
from freewheel.seeding import training_episodes
from freewheel.transport.shm.barrier import WakePipe, line
from freewheel.transport.shm.memory import SharedArrays
from freewheel.transport.workers.heartbeats import WAIT, Heartbeats

LIMIT = 20.0  # seconds
STREAM = training_episodes(0, 3)


class Asked:
    """The other end of a lane process."""

    def __init__(self, ours: WakePipe, heartbeats: Heartbeats) -> None:
        self.line, self.heartbeats = ours, heartbeats

    def __call__(self, *values: Any) -> Any:
        self.line.send(values) if values else self.line.wake()
        assert self.line.wait(LIMIT)
        return self.line.receive()


@contextmanager
def served(factory: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    monkeypatch.setattr(processes, "freeze_heap", lambda: None)
    ours, theirs = line()
    with closing(Heartbeats(2, 1)) as heartbeats:
        target = partial(serve, theirs, heartbeats, 1, factory, 3, "lane 3 of World")
        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        yield Asked(ours, heartbeats)
        ours.close()
        thread.join(LIMIT)
        assert not thread.is_alive()
        theirs.close()


def made(world: str, args: dict[str, Any], *, fault_tolerant: bool = True) -> bytes:
    config = GymConfig(f"tests.support.worlds:{world}", args, measures=("count",))
    factory: bytes = cloudpickle.dumps(partial(config._part, fault_tolerant))
    return factory


@contextmanager
def rows(asked: Asked) -> Iterator[SharedArrays]:
    """Of two lanes, the second of which is asked."""
    ready = asked.line.receive()
    assert isinstance(ready, Ready)
    fields = _fields(ready.spec)
    fields = {name: ((2, *shape[1:]), dtype) for name, (shape, dtype) in fields.items()}
    with closing(SharedArrays(fields)) as memory:
        assert asked("attach", fields, memory.path) is None
        yield memory


def test_it_writes_its_row_and_begins_the_next_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(made("Counter", {"length": 2}), monkeypatch) as asked, rows(asked) as memory:
        assert asked("reset", STREAM) is None
        assert memory["first"].tolist() == [[0, 0], [STREAM.seed(0) % 1000, 0]]
        assert asked() is None
        assert memory["next_obs"][1].tolist() == [STREAM.seed(0) % 1000, 1]
        assert (memory["reward"].tolist(), memory["valid"].tolist()) == ([0, 1], [False, True])
        assert (memory["terminated"][1], memory["reset_ns"][1]) == (False, 0)
        assert asked() is None
        assert memory["terminated"].tolist() == [False, True]
        assert memory["first"][1].tolist() == [STREAM.seed(1) % 1000, 0]
        assert (memory["measures"].tolist(), memory["reset_ns"][1] > 0) == ([[0], [2]], True)


def test_it_writes_down_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(made("Counter", {"length": 3}), monkeypatch) as asked, rows(asked):
        asked("reset", STREAM)
        for _ in range(4):
            asked()
        cells = asked.heartbeats.memory
        assert (cells["begun"][1], cells["seed"][1], cells["phase"][1]) == (2, STREAM.seed(1), WAIT)
        assert asked.heartbeats.step(1) == 2, "the next one"


def test_failures_are_answers_and_it_goes_on_also_if_its_lane_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(made("Raises", {"at": 1, "length": 9}), monkeypatch) as asked, rows(asked) as memory:
        asked("reset", STREAM)
        causes = [[failure.cause for failure in asked()] for _ in range(3)]
        assert causes == [["env_error"], ["env_error"], ["env_error", "quarantine"]]
        assert asked() is None
        assert not memory["valid"][1]


def test_without_fault_tolerance_the_error_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(made("Raises", {"at": 1, "length": 9}, fault_tolerant=False), monkeypatch) as asked, rows(asked):
        asked("reset", STREAM)
        error = asked()
        assert isinstance(error, EnvError)
        assert "lane 3 of tests.support.worlds:Raises raised ValueError: boom" in error.report


def test_what_cannot_be_loaded_is_said_and_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(b"nonsense", monkeypatch) as asked:
        error = asked.line.receive()
        assert isinstance(error, SetupError)
        assert str(error).startswith("lane 3 of World cannot be loaded in another process (UnpicklingError: ")
        assert asked("close") is None


def test_an_episode_that_is_played_again_leaves_the_same_position(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = STREAM.seed(0) % 1000
    played = EpisodePrefix(np.ones(2, np.int64), np.array([seed, 2], np.float32), 3.0, NO_CONTEXT)
    with served(made("Counter", {"length": 9}), monkeypatch) as asked, rows(asked) as memory:
        assert asked("replay", STREAM, played) == ""
        assert memory["first"][1].tolist() == [seed, 2]
        assert asked.heartbeats.step(1) == 3
        assert asked() is None
        assert memory["reward"][1] == 3
        assert asked.heartbeats.step(1) == 4
