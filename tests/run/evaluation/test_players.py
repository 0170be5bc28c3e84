"""Who plays evaluation episodes: inline, in processes side by side, on reserved lanes; the score depends on none of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from freewheel.core import ActionSpec, EnvSpec, Episode, Slice, Snapshot
from freewheel.envs.family import imported_by_workers
from freewheel.envs.gym import GymConfig
from freewheel.errors import EnvError, FreewheelError
from freewheel.rollout.factory import Timeouts, WorkerSpec
from freewheel.run.evaluation import players as module
from freewheel.run.evaluation.episodes import EpisodeResult, Score, evaluate
from freewheel.run.evaluation.players import (
    MOST,
    Cost,
    EpisodeRequest,
    EpisodeShare,
    Evaluator,
    InlinePlayer,
    Players,
    ProcessPlayer,
    ProcessPlayers,
    ReservedLanes,
    Rounds,
)
from freewheel.seeding import tree
from freewheel.transport import executors
from freewheel.transport.executors import ProcessExecutor
from tests.support.players import SEED, Constant, Sleeps, Spawns, rounds
from tests.support.trainers import wait_until
from tests.support.worlds import Identity

SPEC = EnvSpec("Fake", 1, 1, "float32", (Slice("obs", 0, 1, (1,)),), ActionSpec("discrete", 2))
WAITING, COMPUTING = Cost(0.05, 0.01), Cost(0.05, 1.0)


def world(lanes: int) -> Any:
    return GymConfig(id="Identity", factory=Identity).make(range(lanes))


def crew_of(build: Callable[[], Rounds], name: str = "World", **limits: float) -> ProcessPlayers:
    how = WorkerSpec(modules=imported_by_workers(GymConfig("Fake", factory=Identity)), timeouts=Timeouts(**limits))
    return ProcessPlayers(partial(ProcessPlayer, build, how, name), world(1).spec, 1, WAITING, in_turn=False)


def expected(choice: int, episodes: int) -> Score:
    actor = Constant()
    actor.choice = choice
    with closing(world(3)) as env:
        return evaluate(env, actor, episodes, SEED)


def finished(evaluator: Evaluator, limit: float = 30.0) -> Sequence[Score] | FreewheelError:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if (result := evaluator.poll(0.05)) is not None:
            return result
    raise AssertionError("no result")


@pytest.fixture
def in_processes() -> Iterator[ProcessPlayers]:
    with closing(crew_of(rounds(1))) as crew:
        yield crew


def test_processes_side_by_side_score_as_one_process_does(in_processes: ProcessPlayers) -> None:
    in_processes.start(EpisodeRequest([Snapshot(0, {}), Snapshot(3, {})], SEED, 3), alone=True)
    assert in_processes.progress == (0, 6)
    assert finished(in_processes) == [expected(0, 3), expected(3, 3)]
    assert len(multiprocessing_children()) == 6, "a player for each episode"
    in_processes.start(EpisodeRequest([Snapshot(2, {})], SEED, 8), alone=False)
    assert finished(in_processes) == [expected(2, 8)]


def multiprocessing_children() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "forkserver" in " ".join(child.cmdline())][1:]


@pytest.mark.parametrize(("lanes", "episodes"), [(1, 3), (4, 4), (4, 7), (8, 3)])
def test_inline_lanes_score_the_same_and_can_be_given_up(lanes: int, episodes: int) -> None:
    with closing(InlinePlayer(rounds(lanes))) as player:
        crew = Players(lambda: player, world(lanes).spec, lanes, Cost(), in_turn=True)
        crew.start(EpisodeRequest([Snapshot(1, {})], SEED, episodes), alone=False)
        assert crew.poll(0.0) is None, "one step is not all"
        crew.cancel()
        crew.start(EpisodeRequest([Snapshot(1, {}), Snapshot(0, {})], SEED, episodes), alone=False)
        assert finished(crew) == [expected(1, episodes), expected(0, episodes)]


class Scripted:
    """A player whose episodes take as many polls as their number says."""

    def __init__(self, lengths: Sequence[int], log: list[tuple[int, int]]) -> None:
        self.lengths, self.log, self.left = lengths, log, 0
        self.stopped = 0

    def begin(self, part: EpisodeShare) -> None:
        assert part.snapshot is not None
        self.part, self.left = part, self.lengths[part.first]
        self.log.append((part.snapshot.version, part.first))

    def poll(self, wait: float) -> list[EpisodeResult] | FreewheelError | None:
        self.left -= 1
        if self.left:
            return None
        return [EpisodeResult(float(self.part.first), self.lengths[self.part.first], True, ())]

    def stop(self) -> None:
        self.stopped += 1


class Two(Players):
    def most(self, parts: int, *, alone: bool) -> int:
        return min(parts, 2)


def test_a_long_episode_keeps_only_its_own_player_busy() -> None:
    log: list[tuple[int, int]] = []
    crew = Two(lambda: Scripted([9, 1, 1, 1, 1, 1], log), SPEC, 1, Cost(), in_turn=False)
    crew.start(EpisodeRequest([Snapshot(0, {})], SEED, 6), alone=False)
    polls = 0
    while (result := crew.poll(0.0)) is None:
        polls += 1
        assert len(log) == min(6, polls + 2), "the other player goes on"
    assert polls == 8
    assert result == [Score(tuple(map(float, range(6))), (9, 1, 1, 1, 1, 1))]


def test_an_error_ends_the_evaluation_for_all() -> None:
    made = [Scripted([5] * 4, []), Scripted([5] * 4, [])]
    left = iter(made)
    crew = Two(lambda: next(left), SPEC, 1, Cost(), in_turn=False)
    crew.start(EpisodeRequest([Snapshot(0, {})], SEED, 4), alone=False)
    assert crew.poll(0.0) is None
    error = EnvError("boom")
    made[1].poll = Mock(return_value=error)  # type: ignore[method-assign]
    assert crew.poll(0.0) is error
    assert [one.stopped for one in made] == [1, 1]


@pytest.mark.parametrize(
    ("cost", "busy", "alone", "most"),
    [
        (WAITING, 100, False, 20),  # environments that wait: all at once, whatever else runs
        (COMPUTING, 4, False, 1),
        (COMPUTING, 2, False, 2),  # spare cores
        (COMPUTING, 4, True, 4),
        (Cost(0.05, 0.01, 2**30), 0, False, 4),  # 8 GiB are free
        (Cost(0.05, 0.01, 2**40), 0, False, 1),
    ],
)
def test_as_many_as_fit(cost: Cost, busy: int, alone: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: 4)
    monkeypatch.setattr(module, "free_memory", lambda: 2**33)
    crew = ProcessPlayers(Mock(), SPEC, 1, cost, in_turn=False, busy=busy)
    assert crew.most(20, alone=alone) == most
    assert crew.most(10**6, alone=True) <= MOST


def test_in_turn_with_training_all_cores_play(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: 4)
    assert ProcessPlayers(Mock(), SPEC, 1, COMPUTING, in_turn=True, busy=8).most(20, alone=False) == 4


def test_what_fits_in_a_time_is_about_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    inline = Players(Mock(), SPEC, 8, Cost(0.01), in_turn=True)
    assert inline.seconds(100, 20, alone=False) == pytest.approx(3 * 100 * 8 * 0.0101)
    assert inline.games(100, 17.0) == 16
    computing = ProcessPlayers(Mock(), SPEC, 1, Cost(0.01), in_turn=False)
    assert computing.seconds(100, 20, alone=True) == pytest.approx(10 * 1.01)
    assert computing.games(100, 10.2) == 20
    waiting = ProcessPlayers(Mock(), SPEC, 1, Cost(0.01, 0.01, 1), in_turn=False)
    assert waiting.seconds(100, 20, alone=False) == pytest.approx(1.01)
    assert waiting.games(100, 0.9) == 0


FIRST = tree(SEED, "eval", 0)


@pytest.mark.parametrize(
    ("where", "call"),
    [
        ("construct", "its constructor"),
        ("reset", f"reset() with seed {FIRST}"),
        ("step", f"step 3 of the episode with seed {FIRST}"),
    ],
)
def test_a_call_that_hangs_is_ended_by_its_time_out(where: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START", 0.6)
    limits = {"construct": 20.0, "reset": 20.0, "step": 20.0, where: 0.5}
    with closing(crew_of(rounds(1, Sleeps, where=where), "Sleeps", **limits)) as crew:
        crew.start(EpisodeRequest([Snapshot(0, {})], SEED, 1), alone=False)
        told = f"Sleeps did not return within 0.5 s from {call}; is it waiting for something? --{where}-timeout allows more"
        assert str(finished(crew)) == told
        assert multiprocessing_children() == []


def test_what_an_env_has_started_ends_with_its_player(tmp_path: Path) -> None:
    with closing(crew_of(rounds(1, Spawns, where="step", folder=str(tmp_path)), "Spawns", step=0.5)) as crew:
        crew.start(EpisodeRequest([Snapshot(0, {})], SEED, 1), alone=False)
        assert "from step 3 of" in str(finished(crew))
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        wait_until(lambda: not any(map(psutil.pid_exists, pids)))


def test_envs_that_do_not_close_are_ended_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are told before the first of them is waited for and killed."""
    calls = list[str]()

    def noted(name: str, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def called(player: Any) -> Any:
            calls.append(name)
            return call(player)

        return called

    for name in ("hang_up", "_end"):
        monkeypatch.setattr(ProcessExecutor, name, noted(name, getattr(ProcessExecutor, name)))
    monkeypatch.setattr(executors, "GRACE", 0.2)
    with closing(crew_of(rounds(1, Sleeps, where="close"), "Sleeps")) as crew:
        crew.start(EpisodeRequest([Snapshot(0, {})], SEED, 3), alone=True)
        assert finished(crew) == [expected(0, 3)]
        assert len(multiprocessing_children()) == 3
    assert calls == ["hang_up"] * 3 + ["_end"] * 3
    assert multiprocessing_children() == []


def test_a_process_that_dies_is_an_error_and_the_next_order_has_another(in_processes: ProcessPlayers) -> None:
    in_processes.start(EpisodeRequest([Snapshot(0, {})], SEED, 1), alone=False)
    finished(in_processes)
    (child,) = multiprocessing_children()
    os.kill(child.pid, signal.SIGKILL)
    in_processes.start(EpisodeRequest([Snapshot(1, {})], SEED, 1), alone=False)
    assert str(finished(in_processes)) == "evaluation ended its process (exit code -9)"
    in_processes.start(EpisodeRequest([Snapshot(1, {})], SEED, 1), alone=False)
    assert finished(in_processes) == [expected(1, 1)]


def episode(ret: float, length: int, success: float) -> Episode:
    return Episode(0, 0, 0, (), ret, length, 0.0, (success,))


def test_the_latest_episodes_of_reserved_lanes_are_the_score() -> None:
    played = [[], [episode(1.0, 10, 0.0)], [episode(3.0, 20, 1.0), episode(5.0, 30, 1.0)], []]
    lanes = ReservedLanes(Mock(eval_episodes=Mock(side_effect=played)), episodes=2, measures=("success",))
    order = EpisodeRequest([Snapshot(4, {})], SEED, 2)
    lanes.start(order, alone=False)
    assert (lanes.poll(0.0), lanes.progress) == (None, (0, 2))
    assert lanes.poll(0.0) == [Score((1.0,), (10,), 0, {"success": 0.0})]
    lanes.start(order, alone=False)
    assert lanes.poll(0.0) == lanes.poll(0.0) == [Score((3.0, 5.0), (20, 30), 0, {"success": 1.0})]
