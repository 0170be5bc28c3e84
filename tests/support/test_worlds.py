"""The toy worlds behave as described, and the faulty ones fail where they should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env as check_gymnasium_env

from tests.support import worlds as testing


@pytest.mark.parametrize("world", [testing.Identity, testing.IdentityBox, testing.Drifting, testing.Counter])
def test_toy_worlds_keep_to_gymnasiums_api(world: Callable[[], gymnasium.Env[Any, Any]]) -> None:
    check_gymnasium_env(world(), skip_render_check=True)


def test_identity_rewards_naming_what_is_shown() -> None:
    env = testing.Identity(n=4, length=16)
    obs, _ = env.reset(seed=1)
    classes = []
    for count in range(1, 17):
        classes.append(int(obs.argmax()))
        assert (obs.sum(), obs.max()) == (1, 1)
        right = count % 3 != 0
        obs, reward, terminated, truncated, _ = env.step(classes[-1] if right else (classes[-1] + 1) % 4)
        assert (reward, terminated, truncated) == (float(right), False, count == 16)
    assert set(classes) == {0, 1, 2, 3}


def test_identity_box_rewards_closeness() -> None:
    env = testing.IdentityBox(n=2)
    obs, _ = env.reset(seed=1)
    assert (np.abs(obs) <= 1).all()
    following, reward, *_ = env.step(obs)
    assert reward == 1.0
    _, reward, *_ = env.step(following + np.array([0.5, 0.0], np.float32))
    assert reward == pytest.approx(1 - 0.25 / 2)


def test_rows_of_a_drifting_world_certify_themselves() -> None:
    env = testing.Drifting(n=8, length=5)
    obs, _ = env.reset(seed=11)
    assert obs.tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0], "11 modulo 8, and the share that is over"
    for count in range(1, 6):
        following, reward, terminated, truncated, _ = env.step(5)
        assert reward == float(obs[:8].argmax() == 5)
        assert following[:8].argmax() == (obs[:8].argmax() + 1) % 8
        assert following[8] == np.float32(count / 5)
        assert (terminated, truncated) == (False, count == 5)
        obs = following


@pytest.mark.parametrize(("ends", "flags"), [("terminated", (True, False)), ("truncated", (False, True))])
def test_a_counter_counts(ends: Any, flags: tuple[bool, bool]) -> None:
    env = testing.Counter(length=2, ends=ends)
    assert env.reset(seed=12345)[0].tolist() == [345, 0]
    assert env.step(1)[1:] == (1.0, False, False, {"count": 1})
    observation, reward, *over, info = env.step(0)
    assert (observation.tolist(), reward, tuple(over), info) == ([345, 2], 2.0, flags, {"count": 2})


def test_a_conditioned_episode_is_worth_what_its_seed_and_context_say() -> None:
    env = testing.Conditioned(length=3)
    assert env.reset(seed=8)[0]["context"].tolist() == [0, 0]
    assert env.reset(seed=8, options={"context": np.array([2, -1], np.float32)})[0]["context"].tolist() == [2, -1]
    rewards = [env.step(0)[1] for _ in range(3)]
    assert rewards == [4 * (2 - 1), 4 * (2 - 2), 4 * (2 - 3)]
    assert testing.Conditioned.worth(8, (2, -1)) == sum(rewards)


def played(env: gymnasium.Env[Any, Any], seed: int = 5) -> list[Any]:
    """What is seen in four steps, up to an exception."""
    seen: list[Any] = []
    try:
        seen.append(env.reset(seed=seed)[0])
        seen.extend(env.step(0)[0] for _ in range(4))
    except ValueError as error:
        seen.append(error)
    return seen


def test_faults_come_at_their_step_of_their_episode() -> None:
    assert [type(seen) for seen in played(testing.Raises(at=2))] == [np.ndarray, np.ndarray, ValueError]
    assert [type(seen) for seen in played(testing.Raises(at=0))] == [ValueError]
    assert len(played(testing.Raises(at=2, only_seed=6))) == 5
    assert len(played(testing.Raises(at=2, only_seed=6), seed=6)) == 3
    assert [np.isnan(seen).any() for seen in played(testing.ReturnsNaN(at=2))] == [False, False, True, False, False]
    assert [seen.shape for seen in played(testing.WrongShape(at=2))] == [(2,), (2,), (1,), (2,), (2,)]
    assert len({id(seen) for seen in played(testing.MutatesBuffer())}) == 1


def test_a_rate_is_the_share_of_steps_that_fail_and_the_seed_says_which() -> None:
    def failing_steps(seed: int) -> list[int]:
        env = testing.ReturnsNaN(rate=0.1, length=2000)
        assert not np.isnan(env.reset(seed=seed)[0]).any()
        return [step for step in range(2000) if np.isnan(env.step(0)[0]).any()]

    assert len(failing_steps(1)) == pytest.approx(200, abs=4 * np.sqrt(200 * 0.9))
    assert failing_steps(1) == failing_steps(1) != failing_steps(2)
