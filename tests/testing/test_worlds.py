"""The toy worlds are what they say, the faulty ones fail where they say, and check_env sees an Env that cheats."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env as check_gymnasium_env

from freewheel.core import Env, EnvSpec, Failure, NDArray, SeedStream, Step
from freewheel.envs.gym import GymConfig
from freewheel.testing import worlds as testing
from freewheel.testing.conformance import check_env


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
    assert obs.tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0], "11 modulo 8, and none of the episode is over"
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
    assert [part if isinstance(part, float) else str(part) for part in env.step(1)[1:]] == [
        1.0,
        "False",
        "False",
        "{'count': 1}",
    ]
    observation, reward, *over, info = env.step(0)
    assert (observation.tolist(), reward, tuple(over), info) == ([345, 2], 2.0, flags, {"count": 2})


def test_a_conditioned_episode_is_worth_what_its_seed_and_context_say() -> None:
    env = testing.Conditioned(length=3)
    assert env.reset(seed=8)[0]["context"].tolist() == [0, 0]
    assert env.reset(seed=8, options={"context": np.array([2, -1], np.float32)})[0]["context"].tolist() == [2, -1]
    rewards = [env.step(0)[1] for _ in range(3)]
    assert rewards == [4 * (2 - 1), 4 * (2 - 2), 4 * (2 - 3)]
    assert testing.Conditioned.worth(8, (2, -1)) == sum(rewards)


# ------------------------------------------------------------------------------------------------------------ faulty worlds


def played(env: gymnasium.Env[Any, Any], seed: int = 5) -> list[Any]:
    """What is seen in four steps, up to an exception."""
    seen: list[Any] = []
    try:
        seen.append(env.reset(seed=seed)[0])
        seen.extend(env.step(0)[0] for _ in range(4))
    except ValueError as error:
        seen.append(error)
    return seen


def test_raises_does_so_at_its_step_of_its_episode() -> None:
    assert [type(seen) for seen in played(testing.Raises(at=2))] == [np.ndarray, np.ndarray, ValueError]
    assert [type(seen) for seen in played(testing.Raises(at=0))] == [ValueError]
    assert len(played(testing.Raises(at=2, only_seed=6))) == 5
    assert len(played(testing.Raises(at=2, only_seed=6), seed=6)) == 3


def test_returns_nan_and_wrong_shape_at_their_step() -> None:
    assert [np.isnan(seen).any() for seen in played(testing.ReturnsNaN(at=2))] == [False, False, True, False, False]
    assert [seen.shape for seen in played(testing.WrongShape(at=2))] == [(2,), (2,), (1,), (2,), (2,)]


def test_a_rate_is_the_share_of_steps_that_fail_and_the_seed_says_which() -> None:
    def failing_steps(seed: int) -> list[int]:
        env = testing.ReturnsNaN(rate=0.1, length=2000)
        assert not np.isnan(env.reset(seed=seed)[0]).any()
        return [step for step in range(2000) if np.isnan(env.step(0)[0]).any()]

    assert len(failing_steps(1)) == pytest.approx(200, abs=4 * np.sqrt(200 * 0.9))
    assert failing_steps(1) == failing_steps(1) != failing_steps(2)
    assert len(played(testing.Raises(rate=0.0))) == 5
    assert [type(seen) for seen in played(testing.Raises(rate=1.0))] == [np.ndarray, ValueError]
    assert testing.Hangs(3, 7, 8, True, 0.5).rate == 0.5


def test_mutates_buffer_returns_one_array() -> None:
    assert len({id(seen) for seen in played(testing.MutatesBuffer())}) == 1
    assert len({id(seen) for seen in played(testing.Counter())}) == 5


def test_crawls_sleeps_from_its_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    played(testing.Crawls(seconds=7.0, at=3))
    assert slept == [7.0, 7.0]


def test_dies_kills_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(os, "kill", lambda *call: killed.append(call))
    played(testing.Dies(at=2))
    assert killed == [(os.getpid(), signal.SIGKILL)]


@pytest.mark.parametrize("deaf", [False, True])
def test_hangs_and_may_be_deaf(monkeypatch: pytest.MonkeyPatch, deaf: bool) -> None:
    handled: list[Any] = []
    monkeypatch.setattr(signal, "signal", lambda *call: handled.append(call))
    naps = iter([None, None])
    monkeypatch.setattr(time, "sleep", lambda _: next(naps))  # the third nap would be a StopIteration
    env = testing.Hangs(at=1, deaf=deaf)
    env.reset(seed=0)
    with pytest.raises(StopIteration):
        env.step(0)
    assert handled == ([(signal.SIGTERM, signal.SIG_IGN)] if deaf else [])


# ------------------------------------------------------------------------------------------------------- an Env that cheats


class Honest:
    """A sound Env; each subclass spoils one thing."""

    world = GymConfig("freewheel.testing.worlds:IdentityBox", {"length": 5}, measures=("count",))

    def __init__(self, lanes: range) -> None:
        self.lanes = lanes
        self.env: Env = self.world.make(lanes)

    @property
    def spec(self) -> EnvSpec:
        return self.env.spec

    def reset(self, seeds: Sequence[SeedStream]) -> NDArray:
        return self.env.reset(seeds)

    def step(self, action: NDArray) -> Step:
        return self.spoilt(self.env.step(action))

    def spoilt(self, step: Step) -> Step:
        return step

    def set_context(self, context: NDArray) -> None:
        self.env.set_context(context)

    def autoreset(self) -> NDArray:
        return self.env.autoreset()

    def render(self) -> NDArray | str | None:
        return None

    def close(self) -> None:
        self.env.close()


class WrongWidth(Honest):
    def spoilt(self, step: Step) -> Step:
        return dataclasses.replace(step, next_obs=step.next_obs[:, :1])


class WrongStart(Honest):
    def autoreset(self) -> NDArray:
        return super().autoreset()[:, :1]


class DoubleReward(Honest):
    def spoilt(self, step: Step) -> Step:
        return dataclasses.replace(step, reward=step.reward.astype(np.float64))


class ResetAsSuccessor(Honest):
    def spoilt(self, step: Step) -> Step:
        return dataclasses.replace(step, next_obs=self.env.autoreset())


class NoStart(Honest):
    """Ended lanes go on from where they ended."""

    last: NDArray

    def spoilt(self, step: Step) -> Step:
        self.last = step.next_obs.copy()
        return step

    def autoreset(self) -> NDArray:
        super().autoreset()
        return self.last


class BeginsAlways(Honest):
    """Shows the first observation again, whether an episode ended or not."""

    first: NDArray

    def reset(self, seeds: Sequence[SeedStream]) -> NDArray:
        self.first = super().reset(seeds).copy()
        return self.first

    def autoreset(self) -> NDArray:
        super().autoreset()
        return self.first


class OneBuffer(Honest):
    """The observations of a Step become those of autoreset."""

    shown: NDArray

    def spoilt(self, step: Step) -> Step:
        self.shown = step.next_obs
        return step

    def autoreset(self) -> NDArray:
        np.copyto(self.shown, super().autoreset())
        return self.shown


class Failing(Honest):
    def spoilt(self, step: Step) -> Step:
        return dataclasses.replace(step, failures=(Failure(1, "nan", "lane 1 of it is nan"),))


class StaleSuccessor(Honest):
    last: NDArray | None = None

    def spoilt(self, step: Step) -> Step:
        last, self.last = self.last, step.next_obs.copy()
        return step if last is None else dataclasses.replace(step, next_obs=last)


class Gap(Honest):
    def spoilt(self, step: Step) -> Step:
        over = step.terminated | step.truncated
        return dataclasses.replace(step, valid=over, reward=np.where(over, step.reward, np.float32(0)))


class EndInGap(Honest):
    def spoilt(self, step: Step) -> Step:
        return dataclasses.replace(step, valid=~(step.terminated | step.truncated))


class Moody(Honest):
    """Not the same twice."""

    mood = 0

    def __init__(self, lanes: range) -> None:
        super().__init__(lanes)
        Moody.mood += 1

    def spoilt(self, step: Step) -> Step:
        return dataclasses.replace(step, reward=step.reward + np.float32(self.mood))


class Sociable(Honest):
    """A lane's reward depends on how many are beside it."""

    def spoilt(self, step: Step) -> Step:
        return dataclasses.replace(step, reward=step.reward + np.float32(len(self.lanes)))


class FirstSeedOnly(Honest):
    """Every episode of a lane has the seed of its first."""

    def reset(self, seeds: Sequence[SeedStream]) -> NDArray:
        return super().reset([_Stuck(stream.seed(0)) for stream in seeds])


@dataclasses.dataclass(frozen=True)
class _Stuck:
    only: int

    def number(self, k: int) -> int:
        return k

    def seed(self, k: int) -> int:
        return self.only


class NeverEnds(Honest):
    world = dataclasses.replace(Honest.world, args={"length": 10_000})


class Unclipped(Honest):
    def step(self, action: NDArray) -> Step:
        step = super().step(action)
        return dataclasses.replace(step, reward=step.reward + np.abs(action).sum(1))


class CloseOnce(Honest):
    closed = False

    def close(self) -> None:
        super().close()
        if self.closed:
            raise AssertionError("closed twice")
        self.closed = True


class Told(Honest):
    world = GymConfig("freewheel.testing.worlds:Conditioned", {"length": 4})


class Deaf(Told):
    """Stays with the first table."""

    heard = False

    def set_context(self, context: NDArray) -> None:
        if not self.heard:
            super().set_context(context)
        self.heard |= bool(context.size)


class Restless(Told):
    """An episode's context changes in the middle of it."""

    def spoilt(self, step: Step) -> Step:
        step.next_obs[:, 1:] += step.next_obs[:, :1] == 2
        return step


class Welcoming(Told):
    """Takes whatever it is given."""

    def set_context(self, context: NDArray) -> None:
        if context.shape[1] != 3:
            super().set_context(context)


class WrongMeasures(Honest):
    mood = 0

    def __init__(self, lanes: range) -> None:
        super().__init__(lanes)
        WrongMeasures.mood += 1

    def spoilt(self, step: Step) -> Step:
        return dataclasses.replace(step, measures=step.measures + np.float32(self.mood))


@pytest.mark.parametrize("kind", [Honest, Told])
def test_check_env_accepts_an_honest_env(kind: Callable[[range], Env]) -> None:
    check_env(kind, steps=20)


@pytest.mark.parametrize(
    ("cheat", "text"),
    [
        (WrongWidth, "next_obs is float32 (3, 1), its spec says float32 (3, 2)"),
        (WrongStart, "autoreset is float32 (3, 1), its spec says float32 (3, 2)"),
        (DoubleReward, "reward is float64 (3,), its spec says float32 (3,)"),
        (ResetAsSuccessor, "at an end, next_obs is the next episode's first observation"),
        (NoStart, "at an end, next_obs is the next episode's first observation"),
        (StaleSuccessor, "within an episode, next_obs is not what is acted on next"),
        (BeginsAlways, "within an episode, next_obs is not what is acted on next"),
        (OneBuffer, "autoreset changes ['next_obs'] of the step before it"),
        (Failing, "failed with ['lane 1 of it is nan']"),
        (Gap, "a row is not valid although no episode had just ended"),
        (EndInGap, "a row that is not valid ends an episode"),
        (Moody, "'reward' is not the same for a second instance"),
        (WrongMeasures, "'measures' is not the same for a second instance"),
        (Sociable, "'reward' is not the same for the same lane without its neighbours"),
        (FirstSeedOnly, "episode 1 of lane 2 does not begin as its seed says"),
        (NeverEnds, "no episode ended in 20 steps"),
        (Unclipped, "actions outside [-1, 1] are not clipped"),
        (CloseOnce, "closed twice"),
        (Deaf, "shows the contexts [["),
        (Restless, "shows the contexts [["),
        (Welcoming, "takes contexts of 3 numbers, its spec says 2"),
    ],
)
def test_check_env_sees_a_cheat(cheat: Callable[[range], Env], text: str) -> None:
    with pytest.raises(AssertionError) as caught:
        check_env(cheat, steps=20)
    assert text in str(caught.value)


def test_check_env_accepts_rows_that_only_reset() -> None:
    class NextStep(Honest):
        """Autoreset one row late, as Gymnasium's NEXT_STEP has it."""

        def __init__(self, lanes: range) -> None:
            self.lanes, self.world = lanes, GymConfig("freewheel.testing.worlds:Counter", {"length": 4})
            self.parts = [self.world.make(range(lane, lane + 1)) for lane in lanes]
            self.env = self.parts[0]
            self.held: list[NDArray | None] = [None] * len(lanes)

        @property
        def spec(self) -> EnvSpec:
            return dataclasses.replace(self.env.spec, lanes=len(self.lanes))

        def reset(self, seeds: Sequence[SeedStream]) -> NDArray:
            self.held = [None] * len(self.lanes)
            return np.concatenate([part.reset([own]) for part, own in zip(self.parts, seeds, strict=True)])

        def step(self, action: NDArray) -> Step:
            rows = [self.row(lane, action[lane : lane + 1]) for lane in range(len(self.lanes))]
            reward, terminated, truncated, self.seen, valid, none = map(np.concatenate, zip(*rows, strict=True))
            return Step(reward, terminated, truncated, self.seen, valid, none)

        def row(self, lane: int, action: NDArray) -> tuple[NDArray, ...]:
            first, self.held[lane] = self.held[lane], None
            no, none = np.zeros(1, np.bool_), np.zeros((1, 0), np.float32)
            if first is not None:
                return np.zeros(1, np.float32), no, no, first, no, none
            step = self.parts[lane].step(action)
            if step.terminated[0]:
                self.held[lane] = self.parts[lane].autoreset().copy()
            return step.reward, step.terminated, step.truncated, step.next_obs, ~no, none

        def autoreset(self) -> NDArray:
            return self.seen

    check_env(NextStep, steps=20)
