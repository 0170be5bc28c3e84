"""Stop and go on equals going straight on, bit for bit: algorithms by modes, at many moments, by fresh objects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partialmethod
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.collect import serial
from freewheel.core import NO_CONTEXT, Episode
from freewheel.envs.gym import GymConfig
from freewheel.learn import replay_learner
from freewheel.ledger import balance
from freewheel.policies.numpy_actor import make_actor
from freewheel.rollout import restoring
from tests.support.resuming import ALGORITHMS, LANES, MODES, PPO, S, Session, Story, lanes, played, remembering, stop_at
from tests.support.worlds import Wandering

TURNS = {"ppo": 12, "sac": 22, "mbpo": 22}
STOPS = {"ppo": (0, 1, 5, 7), "sac": (0, 1, 2, 9, 13), "mbpo": (0, 2, 8, 13)}
#: The first algorithm in every mode, and every mode's kind with the others.
SOON = {*(("ppo", mode) for mode in MODES), ("sac", "lockstep"), ("sac", "batch"), ("mbpo", "sequential")}
MATRIX = [
    pytest.param(algorithm, mode, marks=() if (algorithm, mode) in SOON else pytest.mark.system)
    for algorithm in ALGORITHMS
    for mode in MODES
]


@pytest.fixture(autouse=True, scope="module")
def short_chunks() -> Iterator[None]:
    """A batch takes several turns to be collected, and several to be learned from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serial, "LONGEST", 3)
        patch.setattr(replay_learner, "BURST", 4)
        yield


@pytest.mark.parametrize(("algorithm", "mode"), MATRIX)
def test_a_run_that_was_stopped_ends_like_one_that_was_not(algorithm: str, mode: str) -> None:
    story, turns = Story(ALGORITHMS[algorithm], MODES[mode]), TURNS[algorithm]
    straight, stops = stop_at(story, STOPS[algorithm].__contains__, turns)
    expected = straight.fingerprint()
    for at, (saved, ended) in stops.items():
        with Session(story, saved) as run:
            run.turn(turns - at)
        assert not told_by(run)
        assert played(run) == played(straight)[ended:], f"stopped at turn {at}"
        found = run.fingerprint()
        different = [name for name in expected | found if expected.get(name) != found.get(name)]
        assert not different, f"stopped at turn {at}: {different}"


def continued(story: Story, at: int, turns: int) -> tuple[Session, Session, list[str]]:
    """A straight run, and one that was stopped after so many turns; what the second one told."""
    straight, stops = stop_at(story, at.__eq__, turns)
    saved, ended = stops[at]
    with Session(story, saved) as run:
        run.turn(turns - at)
        told = told_by(run)
    run.episodes[:0] = straight.episodes[:ended]
    return straight, run, [*told, *told_by(run)]


def told_by(run: Session) -> list[str]:
    """Its messages; a busy machine may make any worker slow."""
    return [text for text in run.collector.messages() if " is slow: " not in text]


def test_it_is_exact_where_updates_begin_before_the_first_publication() -> None:
    story = Story(replace(ALGORITHMS["sac"], publish_every=9 * S), MODES["sequential"])  # type: ignore[type-var]
    updates = list[int]()
    for at in (6, 14, 35):
        straight, _, _ = assert_exact(story, at, at + 5)
        updates.append(int(straight.meter.done["updates"]))
    assert 0 < updates[0] < updates[1] < updates[2]
    assert straight.learner.version == 1


MASKED = GymConfig(id="tests.support.worlds:Wandering", args={"n": 2, "discrete": 5})
CONDITIONED = GymConfig(id="tests.support.worlds:Conditioned", args={"length": 10})
TOGETHER = GymConfig(id="tests.support.together:tests/Together-v0")
LONG = GymConfig(id="tests.support.worlds:Wandering", args={"n": 2, "length": 100, "ends": 0.0})
FICKLE = GymConfig(id="tests.support.worlds:Wandering", args={"n": 2, "fickle": True, "length": 40, "ends": 0.0})
FAILING = GymConfig(id="tests.support.worlds:Raises", args={"rate": 0.04, "length": 14})
SAMPLE = ("lockstep", "processes", "batch", "batch of fragments")


def assert_exact(story: Story, at: int, turns: int) -> tuple[Session, Session, list[str]]:
    """As `continued`, of which both are the same."""
    straight, run, told = continued(story, at, turns)
    assert played(run) == played(straight)
    assert run.fingerprint() == straight.fingerprint()
    return straight, run, told


@pytest.mark.parametrize("mode", SAMPLE)
@pytest.mark.parametrize("world", [MASKED, CONDITIONED, TOGETHER], ids=["masks", "contexts", "vector env"])
def test_it_is_exact_with_masks_with_contexts_and_where_lanes_are_stepped_together(world: GymConfig, mode: str) -> None:
    if world is TOGETHER and mode == "processes":
        pytest.skip("a vector env has all its lanes in one process")
    contexts = np.eye(2, dtype=np.float32) if world is CONDITIONED else NO_CONTEXT
    _, _, told = assert_exact(Story(PPO, MODES[mode], world, contexts=contexts, normalize_obs=False), at=5, turns=10)
    assert not told


@pytest.mark.parametrize(
    ("mode", "at"), [("sequential", 5), ("lockstep", 12), ("lockstep", 25), ("lockstep", 26), ("processes", 27)]
)
def test_it_is_exact_and_on_policy_where_environments_fail(mode: str, at: int) -> None:
    """What a failure cost is made good before the update; what the other lane stepped meanwhile is no part of a later one. How
    often a lane has failed in a row is counted anew, so none may be given up here."""
    straight, run, told = assert_exact(Story(PPO, MODES[mode], FAILING), at=at, turns=50)
    assert all(" raised ValueError: boom " in report for report in told)
    assert run.collector.rows() == straight.collector.rows()
    dropped, version = straight.collector.rows().dropped, straight.learner.version
    assert 0 < dropped["stale"] <= dropped["env_error"] * (LANES - 1), "of each failure less than a step of both"
    assert straight.lags == [0.0] * version
    assert straight.learner.rows().trained == version * S


@pytest.mark.parametrize("at", [20, 24])
def test_a_run_of_an_earlier_version_that_had_lost_rows_is_on_policy_from_the_next_update_on(at: int) -> None:
    """It did not make them good, so its updates have cut the steps elsewhere since, and what is left of them is held."""
    with Session(Story(PPO, MODES["lockstep"], FAILING)) as old:
        old.collector._quota._on_policy = False  # type: ignore[attr-defined]
        old.turn(at)
        saved = old.save()
    state = safetensors.numpy.load(saved.collector)
    assert int(state.pop("lacking")) == 0
    with Session(old.story, replace(saved, collector=safetensors.numpy.save(state))) as run:
        assert run.learner.rows().queued != int(state["done"]) * LANES, "out of phase"
        run.turn(24)
    assert run.lags[1:] == [0.0] * len(run.lags[1:])
    assert len(run.lags) > 3


@pytest.mark.parametrize("mode", SAMPLE)
def test_it_is_exact_for_an_actor_with_a_memory(mode: str) -> None:
    story = Story(PPO, MODES[mode], normalize_obs=False, actor=remembering)
    straight, _, told = assert_exact(story, at=5, turns=10)
    assert not told
    other, _ = stop_at(replace(story, actor=make_actor), (0).__gt__, 10)
    assert played(other) != played(straight), "the memory is used"


@pytest.mark.parametrize("mode", SAMPLE)
def test_an_environment_that_is_not_determined_by_its_seed_begins_its_next_episodes_and_says_so(mode: str) -> None:
    straight, run, told = continued(Story(PPO, MODES[mode], FICKLE), at=4, turns=30)
    assert run.learner.version == straight.learner.version
    assert len(told) == 1, told
    assert "could not be restored, the next ones begin: the environment did something else with the same" in told[0]
    for lane in range(LANES):
        numbers = [number for own, number, *_ in played(run) if own == lane]
        assert len(numbers) == len(set(numbers)), "an episode was played twice"
        assert numbers == sorted(numbers)


class Stopped(BaseException):
    """As a signal ends the wait for an environment: it is not an error of the environment, and passes."""


class Fused(Wandering):
    """Stops the run in the middle of a step, once."""

    left = 0

    def step(self, action: Any) -> Any:
        Fused.left -= 1
        if Fused.left == 0:
            raise Stopped
        return super().step(action)


@pytest.mark.parametrize(
    ("algorithm", "steps"),
    [*(("ppo", steps) for steps in (1, 2, 9, 27, 38, 55)), ("sac", 2), ("sac", 38), ("mbpo", 9), ("mbpo", 55)],
)
def test_a_run_that_was_stopped_in_the_middle_of_a_chunk_plays_it_again(algorithm: str, steps: int) -> None:
    story = Story(ALGORITHMS[algorithm], MODES["lockstep"], GymConfig(id="fused", factory=Fused))
    Fused.left = 0
    with Session(story) as straight:
        straight.turn(TURNS[algorithm])
    Fused.left = steps
    with Session(story) as first, pytest.raises(Stopped):
        first.turn(TURNS[algorithm])
    assert first.collector.rows().open < 3 * LANES
    with Session(story, first.save()) as run:
        assert balance(run.collector.rows(), run.learner.rows()).open == 0
        run.turn(TURNS[algorithm] - first.turns)
    run.episodes[:0] = first.episodes
    assert played(run) == played(straight)
    assert run.fingerprint() == straight.fingerprint()


def test_what_was_restored_can_be_saved_again_at_once_and_after_more() -> None:
    story = Story(PPO, MODES["batch"])
    straight, stops = stop_at(story, (3).__eq__, 8)
    saved, ended = stops[3]
    with Session(story, saved) as idle:
        assert lanes(idle.save()) == lanes(saved), "before it begins"
    with Session(story, idle.save()) as second:
        second.turn(2)
    with Session(story, second.save()) as third:
        third.turn(3)
    third.episodes[:0] = [*straight.episodes[:ended], *second.episodes]
    assert played(third) == played(straight)
    assert third.fingerprint() == straight.fingerprint()


def test_episodes_that_would_take_too_long_to_bring_back_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring.ReplayDeadline, "__init__", partialmethod(restoring.ReplayDeadline.__init__, 1e-9))
    straight, run, told = continued(Story(PPO, MODES["lockstep"], LONG), at=5, turns=10)
    assert len(told) == 1
    assert told[0].endswith("would take more than 1e-09 s")
    assert run.learner.version == straight.learner.version


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(sorted(ALGORITHMS)), st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_any_number_of_stops_changes_nothing(algorithm: str, stops: list[int]) -> None:
    story, turns = Story(ALGORITHMS[algorithm], MODES["sequential"]), sum(stops) + 2
    with Session(story) as straight:
        straight.turn(turns)
    episodes: list[Episode] = []
    saved = None
    for count in (*stops, 2):
        with Session(story, saved) as run:
            run.turn(count)
        episodes += run.episodes
        saved = run.save()
    run.episodes = episodes
    assert played(run) == played(straight)
    assert run.fingerprint() == straight.fingerprint()
