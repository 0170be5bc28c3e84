"""Evaluation: the same greedy episodes on any number of lanes, in every mode; and which weights of a run are its best."""

from __future__ import annotations

import itertools
import math
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import freewheel
from freewheel.core import ActionSpec, Decision, EnvSpec, NDArray, Slice, Snapshot, Step
from freewheel.envs.batched import BatchedConfig
from freewheel.envs.device import DeviceEnv
from freewheel.envs.gym import GymConfig
from freewheel.errors import EnvError
from freewheel.run.checkpoints import checkpoint
from freewheel.run.evaluation.episodes import Score, evaluate, play
from freewheel.seeding import drawn, tree
from tests.support.runs import rows_of, train
from tests.support.worlds import Conditioned, Identity, Raises

SEED = 11
TABLE = np.array([[1, 2], [3, 4], [5, 6]], np.float32)


class Greedy:
    """Chooses 1 where the observation is positive; fails if it is not asked to be greedy."""

    state_size = 0

    def act(self, obs: NDArray, rng: Any, *, state: NDArray | None = None, greedy: bool = False) -> Decision:
        assert greedy
        lanes = len(obs)
        return Decision((obs[:, 0] > 0).astype(np.int64), np.zeros(lanes, np.float32), np.zeros((lanes, 0), np.float32))

    def load(self, snapshot: Snapshot) -> None:
        raise AssertionError("evaluate and play load no weights")


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


def test_another_seed_gives_other_episodes_and_a_score_is_a_mean_and_a_spread() -> None:
    assert evaluate(world(2), Greedy(), 5, SEED).returns != evaluate(world(2), Greedy(), 5, SEED + 1).returns
    score = Score((1.0, 3.0), (4, 5))
    assert (score.mean, score.spread) == (2.0, 1.0)


class Gaps(Mock):
    """Episodes of two steps of reward 1, then a row that is not valid and has reward 100."""

    spec = EnvSpec("Gaps", 1, 1, "float32", (Slice("obs", 0, 1, (1,)),), ActionSpec("discrete", 2))
    count = 0

    def reset(self, *seeds: Any) -> NDArray:
        return np.zeros((1, 1), np.float32)

    autoreset = reset

    def step(self, action: NDArray) -> Step:
        phase, self.count = self.count % 3, self.count + 1
        obs, no = np.zeros((1, 1), np.float32), np.zeros(1, np.bool_)
        reward = np.array([100.0 if phase == 2 else 1.0], np.float32)
        return Step(reward, np.array([phase == 1]), no, obs, np.array([phase != 2]), np.zeros((1, 0), np.float32))


def test_rows_that_are_not_valid_do_not_count() -> None:
    assert evaluate(Gaps(), Greedy(), 3, SEED) == Score((2.0,) * 3, (2,) * 3)


class Fragile(BySeed):
    """Raises in the second step of episodes whose seed can be divided by 3, and in their reset if it can also by 2."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray, dict[str, Any]]:
        seen = super().reset(seed=seed)
        if self.seed and self.seed % 6 == 0:  # 0: it is only looked at
            raise OSError("no socket")
        return seen

    def step(self, action: Any) -> tuple[NDArray, float, bool, bool, dict[str, Any]]:
        if self.seed % 3 == 0 and self.left < 1 + self.seed % 5:
            raise ValueError("the pump is dry")
        return super().step(action)


@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_episodes_in_which_the_env_fails_are_left_out_and_counted(lanes: int) -> None:
    env = GymConfig(id="Fragile", factory=Fragile).make(range(lanes), fault_tolerant=True)
    seeds = [tree(SEED, "eval", number) for number in range(20)]
    good = [number for number, seed in enumerate(seeds) if seed % 3 or (seed % 2 and seed % 5 == 0)]
    score = evaluate(env, Greedy(), 20, SEED)
    assert list(zip(score.returns, score.lengths, strict=True)) == [expected(number) for number in good]
    assert (score.failed, score.cut) == (20 - len(good), 0)
    assert {seed % 6 for seed in seeds} >= {0, 3}
    assert score.warning.startswith(f"{score.failed} evaluation episodes failed and are left out: lane ")
    assert score.failure.endswith(")")  # the line with the seed, without the traceback


def test_an_env_that_fails_every_time_has_no_score() -> None:
    config = GymConfig(id="Raises", factory=Raises, args={"at": 1})
    with pytest.raises(EnvError, match=r"was given up after 3 failures in a row; the last: .*ValueError: boom"):
        evaluate(config.make(range(2), fault_tolerant=True), Greedy(), 20, SEED)
    with pytest.raises(EnvError, match=r"^all 2 evaluation episodes of Raises failed: .*ValueError: boom"):
        evaluate(config.make(range(2), fault_tolerant=True), Greedy(), 2, SEED)


class Circles(BySeed):
    """Episodes with an even seed never end."""

    def step(self, action: Any) -> tuple[NDArray, float, bool, bool, dict[str, Any]]:
        seen, _, ended, _, _ = super().step(action)
        return seen, 1.0, ended and self.seed % 2 == 1, False, {}


@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_an_episode_that_never_ends_is_cut_and_the_next_one_is_not_affected(lanes: int) -> None:
    score = evaluate(GymConfig(id="Circles", factory=Circles).make(range(lanes)), Greedy(), 7, SEED, limit=50)
    seeds = [tree(SEED, "eval", number) for number in range(7)]
    lengths = [1 + seed % 5 if seed % 2 else 50 for seed in seeds]
    assert score == Score(tuple(map(float, lengths)), tuple(lengths), cut=sum(seed % 2 == 0 for seed in seeds))
    assert 0 < score.cut < 7
    number = next(number for number, seed in enumerate(seeds) if seed % 2 == 0)
    one = GymConfig(id="Circles", factory=Circles).make(range(1))
    assert len(play(one, Greedy(), (SEED, number), lambda picture: None, limit=20)) == 20


def test_a_return_that_is_not_finite_is_an_env_error() -> None:
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
    env = GymConfig("tests.support.worlds:Conditioned").make(range(lanes))
    score = evaluate(env, Greedy(), 8, SEED, context=TABLE)
    seeds = [tree(SEED, "eval", number) for number in range(8)]
    assert score.contexts == tuple(tuple(drawn(TABLE, seed).tolist()) for seed in seeds)
    assert score.returns == tuple(map(Conditioned.worth, seeds, score.contexts))
    assert evaluate(env, Greedy(), 8, SEED) == Score((0.0,) * 8, (3,) * 8), "a later evaluation has no contexts"


def test_play_has_the_same_context() -> None:
    env, seed = GymConfig("tests.support.worlds:Conditioned").make(range(1)), tree(SEED, "eval", 5)
    rewards = play(env, Greedy(), (SEED, 5), lambda picture: None, context=TABLE)
    assert sum(rewards) == Conditioned.worth(seed, drawn(TABLE, seed).tolist())


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


class Counts:
    """Counts its steps in its memory and acts by the count; `seen` has the memory of every call."""

    state_size = 1

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def act(self, obs: NDArray, rng: Any, *, state: NDArray | None = None, greedy: bool = False) -> Decision:
        assert greedy
        assert state is not None
        self.seen.append(state[:, 0].tolist())
        return Decision(state[:, 0].astype(np.int64) % 2, np.zeros(len(obs), np.float32), state + 1)

    def load(self, snapshot: Snapshot) -> None: ...


def steps_of(number: int) -> int:
    return expected(number)[1]


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_the_memory_of_a_lane_begins_at_zero_with_every_episode(lanes: int) -> None:
    actor = Counts()
    score = evaluate(world(lanes), actor, 6, SEED)
    assert score.lengths == tuple(map(steps_of, range(6)))
    seen = iter(actor.seen)
    for first in range(0, 6, lanes):  # lanes that end before the last one of their round go on with their next episode
        rounds = [next(seen) for _ in range(max(score.lengths[first : first + lanes]))]
        for lane in range(lanes):
            memory = [states[lane] for states in rounds]
            length = score.lengths[first + lane]
            assert memory[:length] == list(range(length))
            assert length == len(memory) or memory[length] == 0.0
            assert all(after in (before + 1, 0.0) for before, after in itertools.pairwise(memory))
    assert next(seen, None) is None


def test_play_carries_the_memory() -> None:
    actor = Counts()
    rewards = play(world(1), actor, (SEED, 3), lambda picture: None)
    assert actor.seen == [[float(count)] for count in range(len(rewards))]
    assert len(rewards) == steps_of(3)


LANES, STEPS, UPDATES = 16, 8, 6


@pytest.fixture
def one_drone_world(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """A drone world that allows one simulation, in the main thread; returns the lanes and the thread of every step."""
    step, spec, seen = DeviceEnv.step, DeviceEnv.spec, list[tuple[int, str]]()

    def watched(self: DeviceEnv, action: Any) -> Any:
        seen.append((len(action), threading.current_thread().name))
        return step(self, action)

    monkeypatch.setattr(DeviceEnv, "step", watched)
    monkeypatch.setattr(DeviceEnv, "spec", property(lambda env: replace(spec.__get__(env), one_per_process=True)))
    monkeypatch.setattr(BatchedConfig, "main_thread", property(lambda _: True), raising=False)
    return seen


@pytest.mark.parametrize("mode", ["lockstep", "continuous", "batch"])
def test_one_simulation_uses_the_main_thread(mode: str, tmp_path: Path, one_drone_world: list[tuple[int, str]]) -> None:
    result = freewheel.train(
        "freewheel/RoughDrone-v0", options={"mode": mode}, num_envs=LANES, num_steps_per_env=STEPS,
        steps=UPDATES * LANES * STEPS, seed=1, evals=1, eval_episodes=2,
        env_args={"lidar": False, "episode_seconds": 0.4, "levels": 1, "tiles_per_level": 1}, device="cpu",
        runs_dir=str(tmp_path), quiet=True, ppo={"epochs": 1},
    )  # fmt: skip
    summary = result.summary
    assert summary["final_eval"] is not None
    assert summary["eval/success"] is not None
    assert {lanes for lanes, _ in one_drone_world} == {LANES + 2}, "no lanes were reserved, or too many"
    assert {thread for _, thread in one_drone_world} == {"MainThread"}
    assert summary["produced"] % LANES == 0
    assert summary["trained"] == UPDATES * LANES * STEPS, "rows of reserved lanes were learned from"


def scripted(monkeypatch: pytest.MonkeyPatch, means: list[float]) -> None:
    """Evaluations of a run have these means, one after the other."""
    left = iter(means)
    monkeypatch.setattr("freewheel.run.evaluation.players.scored", lambda *_: Score((next(left),), (1,)))


@pytest.mark.parametrize(
    ("means", "best", "step", "link"),
    [
        ([1.0, 5.0, 5.0, 3.5, 3.0], 3.5, 256, "256"),  # the last two: candidate and final weights on fresh seeds
        ([1.0, 5.0, 5.0, 2.0, 3.0], 3.0, 512, "512"),  # the candidate was only lucky
        ([4.0, 1.0, 2.0, 3.0, 3.0], 3.0, 128, "128"),
    ],
)
def test_best_is_the_better_one_of_candidate_and_final_on_fresh_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, means: list[float], best: float, step: int, link: str
) -> None:
    scripted(monkeypatch, means)
    result = train(tmp_path, steps=512, evals=4)
    summary = result.summary
    links = {name: os.readlink(result.path / "checkpoints" / name) for name in ("best", "latest")}
    assert links == {"best": link, "latest": "512"}
    assert (summary["best_eval"], summary["final_eval"], summary["best_step"]) == (best, 3.0, step)
    assert (summary["eval_fresh"], summary["eval_note"], summary["evals_skipped"]) == (True, None, 0)
    found = checkpoint.load(result.path / "checkpoints", "best")
    assert found.about["version"] == step // 64
    assert (checkpoint.fingerprint(found.params) == summary["weights_sha256"]) == (link == "512")


class Stepping(Identity):
    """Measures of its own with the names that an evaluation has for what it is."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return *super().step(action)[:4], {"step": 7.0, "return_std": 8.0, "digit": 9.0}


def test_measures_with_the_name_of_what_is_known_of_an_evaluation_stand_beside_it(tmp_path: Path) -> None:
    result = train(tmp_path, Stepping, steps=128, evals=1, measures=("step", "return_std", "digit"))
    last = rows_of(result)[-1]
    assert (last["measure/step"], last["eval/step"], last["eval/digit"]) == (7.0, 128, 9.0)
    for found in (last, result.summary):
        assert (found["eval/measure/step"], found["eval/measure/return_std"], found["eval/digit"]) == (7.0, 8.0, 9.0)
    assert last["eval/return_std"] != 8.0
    assert not {"eval/step", "eval/return_std"} & result.summary.keys()


def test_without_evaluations_there_is_no_best(tmp_path: Path) -> None:
    result = train(tmp_path, steps=512, evals=0)
    assert result.summary["best_eval"] is result.summary["final_eval"] is None
    assert "eval_return" not in (result.path / "metrics.jsonl").read_text()
    assert not (result.path / "checkpoints" / "best").exists()
    assert result.summary["shares"]["learner"]["eval"] == 0.0
