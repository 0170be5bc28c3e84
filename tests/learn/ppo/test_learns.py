"""PPO learns in a world that shows the right action, with every kind of gradient and network."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from freewheel.collect.quota import Quota
from freewheel.collect.serial import SerialCollector
from freewheel.core import ActionSpec, BatchSpec, Env, EnvSpec, NDArray, SeedStream, Slice, Step
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.ppo.learner import PPO
from freewheel.learn.spec import LearnerSpec
from freewheel.loop import loop
from freewheel.metrics.meter import Meter
from freewheel.policies.numpy_actor import make_actor
from freewheel.policies.spec import PolicyConfig
from freewheel.rollout.factory import RunnerFactory
from freewheel.rollout.runner import Runner
from freewheel.seeding import evaluation_episodes
from tests.support.places import SUPPORT

Kind = Literal["discrete", "bytes", "box"]
CHOICES, LANES, STEPS = 4, 8, 32


class IdentityWorld(Env):
    """Shows one of four faces; the action that names it gets 1. With a box, the first column has to be near -0.5 or 0.5,
    depending on the face; with a mask, one wrong choice is forbidden; with bytes, a face is a 255. Episodes last one step,
    every other lane's is truncated."""

    def __init__(self, lanes: int, kind: Kind) -> None:
        self.discrete = kind != "box"
        self.bright = 255 if kind == "bytes" else 1
        slices = [Slice("face", 0, CHOICES, (CHOICES,))]
        slices += [Slice("action_mask", CHOICES, 2 * CHOICES, (CHOICES,))] if self.discrete else []
        action = ActionSpec("discrete", CHOICES) if self.discrete else ActionSpec("box", 2, (-1.0,) * 2, (1.0,) * 2)
        dtype: Literal["uint8", "float32"] = "uint8" if kind == "bytes" else "float32"
        self._spec = EnvSpec("Identity-v0", lanes, slices[-1].stop, dtype, tuple(slices), action)
        self.forbidden = 0

    @property
    def spec(self) -> EnvSpec:
        return self._spec

    def reset(self, seeds: Sequence[SeedStream]) -> NDArray:
        self._rng = np.random.default_rng(seeds[0].seed(0))
        return self._show()

    def _show(self) -> NDArray:
        lanes = np.arange(self.spec.lanes)
        self._face = self._rng.integers(CHOICES, size=len(lanes))
        obs = np.zeros((len(lanes), self.spec.obs_size), self.spec.obs_dtype)
        obs[lanes, self._face] = self.bright
        if self.discrete:
            obs[:, CHOICES:] = 1
            obs[lanes, CHOICES + (self._face + 1) % CHOICES] = 0
        return obs

    def step(self, action: NDArray) -> Step:
        lanes = self.spec.lanes
        if self.discrete:
            self.forbidden += int((action == (self._face + 1) % CHOICES).sum())
            reward = (action == self._face).astype(np.float32)
        else:
            reward = 1 - np.abs(action[:, 0] - np.where(self._face < 2, -0.5, 0.5)).astype(np.float32)
        even = np.arange(lanes) % 2 == 0
        nothing = np.zeros((lanes, self.spec.obs_size), self.spec.obs_dtype)
        return Step(reward, even, ~even, nothing, np.ones(lanes, np.bool_), np.zeros((lanes, 0)))

    def set_context(self, context: NDArray) -> None:
        self.spec.check_context(context)

    def autoreset(self) -> NDArray:
        return self._show()

    def render(self) -> None:
        return None

    def close(self) -> None: ...


def score(learner: PPO, recipe: RunnerFactory) -> float:
    """Mean greedy reward of 400 lanes."""
    env, actor, rng = recipe.make(range(400)), recipe.actor(), np.random.default_rng(0)
    actor.load(learner.snapshot())
    obs = env.reset([evaluation_episodes(0, 0, 1)])
    return float(env.step(actor.act(obs, rng, greedy=True).action).reward.mean())


def train(kind: Kind, policy: PolicyConfig, config: PPOConfig, updates: int) -> tuple[float, float]:
    """Greedy reward before and after."""
    worlds: list[IdentityWorld] = []

    def make(lanes: range, *, processes: bool = False, fault_tolerant: bool = False) -> IdentityWorld:
        worlds.append(IdentityWorld(len(lanes), kind))
        return worlds[-1]

    spec = policy.resolve(IdentityWorld(LANES, kind).spec)
    recipe = RunnerFactory(make, make_actor(spec), seed=3)
    learner = PPO(config, LearnerSpec(policy=spec, batch=BatchSpec(STEPS, LANES), seed=3))
    before = score(learner, recipe)
    with SerialCollector(Runner(recipe, range(LANES)), Quota(STEPS, LANES)) as turns:
        for tick in itertools.islice(loop(turns, learner, Meter(workers=1)), updates):
            assert tick.metrics is not None
            assert tick.metrics["lag_max"] == 0
    assert sum(world.forbidden for world in worlds) == 0
    return before, score(learner, recipe)


CONFIG = PPOConfig(lr=1e-2, minibatch=64, gamma=0.5)
SMALL = PolicyConfig(hidden=(32,), log_std=-0.7)
ALL_SET = replace(CONFIG, entropy=0.01, target_kl=0.05, reward_scale="returns", lr_schedule="linear")
IN_NUMPY, IN_TORCH = replace(CONFIG, gradient="analytic"), replace(CONFIG, gradient="autograd")
CASES: dict[str, tuple[Kind, PolicyConfig, PPOConfig]] = {
    "discrete": ("discrete", SMALL, IN_NUMPY),
    "discrete, torch": ("discrete", SMALL, IN_TORCH),
    "bytes": ("bytes", SMALL, IN_NUMPY),
    "bytes, torch": ("bytes", SMALL, IN_TORCH),
    "box": ("box", SMALL, IN_NUMPY),
    "box, torch": ("box", SMALL, IN_TORCH),
    "squashed": ("box", replace(SMALL, head="squashed"), CONFIG),
    "all options": ("discrete", replace(SMALL, normalize_obs=True, activation="silu"), ALL_SET),
    "a user's module": ("discrete", PolicyConfig(module="custom_module:Shared"), CONFIG),
}


@pytest.mark.parametrize("case", CASES)
def test_the_identity_is_learned(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SUPPORT)
    before, after = train(*CASES[case], updates=6)
    assert before < 0.6
    assert after > (0.9 if CASES[case][0] == "box" else 0.95)
