"""A Straggler takes the time its law says, gives the same episode for the same seed, and rewards what it says."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, get_args

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

from freewheel.core import NDArray
from freewheel.envs.family import WORLDS, register_ids
from freewheel.errors import UsageError
from freewheel.testing.straggler import ACTIONS, PATTERNS, TARGETS, Law, Straggler, relative_times

ID = "freewheel/Straggler-v0"
#: The deviation of each law of mean 1, in closed form: e^(σ²) − 1 at σ = 0.7, and p(1 − p)(long − short)².
DEVIATION = {
    "lognormal": np.sqrt(np.exp(0.49) - 1),
    "ninety_ten": np.sqrt(0.1 * 0.9) * 9 / 1.9,
    "rare": np.sqrt(0.001 * 0.999) * 999 / 1.999,
    "constant": 0.0,
}


def play(env: Straggler, choose: Callable[[NDArray], Any], seed: int | None = None) -> tuple[NDArray, float, Any]:
    """An episode: its observations [length + 1, 52], its return, its last info."""
    obs, info = env.reset(seed=seed)
    seen, total, over = [obs], 0.0, False
    while not over:
        assert info == {}, "nothing is told before the end"
        obs, reward, over, truncated, info = env.step(choose(obs))
        assert not truncated
        seen.append(obs)
        total += reward
    return np.stack(seen), total, info


def right_action(observation: NDArray) -> int:
    """The action that earns 1 after this observation."""
    return int(TARGETS[np.argmax(PATTERNS @ observation)])


def at_random(seed: int) -> Callable[[NDArray], int]:
    rng = np.random.default_rng(seed)
    return lambda obs: int(rng.integers(ACTIONS))


@pytest.mark.parametrize("law", get_args(Law))
def test_a_law_keeps_its_mean(law: Law) -> None:
    count = 400_000
    sample = relative_times(law, count, np.random.default_rng(3), sigma=0.7)
    assert (sample > 0).all()
    assert abs(sample.mean() - 1) <= 4 * DEVIATION[law] / np.sqrt(count)
    assert sample.std() == pytest.approx(DEVIATION[law], rel=0.1)
    if law == "lognormal":
        assert np.log(sample).std() == pytest.approx(0.7, rel=0.01)
        return
    values = {"ninety_ten": [1 / 1.9, 10 / 1.9], "rare": [1 / 1.999, 1000 / 1.999], "constant": [1.0]}
    assert sorted(set(sample.tolist())) == pytest.approx(values[law])


def test_times_come_from_a_generator_of_their_own() -> None:
    """The second child of the seed's generator; another law leaves what is seen alone."""
    env = Straggler(length=30, mean=0.002)
    observation, _ = env.reset(seed=11)
    _, times = np.random.default_rng(11).spawn(2)
    assert env.seconds == [0.0, *relative_times("lognormal", 31, times, 0.7)[1:] * 0.002]
    env = Straggler(length=2, law="constant", mean=0.25, reset_mean=0.001)
    env.reset(seed=1)
    assert env.seconds == [0.001, 0.25, 0.25], "steps and reset have their own means"
    for law in get_args(Law):
        seen, *_ = play(Straggler(length=30, law=law, mean=0), at_random(0), seed=11)
        np.testing.assert_array_equal(seen[0], observation)
        np.testing.assert_array_equal(seen, play(Straggler(length=30, mean=0), at_random(0), seed=11)[0])


@pytest.mark.parametrize("kind", ["sleep", "burn"])
def test_a_world_takes_the_drawn_time_and_says_so(kind: Any) -> None:
    env = Straggler(length=20, mean=0.002, reset_mean=0.02, kind=kind)
    begun, busy = time.perf_counter(), time.thread_time()
    *_, info = play(env, at_random(0), seed=5)
    passed, busy = time.perf_counter() - begun, time.thread_time() - busy
    assert info["drawn_s"] == pytest.approx(sum(env.seconds))
    assert min(env.seconds) > 0
    assert (busy >= info["drawn_s"]) == (kind == "burn")
    assert info["slept_s"] <= passed
    assert kind == "burn" or info["drawn_s"] <= info["slept_s"]
    assert [type(value) for value in info.values()] == [float, float]


@pytest.mark.parametrize("kind", ["sleep", "burn"])
def test_a_mean_of_zero_is_no_time_at_all(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "sleep", "thread_time":
        monkeypatch.setattr(time, name, lambda *_: pytest.fail("time was spent"))
    *_, info = play(Straggler(mean=0, kind=kind), at_random(0), seed=1)
    assert info == {"drawn_s": 0.0, "slept_s": 0.0}


def test_a_step_costs_little_beside_its_time() -> None:
    env, calls = Straggler(mean=0), list[str]()
    env.reset(seed=1)
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    try:
        env.step(3)
    finally:
        sys.setprofile(None)
    assert len(calls) < 20, "calls and returns, of Python and of C"


def test_a_seed_sets_the_episode_whatever_is_done() -> None:
    env = Straggler(mean=1e-6)
    seen, random_return, told = play(env, at_random(0), seed=8)
    seconds = env.seconds
    play(env, at_random(1), seed=9)
    assert env.seconds != seconds
    again, best_return, told_again = play(env, right_action, seed=8)
    np.testing.assert_array_equal(again, seen)
    assert env.seconds == seconds
    assert told_again["drawn_s"] == told["drawn_s"]
    assert best_return == 100 > random_return


def test_episodes_without_a_seed_go_on_from_the_last_one() -> None:
    env, twin = Straggler(mean=0), Straggler(mean=0)
    episodes = [play(env, at_random(0), seed)[0] for seed in (8, None, None)]
    np.testing.assert_array_equal(episodes, [play(twin, right_action, seed)[0] for seed in (8, None, None)])
    assert len({episode.tobytes() for episode in episodes}) == 3


def test_an_episode_ends_at_its_length_and_not_later() -> None:
    env = Straggler(length=7, mean=0)
    check_env(env, skip_render_check=True)
    env = Straggler(length=7, mean=0)
    with pytest.raises(ResetNeeded):
        env.step(0)
    assert len(play(env, at_random(0), seed=1)[0]) == 8
    with pytest.raises(ResetNeeded):
        env.step(0)


def test_the_right_actions_earn_everything_and_others_their_share() -> None:
    env, named = Straggler(mean=0), set()

    def note(obs: NDArray) -> int:
        named.add(right_action(obs))
        return right_action(obs)

    assert [play(env, note, seed)[1] for seed in range(10)] == [100.0] * 10
    assert named == set(TARGETS.tolist()) == {4 + 9 * context for context in range(16)}
    for choose, share in (at_random(4), 1 / ACTIONS), (lambda obs: 13, 1 / 16):
        earned = play(Straggler(length=20_000, mean=0), choose, seed=1)[1] / 20_000
        assert earned == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / 20_000))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"law": "log_normal"}, "no law 'log_normal'; did you mean 'lognormal'"),
        ({"kind": "wait"}, "no kind 'wait'; choose from burn, sleep"),
        ({"length": 0}, "length 1 or more"),
        ({"mean": -0.1}, "mean, reset_mean and sigma 0 or more"),
    ],
)
def test_what_it_cannot_be_is_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Straggler(**args)


def test_registering_twice_is_quiet_and_leaves_the_world_bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in WORLDS.values():
        for name in family.ids:
            monkeypatch.delitem(gymnasium.registry, name, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_ids()
        spec = gymnasium.registry[ID]
        register_ids()
        env = gymnasium.make(ID, mean=0, length=3)
    assert gymnasium.registry[ID] is spec
    assert (spec.id, spec.max_episode_steps) == (ID, None)
    assert type(env) is Straggler, "no wrapper costs time"
    assert len(play(env, at_random(0), seed=1)[0]) == 4
