"""Environments of old gym, and streams in place of the global generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import freewheel
from freewheel.core import NDArray
from freewheel.envs.gym import GymConfig
from freewheel.envs.legacy import GlobalRandom, GlobalRandoms, OldGym, is_old, modern
from freewheel.errors import EnvError, SetupError
from freewheel.seeding import training_episodes
from tests.support import legacy_worlds as old_worlds
from tests.support.legacy_worlds import InNameOnly, Nested, Newer, Odd, Old, Seeded

KINDS = (Old, Seeded, Newer, InNameOnly)


def world(kind: type[Any], limit: int | None = None, **args: Any) -> GymConfig:
    return GymConfig(f"tests.support.legacy_worlds:{kind.__name__}", args, max_episode_steps=limit)


def rows(config: GymConfig, lanes: int, steps: int = 12) -> list[NDArray]:
    """[B, 6] observation, reward, terminated and truncated of every step, with actions that the step's number says."""
    env = config.make(range(lanes))
    env.reset([training_episodes(9, lane) for lane in range(lanes)])
    seen = []
    for step in range(steps):
        answer = env.step(np.full(lanes, step % 4))
        seen.append(np.c_[answer.next_obs, answer.reward, answer.terminated, answer.truncated])
        env.autoreset()
    env.close()
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_a_world_like_any_other(kind: type[Any]) -> None:
    env = world(kind).open(0)
    assert isinstance(env, OldGym)
    assert (env.observation_space, env.action_space) == (spaces.Box(-1.0, 1.0, (3,)), spaces.Discrete(4))
    observation, _ = env.reset(seed=1)
    assert env.observation_space.contains(observation)
    observation, reward, terminated, truncated, info = env.step(2)
    assert env.observation_space.contains(observation)
    assert isinstance(reward, float)
    assert (terminated, truncated, type(info)) == (False, False, dict)


@pytest.mark.parametrize("kind", KINDS)
def test_an_episode_depends_on_its_seed_alone(kind: type[Any]) -> None:
    """Not on its neighbours, nor on who else draws from the global generators."""
    together = rows(world(kind), lanes=3)
    np.random.rand(5)  # noqa: NPY002
    random.random()
    assert [row[0].tolist() for row in together] == [row[0].tolist() for row in rows(world(kind), lanes=1)]
    assert len({tuple(row[lane][:2]) for row in together for lane in range(3)}) > 1  # there was chance in it
    assert [bool(row[0, 4]) for row in together] == [step % 5 == 4 for step in range(12)]


@pytest.fixture
def untouched() -> Iterator[None]:
    """The streams of the caller continue as if nothing had happened."""
    python, numpy = random.Random(7), np.random.RandomState(7)
    before, bits = random.getstate(), np.random.mtrand.get_bit_generator()
    random.setstate(python.getstate())
    np.random.set_state(numpy.get_state())  # noqa: NPY002
    yield
    assert [random.random() for _ in range(3)] == [python.random() for _ in range(3)]
    assert np.random.rand(3).tolist() == numpy.rand(3).tolist()  # noqa: NPY002
    random.setstate(before)
    assert np.random.mtrand.get_bit_generator() is bits


@pytest.mark.usefixtures("untouched")
def test_the_callers_streams_are_left_alone() -> None:
    env = world(Old).open(0)
    env.reset(seed=1)
    for _ in range(3):
        env.step(0)


def test_without_a_seed_it_goes_on() -> None:
    stories = []
    for _ in range(2):
        env = world(Old, length=50).open(0)
        env.reset(seed=4)
        env.reset()
        stories.append([env.step(0)[0].tolist() for _ in range(20)])
    assert stories[0] == stories[1]
    env.reset(seed=4)
    assert stories[0] != [env.step(0)[0].tolist() for _ in range(20)]


@pytest.mark.parametrize(
    ("config", "ends"),
    [
        (world(Old), {4: (True, False)}),
        (world(Old, clock=True), {4: (False, True)}),
        (world(Old, limit=5), {4: (False, True)}),  # a bare `done` at the limit is the clock's
        (world(Old, limit=3), {2: (False, True)}),
        (world(Old, limit=9), {4: (True, False)}),
        (world(Newer), {4: (True, False)}),
        (world(Newer, clock=True), {4: (False, True)}),
        (world(Newer, limit=5), {4: (True, True)}),  # it said which
        (world(Newer, limit=2), {1: (False, True)}),
    ],
    ids=str,
)
def test_which_end_it_was(config: GymConfig, ends: dict[int, tuple[bool, bool]]) -> None:
    env = config.open(0)
    for _ in range(2):
        env.reset(seed=0)
        expected = [ends.get(step, (False, False)) for step in range(max(ends) + 1)]
        assert [env.step(0)[2:4] for _ in expected] == expected


def test_observations_are_fitted_to_their_spaces() -> None:
    env = world(Nested).open(0)
    observation, _ = env.reset(seed=0)
    assert env.observation_space.contains(observation)
    assert observation["c"].dtype == np.uint8
    assert world(Nested).make(range(1)).spec.obs_size == 3 + 2 + 5 + 1


def test_spaces_keep_what_they_hold() -> None:
    assert modern(old_worlds.Box(-2.0, 3.0, (2, 2), np.float64), "it") == spaces.Box(-2.0, 3.0, (2, 2), np.float64)
    assert modern(spaces.Discrete(3, start=1), "it") == spaces.Discrete(3, start=1)
    assert modern(old_worlds.MultiDiscrete([2, 3]), "it") == spaces.MultiDiscrete([2, 3])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Odd, "the observation space of tests.support.legacy_worlds:Odd is a Graph: use Box, Discrete"),
        (old_worlds.Stepless, "'tests.support.legacy_worlds:Stepless' is not an environment: the class has no reset()"),
    ],
)
def test_what_is_neither_is_refused_in_a_line(kind: type[Any], text: str) -> None:
    with pytest.raises(SetupError) as caught:
        world(kind).make(range(1))
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


def test_a_truncation_that_is_no_bool_is_refused() -> None:
    """An info dictionary in its place is true, and would end every episode after a step."""
    env = world(InNameOnly, truthy=True).make(range(1))
    env.reset([training_episodes(0, 0)])
    with pytest.raises(EnvError, match=r"step\(\) has bool, dict between reward and info: wrap it to return"):
        env.step(np.zeros(1, np.int64))
    env.close()


def test_gymnasiums_own_are_left_as_they_are_and_an_old_one_is_closed() -> None:
    assert not is_old(gymnasium.make("CartPole-v1"))
    assert not isinstance(GymConfig("tests.support.worlds:Counter").open(0), OldGym)
    old = Old()
    OldGym(old, "it").close()
    assert old.closed


def test_it_is_trained_on(tmp_path: Path) -> None:
    run = freewheel.train(
        "tests.support.legacy_worlds:Old", quiet=True, runs_dir=tmp_path, options={"mode": "episodes"}, workers=2,
        num_steps_per_env=10, steps=40, evals=1, eval_episodes=2, policy={"hidden": [4]}, max_episode_steps=4,
    )  # fmt: skip
    assert run.exit_code == 0
    assert run.summary["episodes"] >= 10  # of four steps


@pytest.mark.usefixtures("untouched")
def test_a_stream_begins_as_seeding_would_goes_on_where_it_was_left_and_sees_no_other() -> None:
    with GlobalRandom(0):
        assert random.random() == 0.8444218515250481
    pairs = [(GlobalRandom(seed), random.Random(seed)) for seed in (1, 2, 2**31 - 1)]
    for _ in range(4):
        for stream, alone in pairs:
            with stream:
                assert (random.random(), random.gauss(0.0, 1.0)) == (alone.random(), alone.gauss(0.0, 1.0))


@pytest.mark.usefixtures("untouched")
def test_the_callers_stream_comes_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="empty"), GlobalRandom(4):
        random.randrange(random.randrange(1))


@pytest.mark.usefixtures("untouched")
def test_a_kept_state_can_be_put_back_and_streams_without_a_seed_differ() -> None:
    drawn = []
    stream, kept = GlobalRandom(9), GlobalRandom(9).state
    for one in (stream, stream, GlobalRandom(), GlobalRandom()):
        stream.state = kept
        with one:
            drawn.append(random.random())
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3


@pytest.mark.usefixtures("untouched")
def test_numpy_has_a_stream_too() -> None:
    stream, again = GlobalRandoms(6), GlobalRandoms(6)
    with stream:
        first = np.random.rand(), random.random()  # noqa: NPY002
    with again:
        assert (np.random.rand(), random.random()) == first  # noqa: NPY002
    with stream:
        assert np.random.rand() != first[0]  # noqa: NPY002
    stream.seed(6)
    with stream:
        assert np.random.rand() == first[0]  # noqa: NPY002
