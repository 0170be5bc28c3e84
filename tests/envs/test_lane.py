"""What an environment answers is checked at the boundary, and what it raises never gets past it, whatever its exceptions do."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from freewheel.envs.gym import GymConfig
from freewheel.envs.lane import raised
from freewheel.envs.loop import GymLoop
from freewheel.errors import EnvError
from freewheel.seeding import training_episodes
from tests.support.odd_worlds import ERRORS, MuteError
from tests.support.worlds import Identity


class Odd(Identity):
    """Answers with what it was made with."""

    def __init__(self, **answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        given = {"reward": reward, "terminated": terminated, "truncated": truncated} | self.answer
        if "error" in given:
            raise given["error"]
        return obs, given["reward"], given["terminated"], given["truncated"], info


def stepped(**answer: Any) -> Any:
    env = GymConfig("Odd", factory=lambda: Odd(**answer)).make(range(1))
    try:
        env.reset([training_episodes(0, 0)])
        return env.step(np.zeros(1, np.int64))
    finally:
        env.close()


@pytest.mark.parametrize("flag", [None, "no", 2, -1, 0.0, [True], np.array([True]), np.float32(1), object])
@pytest.mark.parametrize("name", ["terminated", "truncated"])
def test_what_is_neither_true_nor_false_is_refused(name: str, flag: Any) -> None:
    with pytest.raises(EnvError, match=rf"wrong answer in step\(\): {name} must be True or False, not ") as caught:
        stepped(**{name: flag})
    assert caught.value.cause == "shape"


@pytest.mark.parametrize("reward", [None, "1.0", b"1", [1.0], np.array([1.0]), np.array(["1"]), {}, 1j])
def test_what_is_no_number_is_no_reward(reward: Any) -> None:
    with pytest.raises(EnvError, match=r"wrong answer in step\(\): the reward must be a number, not "):
        stepped(reward=reward)


def test_other_kinds_of_true_and_of_numbers_are_fine() -> None:
    for flag in (True, np.True_, 1, np.int64(1), np.array(True), np.uint8(1)):
        assert stepped(terminated=flag).terminated.tolist() == [True]
    for reward in (2, 2.0, np.float64(2), np.float32(2), np.int64(2), np.array(2.0)):
        assert stepped(reward=reward).reward.tolist() == [2.0]


@pytest.mark.parametrize(("error", "text"), ERRORS.values(), ids=ERRORS.keys())
def test_no_exception_gets_past_the_boundary(error: Exception, text: str) -> None:
    with pytest.raises(EnvError) as caught:
        stepped(error=error)
    report = str(caught.value)
    assert text in report
    assert len(report) < 30_000
    assert "Traceback (most recent call last)" in report
    report.encode()
    assert str(pickle.loads(pickle.dumps(caught.value))) == report  # noqa: S301 - as it travels to the trainer


def test_a_long_traceback_keeps_its_beginning_and_its_end() -> None:
    def deep(depth: int) -> None:
        if depth:
            return deep(depth - 1)
        raise ValueError("at the bottom")

    with pytest.raises(ValueError, match="at the bottom") as caught:
        deep(3)
    assert str(raised("lane 0", caught.value, "step 1")).endswith("ValueError: at the bottom")


def test_a_lane_that_raises_in_close_closes_the_others() -> None:
    class Stubborn(Identity):
        def close(self) -> None:
            raise MuteError

    env = GymLoop([Stubborn(), Stubborn()], "Stubborn", range(2))
    with pytest.warns(RuntimeWarning, match=r"^Stubborn raised MuteError in close\(\): \(no text") as told:
        env.close()
    assert len(told) == 2
