"""The three ways of autoreset become one: rows written out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from freewheel.core import NO_CONTEXT, NDArray, Slice
from freewheel.envs.vector import GymVector
from freewheel.errors import EnvError, SetupError
from freewheel.seeding import drawn, training_episodes
from freewheel.testing.conformance import check_env
from tests.support.contexts import StuckVector, ToldVector
from tests.support.worlds import Counter

SEEDS = [training_episodes(0, lane) for lane in range(2)]
ZEROS = np.zeros(2, np.int64)


class CounterVector(VectorEnv[Any, NDArray, NDArray]):
    """Lane 0 ends after 2 steps and lane 1 after 3. It shows 100 × lane + 10 × episode + steps; the reward is the steps."""

    def __init__(self, mode: AutoresetMode | None, *, batched: bool = False, masked: bool = False) -> None:
        self.metadata = {"render_modes": [], "autoreset_mode": mode} if mode else {"render_modes": []}
        self.mode, self.batched, self.masked = mode, batched, masked
        self.num_envs, self.lengths = 2, np.array([2, 3])
        self.single_observation_space, self.single_action_space = Box(0, 1000, (1,), np.float32), Discrete(2)
        self.reset_calls: list[Any] = []

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[NDArray, dict[str, Any]]:
        self.reset_calls.append((seed, options))
        if options is None:
            self.episode, self.count, self.ended = np.zeros(2, int), np.zeros(2, int), np.zeros(2, bool)
        else:
            self.begin(options["reset_mask"])
        return self.seen(), self.info()

    def begin(self, lanes: NDArray) -> None:
        self.episode[lanes] += 1
        self.count[lanes] = 0

    def seen(self) -> NDArray:
        return np.array(100 * np.arange(2) + 10 * self.episode + self.count, np.float32)[:, None]

    def info(self) -> dict[str, Any]:
        steps = {"steps": self.count.copy()}
        return {**steps, "action_mask": np.stack([self.count % 2 == 0, self.count >= 0], 1)} if self.masked else steps

    def step(self, actions: NDArray) -> Any:
        skip = self.ended if self.mode is AutoresetMode.NEXT_STEP else np.zeros(2, bool)
        self.count[~skip] += 1
        self.begin(skip)
        over = (self.count >= self.lengths) & ~skip
        reward, info = np.where(skip, 5.0, self.count), self.info()  # a reward on a reset row, which must not count
        self.ended = over
        if self.mode is AutoresetMode.SAME_STEP and over.any():
            final = self.seen()
            self.begin(over)
            several = np.full(2, None, object)
            for lane in np.flatnonzero(over):
                several[lane] = final[lane]
            info = {**self.info(), "final_info": info, "final_obs": final if self.batched else several}
        return self.seen(), reward, over, np.zeros(2, bool), info


FIELDS = "next_obs", "reward", "terminated", "truncated", "valid", "measures"


def play(env: GymVector, steps: int) -> dict[str, list[Any]]:
    """Each field of the Steps and what to act on next, [T][B]."""
    taken: list[dict[str, Any]] = []
    for _ in range(steps):
        step, obs = env.step(ZEROS), env.autoreset()
        told = {name: np.squeeze(getattr(step, name)).tolist() for name in FIELDS}
        taken.append({**told, "obs": np.squeeze(obs).tolist()})
    return {name: [row[name] for row in taken] for name in taken[0]}


T, F = True, False
AT_ONCE = {  # the new episode is there in the row of the end
    "obs": [[1, 101], [10, 102], [11, 110], [20, 111], [21, 112], [30, 120]],
    "next_obs": [[1, 101], [2, 102], [11, 103], [12, 111], [21, 112], [22, 113]],
    "reward": [[1, 1], [2, 2], [1, 3], [2, 1], [1, 2], [2, 3]],
    "terminated": [[F, F], [T, F], [F, T], [T, F], [F, F], [T, T]],
    "truncated": [[F, F]] * 6,
    "valid": [[T, T]] * 6,
}
NEXT_ROW = {  # a row of its own brings it, which is no transition
    "obs": [[1, 101], [2, 102], [10, 103], [11, 110], [12, 111], [20, 112]],
    "next_obs": [[1, 101], [2, 102], [10, 103], [11, 110], [12, 111], [20, 112]],
    "reward": [[1, 1], [2, 2], [0, 3], [1, 0], [2, 1], [0, 2]],
    "terminated": [[F, F], [T, F], [F, T], [F, F], [T, F], [F, F]],
    "truncated": [[F, F]] * 6,
    "valid": [[T, T], [T, T], [F, T], [T, F], [T, T], [F, T]],
}


@pytest.mark.parametrize(
    ("mode", "batched", "rows"),
    [
        (AutoresetMode.SAME_STEP, False, AT_ONCE),
        (AutoresetMode.SAME_STEP, True, AT_ONCE),
        (AutoresetMode.DISABLED, False, AT_ONCE),
        (AutoresetMode.NEXT_STEP, False, NEXT_ROW),
    ],
)
def test_golden_rows(mode: AutoresetMode, batched: bool, rows: dict[str, list[Any]]) -> None:
    env = GymVector(CounterVector(mode, batched=batched), "Counters", ("steps",))
    assert env.reset(SEEDS).tolist() == [[0], [100]]
    played = play(env, 6)
    over, measures = np.array(played["terminated"]), np.array(played.pop("measures"))
    assert played == rows
    lanes = np.nonzero(over)[1]
    assert measures[over].tolist() == [[2, 3][lane] for lane in lanes], "the last info of the episode that ended"
    env.reset(SEEDS)
    play(env, 2)  # lane 0 has just ended
    env.reset(SEEDS)
    assert env.step(ZEROS).valid.tolist() == [True, True], "a reset forgets that"


def test_only_ended_lanes_are_reset_where_autoreset_is_disabled_and_once_when_asked_for() -> None:
    vector = CounterVector(AutoresetMode.DISABLED)
    env = GymVector(vector, "Counters")
    env.reset(SEEDS)
    assert vector.reset_calls[-1] == (SEEDS[0].seed(0), None), "one seed for all lanes"
    vector.reset_calls.clear()
    env.step(ZEROS)
    env.autoreset()
    env.step(ZEROS)
    assert vector.reset_calls == [], "the row can be shipped before a slow reset"
    assert [env.autoreset().tolist() for _ in range(2)] == [[[10], [102]]] * 2
    play(env, 1)
    assert [options["reset_mask"].tolist() for _, options in vector.reset_calls] == [[True, False], [False, True]]


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_an_end_is_shown_as_often_as_asked_for(mode: AutoresetMode) -> None:
    env = GymVector(CounterVector(mode), "Counters")
    env.reset(SEEDS)
    play(env, 1)
    end = env.step(ZEROS)
    shown = [[2 if mode is AutoresetMode.NEXT_STEP else 10], [102]]
    assert [env.autoreset().tolist() for _ in range(2)] == [shown] * 2
    assert end.next_obs.tolist() == [[2], [102]]


def test_a_vector_env_is_told_the_table_at_every_reset() -> None:
    check_env(lambda lanes: GymVector(ToldVector(len(lanes)), "Told"), steps=40)
    with pytest.raises(AssertionError, match=r"shows the contexts \[\[.*, its episodes have \[\["):
        check_env(lambda lanes: GymVector(StuckVector(len(lanes)), "Stuck"), steps=40)
    vector, table = ToldVector(2), np.array([[1, 2], [3, 4]], np.float32)
    env = GymVector(vector, "Told")
    env.set_context(table)
    assert env.reset(SEEDS)[:, 1:].tolist() == [drawn(table, stream.seed(0)).tolist() for stream in SEEDS]
    play(env, 2)
    env.set_context(table + 5)
    assert play(env, 1)["next_obs"] == [[[3, *drawn(table, stream.seed(0))] for stream in SEEDS]]
    assert env.autoreset()[:, 1:].tolist() == [drawn(table + 5, stream.seed(1)).tolist() for stream in SEEDS]
    assert [sorted(options) for options in vector.options[1:]] == [["contexts", "seeds"], ["contexts", "reset_mask"]]
    env.set_context(NO_CONTEXT)
    env.reset(SEEDS)
    assert list(vector.options[-1]) == ["seeds"]


SAME_STEP = {"autoreset_mode": AutoresetMode.SAME_STEP}


@pytest.mark.parametrize("says", [{"contexts": False}, {"lane_seeds": False}, SAME_STEP], ids=str)
def test_who_could_not_pass_contexts_on_refuses_them(says: dict[str, Any]) -> None:
    vector = ToldVector(2)
    vector.metadata = {**vector.metadata, **says}
    env = GymVector(vector, "Told")
    assert env.spec.context == 0
    env.set_context(NO_CONTEXT)
    with pytest.raises(SetupError, match=r"^Told does not take contexts: .*\['contexts'\]"):
        env.set_context(np.zeros((1, 2), np.float32))


@pytest.mark.parametrize(
    ("mode", "batched"), [*((mode, False) for mode in AutoresetMode), (AutoresetMode.SAME_STEP, True)]
)
def test_masks_in_info_are_the_last_columns(mode: AutoresetMode, batched: bool) -> None:
    env = GymVector(CounterVector(mode, batched=batched, masked=True), "Counters")
    assert env.spec.slices == (Slice("obs", 0, 1, (1,)), Slice("action_mask", 1, 3, (2,)))
    assert env.reset(SEEDS).tolist() == [[0, 1, 1], [100, 1, 1]]
    env.step(ZEROS)
    assert env.autoreset().tolist() == [[1, 0, 1], [101, 0, 1]]
    assert env.step(ZEROS).next_obs.tolist() == [[2, 1, 1], [102, 1, 1]]
    env.autoreset()
    assert env.step(ZEROS).next_obs[1].tolist() == [103, 0, 1], "the mask of the episode that ended"
    assert env.autoreset()[1].tolist() == ([103, 0, 1] if mode is AutoresetMode.NEXT_STEP else [110, 1, 1])


class Pair(Counter):
    """A Counter in a Dict."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.observation_space: Space[Any] = Dict(origin=Box(0, 1000, (1,), np.float32), steps=Discrete(4))

    def reset(self, **given: Any) -> Any:
        observation, info = super().reset(**given)
        return {"origin": observation[:1], "steps": int(observation[1])}, info

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        return {"origin": observation[:1], "steps": int(observation[1])}, *rest


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_gymnasiums_own_vector_env_of_nested_observations(mode: AutoresetMode) -> None:
    env = GymVector(SyncVectorEnv([lambda: Pair(2), lambda: Pair(3)], autoreset_mode=mode), "Pairs", ("count",))
    first = SEEDS[0].seed(0)
    assert env.reset(SEEDS)[:, 1:].tolist() == [[1, 0, 0, 0], [1, 0, 0, 0]]
    env.step(ZEROS)
    end = env.step(ZEROS)
    assert end.next_obs.tolist() == [[first % 1000, 0, 0, 1, 0], [(first + 1) % 1000, 0, 0, 1, 0]]
    assert end.terminated.tolist() == [True, False]
    assert end.measures[0].tolist() == [2]
    if mode is AutoresetMode.NEXT_STEP:
        assert env.autoreset()[0, 1:].tolist() == [0, 0, 1, 0]
        assert env.step(ZEROS).valid.tolist() == [False, True]
    assert env.autoreset()[0, 1:].tolist() == [1, 0, 0, 0]
    env.close()


def test_a_vector_env_that_raises_lies_or_keeps_its_mode_to_itself_is_named() -> None:
    vector = CounterVector(AutoresetMode.SAME_STEP)
    with pytest.raises(
        SetupError, match=r"^Counters does not define its autoreset mode: set metadata\['autoreset_mode'\]"
    ):
        GymVector(CounterVector(None), "Counters")
    env = GymVector(vector, "Counters")
    env.reset(SEEDS)
    vector.seen = lambda: np.zeros((2, 3), np.float32)  # type: ignore[method-assign]
    with pytest.raises(EnvError) as caught:
        env.step(ZEROS)
    told = "Counters gave a wrong observation in step(): obs: expected shape (2, 1), got (2, 3)"
    assert (str(caught.value), caught.value.cause) == (told, "shape")
    del vector.count
    with pytest.raises(EnvError, match=r"^Counters raised AttributeError: .* \(in step\(\)\)\nTraceback"):
        env.step(ZEROS)
