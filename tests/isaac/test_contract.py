"""DeviceEnv over the real Isaac Lab: rows are true although it reuses buffers, hides ends and leaves stale final observations."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.core import NDArray
from freewheel.envs.device import DeviceEnv
from freewheel.errors import SetupError
from freewheel.seeding import training_episodes
from tests.isaac.conftest import HOVER, LANES

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600), pytest.mark.long]

STEPS, EPISODE, DT = 200, 60, 1 / 60
GRAVITY = 9.81
SEEDS = [training_episodes(3, lane) for lane in range(LANES)]
HEIGHT, CLIMB = 2, 8  # columns: height over the goal, velocity upwards
ODD = np.arange(LANES) % 2 == 1


def odd_lanes_climb() -> Tensor:
    """[B, A]: even lanes hover at zero thrust above their weight, odd ones go up until they are lost."""
    action = torch.zeros(LANES, 4)
    action[1::2, 0] = 1.0
    return action


@dataclass
class Story:
    """Rows [T, B, ...]."""

    obs: NDArray
    reward: NDArray
    terminated: NDArray
    truncated: NDArray
    next_obs: NDArray

    @property
    def over(self) -> NDArray:
        both: NDArray = self.terminated | self.truncated
        return both


class Spied:
    """A world whose answers are kept as they are, by one who copies nothing."""

    def __init__(self, world: Any) -> None:
        self._world, self.terminated, self.has_final = world, list[Tensor](), list[bool]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    def step(self, action: Tensor) -> Any:
        answer = self._world.step(action)
        self.terminated.append(answer[2])
        self.has_final.append("final_obs" in answer[4])
        return answer


def played(env: DeviceEnv) -> Story:
    obs, rows = env.reset(SEEDS).clone(), []
    for _ in range(STEPS):
        step = env.step(odd_lanes_climb())
        assert step.valid.all()
        values = (obs, step.reward, step.terminated, step.truncated, step.next_obs)
        rows.append([value.numpy().copy() for value in values])
        obs = env.autoreset().clone()
    return Story(*(np.stack(column) for column in zip(*rows, strict=True)))


def test_every_row_obeys_physics_ends_are_where_they_belong_and_a_final_is_no_first(hover: DeviceEnv) -> None:
    story = played(hover)
    thrust = np.where(ODD, 0.5 * GRAVITY, 0.0)
    np.testing.assert_allclose(
        story.next_obs[..., CLIMB] - story.obs[..., CLIMB], thrust * DT + np.zeros_like(story.reward), atol=2e-3
    )
    mean_climb = (story.obs[..., CLIMB] + story.next_obs[..., CLIMB]) / 2
    np.testing.assert_allclose(story.next_obs[..., HEIGHT], story.obs[..., HEIGHT] + mean_climb * DT, atol=2e-3)
    np.testing.assert_allclose(story.reward, np.exp(-4 * np.linalg.norm(story.next_obs[..., :3], axis=-1)), rtol=1e-4)
    lost = np.abs(story.next_obs[..., HEIGHT]) > 0.5
    np.testing.assert_array_equal(story.terminated, lost)
    assert not (story.terminated & story.truncated).any()
    assert (story.terminated.sum(0)[ODD] >= STEPS // EPISODE).all()
    clock = np.arange(1, STEPS + 1) % EPISODE == 0
    np.testing.assert_array_equal(story.truncated[:, ~ODD], np.tile(clock[:, None], (1, LANES // 2)))
    going = ~story.over[:-1]
    np.testing.assert_array_equal(story.next_obs[:-1][going], story.obs[1:][going])
    ended = story.over[:-1]
    assert (story.next_obs[:-1][ended] != story.obs[1:][ended]).any(-1).all()


def test_the_real_world_sets_the_traps_that_we_step_around(hover: DeviceEnv) -> None:
    """Flags are the same memory at every step, and a final observation stays in extras when no episode has ended."""
    hover._simulator = world = Spied(hover._simulator)
    story = played(hover)
    assert len({flags.data_ptr() for flags in world.terminated}) == 1
    assert (np.stack([flags.numpy() for flags in world.terminated]) != story.terminated).any()
    assert (np.array(world.has_final) & ~story.over.any(1)).any()


def test_the_same_seed_gives_the_same_rows_in_a_new_simulation(hover: DeviceEnv) -> None:
    once = played(hover)
    first = hover.reset(SEEDS).clone()
    assert torch.equal(first, hover.reset(SEEDS))
    np.testing.assert_array_equal(once.obs[0], first.numpy())
    hover.close()
    with closing(HOVER.make(range(LANES))) as anew:
        again = played(anew)
    np.testing.assert_array_equal(once.obs[0], again.obs[0])
    np.testing.assert_allclose(once.next_obs, again.next_obs, atol=1e-4)
    np.testing.assert_array_equal(once.over, again.over)


def test_spec_of_a_real_task_and_a_graph_or_float64_in_an_action_does_no_harm(hover: DeviceEnv) -> None:
    """Isaac Lab itself fails for good once such an action has reached it."""
    spec = hover.spec
    assert (spec.lanes, spec.obs_size, spec.device) == (LANES, 12, "cpu")
    assert [part.name for part in spec.slices] == ["policy"]
    assert (spec.action.low, spec.action.high) == ((-1.0,) * 4, (1.0,) * 4)
    assert (spec.one_per_process, spec.batched_on_device, spec.has_final_obs) == (True, True, True)
    assert not hover.capturable
    hover.reset(SEEDS)
    for action in (odd_lanes_climb().requires_grad_(), odd_lanes_climb().double(), odd_lanes_climb()):
        assert not hover.step(action).next_obs.requires_grad


def test_one_simulation_a_process_and_another_after_it(hover: DeviceEnv) -> None:
    with pytest.raises(SetupError, match="another Isaac Lab simulation is open in this process; close it first"):
        HOVER.make(range(2))
    hover.close()
    with closing(replace(HOVER, action_bounds=None).make(range(2))) as env:
        assert env.spec.lanes == 2
        assert env.spec.action.high == (float("inf"),) * 4
    with pytest.raises(SetupError, match="no task 'Isaac-Cartpole-Dirct'; did you mean 'Isaac-Cartpole-Direct'"):
        replace(HOVER, task="Isaac-Cartpole-Dirct").make(range(2))
