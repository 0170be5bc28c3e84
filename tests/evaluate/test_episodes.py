"""Greedy episodes: the same ones whoever plays them, every row counted once, every picture shown once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from freewheel.core import ActionSpec, Decision, EnvSpec, NDArray, SeedStream, Slice, Snapshot, Step
from freewheel.envs.gym import GymConfig
from freewheel.errors import EnvError
from freewheel.evaluate.episodes import Score, evaluate, play
from freewheel.seeding import drawn, tree
from freewheel.testing.worlds import Conditioned

SEED = 11


class Greedy:
    """Chooses 1 where the observation says so, and nothing but greedily."""

    state_size = 0

    def act(
        self, obs: NDArray, rng: np.random.Generator, *, state: NDArray | None = None, greedy: bool = False
    ) -> Decision:
        assert greedy
        lanes = len(obs)
        action = (obs[:, 0] > 0).astype(np.int64)
        return Decision(action, np.zeros(lanes, np.float32), np.zeros((lanes, 0), np.float32))

    def load(self, snapshot: Snapshot) -> None:
        raise AssertionError("nobody asked for other weights")


class BySeed(gymnasium.Env[NDArray, Any]):
    """An episode of 1 + seed mod 5 steps that pays seed mod 100 for every right action."""

    metadata = {"render_modes": ["ansi", "rgb_array"]}  # noqa: RUF012 - as Gymnasium has it

    def __init__(self, fault: float = 0.0, render_mode: str | None = None) -> None:
        self.observation_space, self.action_space = Box(-1, 1, (1,), np.float32), Discrete(2)
        self.render_mode, self.fault = render_mode, fault

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray, dict[str, Any]]:
        assert seed is not None
        self.seed, self.left = seed, 1 + seed % 5
        return self.see(), {}

    def see(self) -> NDArray:
        self.sign = 1 if (self.seed + self.left) % 2 else -1
        return np.array([self.sign], np.float32)

    def step(self, action: Any) -> tuple[NDArray, float, bool, bool, dict[str, Any]]:
        reward = self.seed % 100 if action == (self.sign > 0) else 0
        self.left -= 1
        return self.see(), reward + self.fault, self.left == 0, False, {}

    def render(self) -> Any:
        return f"{self.left} left" if self.render_mode == "ansi" else np.full((2, 2, 3), self.left, np.uint8)


def expected(number: int) -> tuple[float, int]:
    seed = tree(SEED, "eval", number)
    return float(seed % 100 * (1 + seed % 5)), 1 + seed % 5


def world(lanes: int, **args: Any) -> Any:
    return GymConfig(id="BySeed", factory=BySeed, args=args).make(range(lanes))


@pytest.mark.parametrize("lanes", [1, 2, 3, 8])
@pytest.mark.parametrize("episodes", [1, 8, 13])
def test_the_episodes_are_the_same_for_any_number_of_lanes(lanes: int, episodes: int) -> None:
    score = evaluate(world(lanes), Greedy(), episodes, SEED)
    assert list(zip(score.returns, score.lengths, strict=True)) == [expected(number) for number in range(episodes)]


def test_another_seed_gives_other_episodes() -> None:
    assert evaluate(world(2), Greedy(), 5, SEED).returns != evaluate(world(2), Greedy(), 5, SEED + 1).returns


def test_a_score_is_a_mean_and_a_spread() -> None:
    score = Score((1.0, 3.0), (4, 5))
    assert (score.mean, score.spread) == (2.0, 1.0)


class Gaps:
    """Two steps of reward 1 an episode, then a row that is none, which promises 100."""

    spec = EnvSpec("Gaps", 1, 1, "float32", (Slice("obs", 0, 1, (1,)),), ActionSpec("discrete", 2))

    def __init__(self) -> None:
        self.count = 0

    def reset(self, seeds: Sequence[SeedStream]) -> NDArray:
        return np.zeros((1, 1), np.float32)

    def step(self, action: NDArray) -> Step:
        phase, self.count = self.count % 3, self.count + 1
        obs, no = np.zeros((1, 1), np.float32), np.zeros(1, np.bool_)
        reward = np.array([100.0 if phase == 2 else 1.0], np.float32)
        return Step(reward, np.array([phase == 1]), no, obs, np.array([phase != 2]), np.zeros((1, 0), np.float32))

    def set_context(self, context: NDArray) -> None:
        self.spec.check_context(context)

    def autoreset(self) -> NDArray:
        return np.zeros((1, 1), np.float32)

    def render(self) -> None:
        return None

    def close(self) -> None:
        pass


def test_rows_that_are_none_count_for_nothing() -> None:
    assert evaluate(Gaps(), Greedy(), 3, SEED) == Score((2.0,) * 3, (2,) * 3)


class Circles(BySeed):
    """Seeds that are even never end."""

    def step(self, action: Any) -> tuple[NDArray, float, bool, bool, dict[str, Any]]:
        seen, _, ended, _, _ = super().step(action)
        return seen, 1.0, ended and self.seed % 2 == 1, False, {}


@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_an_episode_that_never_ends_is_cut_and_the_next_one_is_its_own(lanes: int) -> None:
    env = GymConfig(id="Circles", factory=Circles).make(range(lanes))
    score = evaluate(env, Greedy(), 7, SEED, limit=50)
    seeds = [tree(SEED, "eval", number) for number in range(7)]
    lengths = [1 + seed % 5 if seed % 2 else 50 for seed in seeds]
    assert score == Score(tuple(map(float, lengths)), tuple(lengths), cut=sum(seed % 2 == 0 for seed in seeds))
    assert 0 < score.cut < 7
    number = next(number for number, seed in enumerate(seeds) if seed % 2 == 0)
    one = GymConfig(id="Circles", factory=Circles).make(range(1))
    assert len(play(one, Greedy(), (SEED, number), lambda picture: None, limit=20)) == 20


def test_a_return_that_is_no_number_is_the_worlds_fault() -> None:
    with pytest.raises(EnvError) as caught:
        evaluate(world(2, fault=float("nan")), Greedy(), 3, SEED)
    seed = tree(SEED, "eval", 0)
    assert str(caught.value).startswith(f"evaluation episode 0 of BySeed, seed {seed}, has return nan: ")
    assert caught.value.cause == "nan"


@pytest.mark.parametrize("number", [0, 3])
def test_play_shows_an_evaluation_episode_from_its_first_state_to_its_last(number: int) -> None:
    env = GymConfig(id="BySeed", factory=BySeed).make(range(1), render_mode="ansi")
    shown: list[Any] = []
    rewards = play(env, Greedy(), (SEED, number), shown.append)
    assert (sum(rewards), len(rewards)) == expected(number)
    assert shown == [f"{left} left" for left in range(len(rewards), -1, -1)]


@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_contexts_are_drawn_by_the_episodes_seed_on_any_number_of_lanes(lanes: int) -> None:
    table = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    env = GymConfig("freewheel.testing.worlds:Conditioned").make(range(lanes))
    score = evaluate(env, Greedy(), 8, SEED, context=table)
    seeds = [tree(SEED, "eval", number) for number in range(8)]
    assert score.contexts == tuple(tuple(drawn(table, seed).tolist()) for seed in seeds)
    assert score.returns == tuple(map(Conditioned.worth, seeds, score.contexts))
    assert evaluate(env, Greedy(), 8, SEED) == Score((0.0,) * 8, (3,) * 8), "and none are left behind"


def test_a_context_is_played_too() -> None:
    table = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    env, seed = GymConfig("freewheel.testing.worlds:Conditioned").make(range(1)), tree(SEED, "eval", 5)
    rewards = play(env, Greedy(), (SEED, 5), lambda picture: None, context=table)
    assert sum(rewards) == Conditioned.worth(seed, drawn(table, seed).tolist())


class Sometimes(BySeed):
    """Reports the seed's last digit where that is odd."""

    def step(self, action: Any) -> tuple[NDArray, float, bool, bool, dict[str, Any]]:
        digit = float(self.seed % 10)
        return *super().step(action)[:4], {"digit": digit if digit % 2 else math.nan, "never": math.nan}


def test_measures_are_averaged_over_the_episodes_that_have_them() -> None:
    env = GymConfig(id="Sometimes", factory=Sometimes, measures=("digit", "never")).make(range(3))
    digits = [tree(SEED, "eval", number) % 10 for number in range(9)]
    score = evaluate(env, Greedy(), 9, SEED)
    assert score.measures["digit"] == pytest.approx(np.mean([digit for digit in digits if digit % 2]))
    assert math.isnan(score.measures["never"])
