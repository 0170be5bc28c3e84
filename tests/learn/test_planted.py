"""End to end over a world full of traps: what free-running collection puts into a replay buffer is what happened, row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from freewheel.collect.continuous import ContinuousConfig
from freewheel.core import Clock, Learner, NDArray, host
from freewheel.learn.fitting import Question
from freewheel.learn.mbpo import MBPO
from freewheel.learn.sac import SAC
from freewheel.learn.settings import Assignment, InTurn, MBPOConfig, SACConfig
from freewheel.loop import loop
from freewheel.meter import Meter
from freewheel.rollout.job import Job
from tests.envs.isaac_like import Traps
from tests.envs.planted import Stage, retold

LANES, STEPS, FRAGMENT, ENOUGH = 4, 6, 3, 480
#: Buffers are overwritten, final observations of earlier steps stay about, lanes begin anew by themselves.
TRAPS = Traps(bounds=(-1.0, 1.0))
SMALL = SACConfig(learning_starts=48, batch=16, updates_per_row=0.2, buffer=4096)
MODEL = MBPOConfig(
    learning_starts=48, batch=16, updates_per_row=0.2, buffer=4096, members=2, elites=1, model_hidden=(8,), model_batch=16,
    model_every=48, max_epochs=1, rollouts_per_row=1.0,
)  # fmt: skip


def staged(*, finals: bool, views: bool) -> Stage:
    return Stage(replace(TRAPS, finals=finals, views=views), LANES, head="squashed")


def task_of(stage: Stage) -> Assignment:
    return Assignment(stage.policy, LANES * STEPS, LANES, 1, None, tensors=True, finals=stage.spec.finals, algo="sac")


def learned(stage: Stage, learner: Learner, workers: int) -> None:
    """Run free until there is enough."""
    mode = ContinuousConfig(workers=workers, num_envs=LANES, collection_batch_size=FRAGMENT, max_lag=1)
    job = Job(stage.spec, STEPS, on_policy=False)
    with mode.build(stage.recipe, job) as collector:
        for tick in loop(collector, learner, Meter(1, stage.spec.measures)):
            if tick.env_steps >= ENOUGH and learner.rows().queued == 0:
                break
    assert learner.rows().trained >= ENOUGH
    assert learner.version > 10


def by_lane(rows: NDArray, workers: int) -> NDArray:
    """Packed rows as they arrived -> [T, B, W]."""
    parts = rows.reshape(-1, workers, FRAGMENT, LANES // workers, rows.shape[-1])
    return parts.transpose(0, 2, 1, 3, 4).reshape(-1, LANES, rows.shape[-1])


def assert_true(rows: NDArray, workers: int, *, finals: bool) -> None:
    """Every stored row is the one that the world's law makes of the actions."""
    told = by_lane(rows, workers)
    obs, action, told_scalars, next_obs = np.split(told, np.cumsum([5, 1, 3]), axis=-1)
    reward, terminated, known = np.moveaxis(told_scalars, -1, 0)
    wanted = retold(action, finals=finals).data
    over = wanted.terminated | wanted.truncated
    np.testing.assert_array_equal(obs, wanted.obs)
    np.testing.assert_array_equal(reward, wanted.reward)
    np.testing.assert_array_equal(terminated, wanted.terminated)
    np.testing.assert_array_equal(next_obs, wanted.next_obs)
    np.testing.assert_array_equal(known, np.ones_like(over) if finals else ~over)
    assert terminated.any()
    assert (over & ~wanted.terminated).any()
    np.testing.assert_array_equal(obs[..., 4], next_obs[..., 4])  # no row joins two episodes
    assert len(np.unique(action)) > 0.9 * action.size
    assert np.abs(action).max() < 1


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
@pytest.mark.parametrize("finals", [True, False], ids=["finals", "hidden"])
def test_a_replay_buffer_holds_what_happened(finals: bool, views: bool, workers: int) -> None:
    stage = staged(finals=finals, views=views)
    learner = SAC(SMALL, task_of(stage))
    learned(stage, learner, workers)
    stored = host(learner.replay.newest(learner.replay.count))
    assert len(stored) == learner.rows().trained
    assert_true(stored, workers, finals=finals)
    assert stage.closed == [1]


@dataclass
class Listening:
    """Clocks that remember every question."""

    asked: list[Question] = field(default_factory=list)

    def __call__(self, build: Callable[[], Callable[[Any], Any]], what: str) -> Clock:
        def listen() -> Callable[[Any], Any]:
            answerer = build()

            def answer(question: Question) -> Any:
                self.asked.append(Question(host(question.rows).copy()))
                return answerer(question)

            return answer

        return InTurn(listen, what)


@pytest.mark.parametrize("finals", [True, False], ids=["finals", "hidden"])
def test_a_model_is_asked_about_what_happened(finals: bool) -> None:
    """Each row once and in order; where the world hides how episodes end, their last rows say so."""
    stage, clocks = staged(finals=finals, views=True), Listening()
    learner = MBPO(MODEL, replace(task_of(stage), algo="mbpo", clocks=clocks))
    learned(stage, learner, 1)
    assert len(clocks.asked) > 3
    asked = np.concatenate([host(question.rows) for question in clocks.asked])
    assert_true(asked, 1, finals=finals)
    stored = host(learner.sac.replay.newest(learner.sac.replay.count))
    assert_true(stored, 1, finals=finals)
    np.testing.assert_array_equal(stored[: len(asked)], asked)
    imagined = host(learner.imagined.newest(learner.imagined.count))
    assert (learner.sac.replay.columns.split(learner.imagined.newest(len(imagined))).known == 1).all()
