"""The conformance kits accept what is correct (our environments, numpy Runner and PPO) and see every rule that is broken."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast
from unittest.mock import Mock

import numpy as np
import pytest

from freewheel.core import Array, BatchSpec, Chunk, Env, EnvSpec, Failure, Learner, NDArray, SeedStream, Snapshot, Step
from freewheel.envs.gym import GymConfig
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.ppo.learner import PPO
from freewheel.learn.spec import LearnerSpec
from freewheel.policies.numpy_actor import make_actor
from freewheel.policies.spec import PolicyConfig, PolicySpec
from freewheel.rollout.factory import RunnerFactory
from freewheel.rollout.runner import Runner
from freewheel.testing.conformance import check_env, check_learner, check_runner


class Honest(Env):
    """A correct Env; each subclass breaks one rule."""

    world = GymConfig("tests.support.worlds:IdentityBox", {"length": 5}, measures=("count",))

    def __init__(self, lanes: range) -> None:
        self.lanes = lanes
        self.env: Env = self.world.make(lanes)

    @property
    def spec(self) -> EnvSpec:
        return self.env.spec

    def reset(self, seeds: Sequence[SeedStream]) -> NDArray:
        return self.env.reset(seeds)

    def step(self, action: NDArray) -> Step:
        return self.changed(self.env.step(action))

    def changed(self, step: Step) -> Step:
        return step

    def set_context(self, context: NDArray) -> None:
        self.env.set_context(context)

    def autoreset(self) -> NDArray:
        return self.env.autoreset()

    def render(self) -> None: ...

    def close(self) -> None:
        self.env.close()


def spoilt(**fields: Callable[[Step], Any]) -> type[Honest]:
    """An Env whose Steps have these values instead."""

    class Spoilt(Honest):
        def changed(self, step: Step) -> Step:
            return replace(step, **{name: change(step) for name, change in fields.items()})

    return Spoilt


def over(step: Step) -> NDArray:
    return np.asarray(step.terminated | step.truncated)


WrongWidth = spoilt(next_obs=lambda step: step.next_obs[:, :1])
DoubleReward = spoilt(reward=lambda step: step.reward.astype(np.float64))
Failing = spoilt(failures=lambda step: (Failure(1, "nan", "lane 1 of it is nan"),))
Gap = spoilt(valid=over, reward=lambda step: np.where(over(step), step.reward, np.float32(0)))
EndInGap = spoilt(valid=lambda step: ~over(step))


class WrongStart(Honest):
    def autoreset(self) -> NDArray:
        return super().autoreset()[:, :1]


class ResetAsSuccessor(Honest):
    def changed(self, step: Step) -> Step:
        return replace(step, next_obs=self.env.autoreset())


class NoStart(Honest):
    """Ended lanes go on from where they ended."""

    def changed(self, step: Step) -> Step:
        self.last = step.next_obs.copy()
        return step

    def autoreset(self) -> NDArray:
        super().autoreset()
        return self.last


class BeginsAlways(Honest):
    """Shows the first observation again, whether an episode ended or not."""

    def reset(self, seeds: Sequence[SeedStream]) -> NDArray:
        self.first = super().reset(seeds).copy()
        return self.first

    def autoreset(self) -> NDArray:
        super().autoreset()
        return self.first


class OneBuffer(Honest):
    """The observations of a Step become those of autoreset."""

    def changed(self, step: Step) -> Step:
        self.shown = step.next_obs
        return step

    def autoreset(self) -> NDArray:
        np.copyto(self.shown, super().autoreset())
        return self.shown


class StaleSuccessor(Honest):
    last: NDArray | None = None

    def changed(self, step: Step) -> Step:
        last, self.last = self.last, step.next_obs.copy()
        return step if last is None else replace(step, next_obs=last)


class Moody(Honest):
    """Every instance has other rewards."""

    instances = itertools.count(1)
    field = "reward"

    def __init__(self, lanes: range) -> None:
        super().__init__(lanes)
        self.mood = np.float32(next(self.instances))

    def changed(self, step: Step) -> Step:
        return replace(step, **{self.field: getattr(step, self.field) + self.mood})


class WrongMeasures(Moody):
    field = "measures"


class Sociable(Honest):
    """A lane's reward depends on the number of lanes."""

    def changed(self, step: Step) -> Step:
        return replace(step, reward=step.reward + np.float32(len(self.lanes)))


class FirstSeedOnly(Honest):
    """Every episode of a lane has the seed of its first."""

    def reset(self, seeds: Sequence[SeedStream]) -> NDArray:
        first = [stream.seed(0) for stream in seeds]
        return super().reset([Mock(seed=lambda k, own=own: own, number=lambda k: k) for own in first])


class NeverEnds(Honest):
    world = replace(Honest.world, args={"length": 10_000})


class Unclipped(Honest):
    def step(self, action: NDArray) -> Step:
        step = super().step(action)
        return replace(step, reward=step.reward + np.abs(action).sum(1))


class CloseOnce(Honest):
    closed = False

    def close(self) -> None:
        super().close()
        if self.closed:
            raise AssertionError("closed twice")
        self.closed = True


class WithContext(Honest):
    world = GymConfig("tests.support.worlds:Conditioned", {"length": 4})


class Deaf(WithContext):
    """Keeps the first table."""

    heard = False

    def set_context(self, context: NDArray) -> None:
        if not self.heard:
            super().set_context(context)
        self.heard |= bool(context.size)


class Restless(WithContext):
    """The context changes in the middle of an episode."""

    def changed(self, step: Step) -> Step:
        step.next_obs[:, 1:] += step.next_obs[:, :1] == 2
        return step


class Welcoming(WithContext):
    """Accepts a table of any width."""

    def set_context(self, context: NDArray) -> None:
        if context.shape[1] != 3:
            super().set_context(context)


@pytest.mark.parametrize("kind", [Honest, WithContext])
def test_check_env_accepts_an_honest_env(kind: Callable[[range], Env]) -> None:
    check_env(kind, steps=20)


@pytest.mark.parametrize(
    ("broken", "text"),
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
def test_check_env_sees_a_broken_rule(broken: Callable[[range], Env], text: str) -> None:
    with pytest.raises(AssertionError) as caught:
        check_env(broken, steps=20)
    assert text in str(caught.value)


def test_check_env_accepts_rows_that_only_reset() -> None:
    class NextStep(Honest):
        """Autoreset in a row of its own, as in Gymnasium's NEXT_STEP mode."""

        def __init__(self, lanes: range) -> None:
            self.lanes, self.world = lanes, GymConfig("tests.support.worlds:Counter", {"length": 4})
            self.parts = [self.world.make(range(lane, lane + 1)) for lane in lanes]
            self.env = self.parts[0]
            self.held: list[NDArray | None] = [None] * len(lanes)

        @property
        def spec(self) -> EnvSpec:
            return replace(self.env.spec, lanes=len(self.lanes))

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


LANES = range(3)


def recipe(world: str, *, normalize: bool = False) -> tuple[RunnerFactory, PolicySpec]:
    config = GymConfig(id=f"tests.support.worlds:{world}")
    env = config.make(LANES)
    env.close()
    policy = PolicyConfig(hidden=(8,), normalize_obs=normalize).resolve(env.spec)
    return RunnerFactory(config.make, make_actor(policy), seed=5), policy


def learner(policy: PolicySpec, kind: type[PPO] = PPO, **options: object) -> PPO:
    config = replace(PPOConfig(epochs=2, minibatch=16), **options)  # type: ignore[arg-type]
    return kind(config, LearnerSpec(policy=policy, batch=BatchSpec(42 // len(LANES), len(LANES)), seed=1))


def check_runner_of(world: str, kind: type[Runner]) -> None:
    made, policy = recipe(world)
    check_runner(lambda: kind(made, LANES), replace(learner(policy).snapshot(), version=4))


@pytest.mark.parametrize("world", ["Drifting", "IdentityBox", "MutatesBuffer"])
def test_the_numpy_runner_conforms(world: str) -> None:
    check_runner_of(world, Runner)


class Forgetful(Runner):
    """Signs with the previous version."""

    def unroll(self, steps: int) -> Chunk:
        chunk = super().unroll(steps)
        return replace(chunk, version=chunk.version - 1)


class Leaping(Runner):
    """Loses a row between two chunks."""

    def unroll(self, steps: int) -> Chunk:
        chunk = super().unroll(steps + 1)
        fields = {name: getattr(chunk.data, name)[:-1] for name in chunk.data.__slots__}
        self.produced -= len(LANES)
        return replace(chunk, data=replace(chunk.data, **fields), rows=chunk.rows - len(LANES))


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [(Forgetful, "not signed with the version"), (Leaping, "does not follow from the row before")],
)
def test_a_runner_that_does_not_conform_is_caught(kind: type[Runner], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_runner_of("Drifting", kind)


def acting(made: RunnerFactory) -> Callable[[Snapshot], Chunk]:
    """Collects chunks of 21 rows, two of which fill a batch, with the weights it is given."""
    runner = Runner(made, LANES)

    def collect(snapshot: Snapshot) -> Chunk:
        runner.load(snapshot)
        return runner.unroll(7)

    return collect


@pytest.mark.parametrize(
    ("world", "gradient", "scaled"),
    [("Drifting", "analytic", True), ("IdentityBox", "autograd", True), ("IdentityBox", "analytic", False)],
)
def test_ppo_conforms(world: str, gradient: Literal["analytic", "autograd"], scaled: bool) -> None:
    made, policy = recipe(world, normalize=scaled)
    scale = "returns" if scaled else "none"
    check_learner(lambda: learner(policy, gradient=gradient, reward_scale=scale), acting(made))


class Amnesiac(PPO):
    """Restores everything but its optimiser."""

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        super().load_state_dict({**state, "adam.square": np.ones_like(np.asarray(state["adam.square"]))})


class Doubling(PPO):
    def observe(self, chunk: Chunk) -> None:
        super().observe(chunk)
        super().observe(chunk)


@pytest.mark.parametrize(("kind", "complaint"), [(Amnesiac, "behaves differently"), (Doubling, "does not account for")])
def test_a_learner_that_does_not_conform_is_caught(kind: type[PPO], complaint: str) -> None:
    made, policy = recipe("Drifting")
    with pytest.raises(AssertionError, match=complaint):
        check_learner(lambda: learner(policy, kind), acting(made))


class Borrowed:
    """A learner that derives from nothing of ours, and has only what every learner must have."""

    def __init__(self, own: PPO) -> None:
        self._own, self.observe, self.snapshot, self.rows = own, own.observe, own.snapshot, own.rows
        self.update, self.state_dict, self.load_state_dict = own.update, own.state_dict, own.load_state_dict

    version = property(lambda self: self._own.version)
    ready = property(lambda self: self._own.ready)
    hungry = property(lambda self: self._own.hungry)
    buffer_util = property(lambda self: self._own.buffer_util)


def test_a_learner_need_not_derive_from_the_base() -> None:
    made, policy = recipe("Drifting")
    check_learner(lambda: cast(Learner, Borrowed(learner(policy))), acting(made))
