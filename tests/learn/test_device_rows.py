"""End to end over a world full of traps: what free-running collection puts into a replay buffer is what happened, row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from freewheel.collect.continuous import ContinuousConfig
from freewheel.core import BatchSpec, Executor, Learner, NDArray, to_numpy
from freewheel.learn.mbpo.config import MBPOConfig
from freewheel.learn.mbpo.learner import MBPO
from freewheel.learn.sac.config import SACConfig
from freewheel.learn.sac.learner import SAC
from freewheel.learn.spec import LearnerSpec, Services, WorldFacts
from freewheel.loop import loop
from freewheel.metrics.meter import Meter
from freewheel.rollout.factory import CollectSpec
from freewheel.transport.executors import SerialExecutor
from tests.support.device_story import DeviceSetup, expected_rows
from tests.support.isaac_like import Traps

LANES, STEPS, FRAGMENT, ENOUGH = 4, 6, 3, 480
#: Buffers are overwritten, final observations of earlier steps stay about, lanes reset by themselves.
TRAPS = Traps(bounds=(-1.0, 1.0))
SMALL = SACConfig(learning_starts=48, batch=16, updates_per_row=0.2, buffer=4096)
MODEL = MBPOConfig(
    learning_starts=48, batch=16, updates_per_row=0.2, buffer=4096, members=2, elites=1, model_hidden=(8,), model_batch=16,
    model_every=48, max_epochs=1, rollouts_per_row=1.0,
)  # fmt: skip


def staged(*, has_final_obs: bool, views: bool) -> DeviceSetup:
    return DeviceSetup(replace(TRAPS, has_final_obs=has_final_obs, views=views), LANES, head="squashed")


def task_of(stage: DeviceSetup) -> LearnerSpec:
    world = WorldFacts(batched_on_device=True, has_final_obs=stage.spec.has_final_obs)
    return LearnerSpec(policy=stage.policy, batch=BatchSpec(STEPS, LANES), seed=1, world=world)


def learned(stage: DeviceSetup, learner: Learner, workers: int) -> None:
    """Run free until there is enough."""
    mode = ContinuousConfig(workers=workers, num_envs=LANES, collection_batch_size=FRAGMENT, max_lag=1)
    job = CollectSpec(env=stage.spec, batch=BatchSpec(STEPS, stage.spec.lanes), on_policy=False)
    with mode.build(stage.factory, job) as collector:
        for tick in loop(collector, learner, Meter(1, stage.spec.measures)):
            if tick.env_steps >= ENOUGH and learner.rows().queued == 0:
                break
    assert learner.rows().trained >= ENOUGH
    assert learner.version > 10


def by_lane(rows: NDArray, workers: int) -> NDArray:
    """Packed rows as they arrived -> [T, B, W]."""
    parts = rows.reshape(-1, workers, FRAGMENT, LANES // workers, rows.shape[-1])
    return parts.transpose(0, 2, 1, 3, 4).reshape(-1, LANES, rows.shape[-1])


def assert_true(rows: NDArray, workers: int, *, has_final_obs: bool) -> None:
    """Every stored row is the one that the world makes of the actions."""
    obs, action, told_scalars, next_obs = np.split(by_lane(rows, workers), np.cumsum([5, 1, 3]), axis=-1)
    reward, terminated, known = np.moveaxis(told_scalars, -1, 0)
    wanted = expected_rows(action, has_final_obs=has_final_obs).data
    over = wanted.terminated | wanted.truncated
    np.testing.assert_array_equal(obs, wanted.obs)
    np.testing.assert_array_equal(reward, wanted.reward)
    np.testing.assert_array_equal(terminated, wanted.terminated)
    np.testing.assert_array_equal(next_obs, wanted.next_obs)
    np.testing.assert_array_equal(known, np.ones_like(over) if has_final_obs else ~over)
    assert terminated.any()
    assert (over & ~wanted.terminated).any()
    np.testing.assert_array_equal(obs[..., 4], next_obs[..., 4])  # no row joins two episodes
    assert len(np.unique(action)) > 0.9 * action.size
    assert np.abs(action).max() < 1


@pytest.mark.parametrize(
    ("has_final_obs", "views", "workers"), [(True, True, 1), (True, False, 2), (False, True, 2), (False, False, 1)]
)
def test_a_replay_buffer_holds_what_happened(has_final_obs: bool, views: bool, workers: int) -> None:
    stage = staged(has_final_obs=has_final_obs, views=views)
    learner = SAC(SMALL, task_of(stage))
    learned(stage, learner, workers)
    stored = to_numpy(learner.replay.newest(learner.replay.count))
    assert len(stored) == learner.rows().trained
    assert_true(stored, workers, has_final_obs=has_final_obs)
    assert stage.closed == [1]


@dataclass
class Listening:
    """MakeExecutor that remember every request."""

    asked: list[NDArray] = field(default_factory=list)

    def __call__(self, build: Callable[[], Callable[[Any], Any]], what: str) -> Executor:
        def listen() -> Callable[[Any], Any]:
            answerer = build()

            def answer(rows: NDArray) -> Any:
                self.asked.append(to_numpy(rows).copy())
                return answerer(rows)

            return answer

        return SerialExecutor(listen, what)


@pytest.mark.parametrize("has_final_obs", [True, False], ids=["has_final_obs", "hidden"])
def test_a_model_is_asked_about_what_happened(has_final_obs: bool) -> None:
    """Each row once and in order; where the world hides how episodes end, their last rows say so."""
    stage, executors = staged(has_final_obs=has_final_obs, views=True), Listening()
    learner = MBPO(MODEL, replace(task_of(stage), services=Services(executors=executors)))
    learned(stage, learner, 1)
    assert len(executors.asked) > 3
    asked = np.concatenate(executors.asked)
    assert_true(asked, 1, has_final_obs=has_final_obs)
    stored = to_numpy(learner.replay.newest(learner.replay.count))
    assert_true(stored, 1, has_final_obs=has_final_obs)
    np.testing.assert_array_equal(stored[: len(asked)], asked)
    model_rows = to_numpy(learner.model_buffer.newest(learner.model_buffer.count))
    assert (learner.replay.columns.split(learner.model_buffer.newest(len(model_rows))).has_successor == 1).all()
