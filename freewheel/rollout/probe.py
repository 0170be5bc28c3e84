"""Trying an environment before training: random actions, and the time of a step."""

from __future__ import annotations

import os
from time import perf_counter, process_time
from typing import NamedTuple

import numpy as np

from freewheel.core import Env, EnvSpec, NDArray
from freewheel.seeding import generator, training_episodes


def random_actions(spec: EnvSpec, obs: NDArray, rng: np.random.Generator) -> NDArray:
    """An allowed action for every lane, uniform over the choices or over [-1, 1] in each column."""
    if spec.action.kind == "box":
        return rng.uniform(-1, 1, (spec.lanes, spec.action.size)).astype(np.float32)
    scores = rng.random((spec.lanes, spec.action.size))
    if mask := spec.slice("action_mask"):
        scores *= obs[:, mask.start : mask.stop] > 0
    return np.asarray(scores.argmax(axis=1))


class StepCost(NamedTuple):
    """Seconds of a step of one lane, resets included."""

    wall: float
    cpu: float  # of this process: less than `wall` where the environment sleeps or waits


def step_cost(env: Env, seed: int, *, steps: int = 50, limit: float = 0.3) -> StepCost:
    """The mean over `steps` random steps, or over as many as fit in `limit` seconds."""
    rng = generator(seed, "probe")
    obs = env.reset([training_episodes(seed, lane) for lane in range(env.spec.lanes)])
    env.step(random_actions(env.spec, obs, rng))  # warm-up
    taken, wall, began, cpu_began = 0, 0.0, perf_counter(), process_time()
    while taken < steps and wall < limit:
        env.step(random_actions(env.spec, env.autoreset(), rng))
        taken, wall = taken + 1, perf_counter() - began
    rows = taken * env.spec.lanes
    return StepCost(wall / rows, (process_time() - cpu_began) / rows)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
