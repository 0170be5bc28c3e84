"""The learning task of a drone model: with the true motion, an imagined step equals the environment's step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel.learn.mbpo.task import MODEL_STATE
from freewheel_drone import quadrotor as quad
from freewheel_drone.env import RoughDrone
from freewheel_drone.model import DroneModel
from freewheel_drone.task import CONSTANT, WIND
from packages.drone.tests.support.operations import Operations

LANES = 128
MODELLED = {"model_state": True, "compute_final_obs": True, "levels": 2, "tiles_per_level": 2, "level": 1}


def played(
    steps: int, **options: Any
) -> Iterator[tuple[DroneModel, Tensor, Tensor, dict[str, Tensor], Tensor, Tensor]]:
    """Return model, state, action, the observation after the step (before a reset), reward and terminated."""
    env = RoughDrone(LANES, **MODELLED | options)
    model, dice = env.model_task, torch.Generator().manual_seed(0)
    assert model is not None
    obs, _ = env.reset(seed=3)
    for _ in range(steps):
        state = obs[MODEL_STATE].clone()
        action = torch.rand(LANES, env.cfg.action_size, generator=dice) * 2 - 1
        obs, reward, terminated, _, extras = env.step(action)
        yield model, state, action, extras["final_obs"], reward, terminated


@pytest.mark.parametrize(
    "options",
    [{}, {"control": "thrust", "lidar": False}, {"lidar_channels": 2, "tile_size": 30.0, "height_scan": False}],
)
def test_an_imagined_step_of_the_true_motion_is_the_step_of_the_world(options: dict[str, Any]) -> None:
    ends, found = 0, 0.0
    for model, state, action, after, reward, terminated in played(50, episode_seconds=4.0, **options):
        imagined = model.successor(state, action, model.encode(after[MODEL_STATE], state)[:, : model.predicted])
        torch.testing.assert_close(imagined, after[MODEL_STATE], atol=1e-5, rtol=0)
        for name, columns in model.observe(imagined).items():
            torch.testing.assert_close(columns, after[name], atol=2e-4, rtol=0)
        torch.testing.assert_close(model.reward(state, action, imagined), reward, atol=1e-5, rtol=0)
        assert torch.equal(model.termination(state, action, imagined), terminated)
        ends += int(terminated.sum())
        found += float((imagined - state)[:, slice(quad.STATE + 9, quad.STATE + 10)].sum())
    assert ends > 10
    assert found > 1000  # includes rewards for seen cells


def moved(state: Tensor) -> Tensor:
    """Move a state, and turn it about the vertical together with its wind."""
    turn, shift, (cosine, sine) = torch.tensor([0.6, 0.8]), torch.tensor([3.0, -2.0, 0.5]), (0.8944272, 0.4472136)
    spun, wind = state.clone(), slice(quad.STATE + WIND.start, quad.STATE + WIND.stop)
    for vector in quad.POSITION, quad.VELOCITY, wind:
        spun[:, vector] = quad.to_map(turn, state[:, vector])
    spun[:, quad.POSITION] += shift
    w, x, y, z = state[:, quad.ATTITUDE].unbind(1)
    both = (cosine * w - sine * z, cosine * x - sine * y, cosine * y + sine * x, cosine * z + sine * w)
    spun[:, quad.ATTITUDE] = torch.stack(both, 1)
    return spun


def test_the_model_sees_a_body_from_where_it_is() -> None:
    """A moved and turned state has the same encoding and the same next step."""
    for model, state, _, after, *_ in played(5, lidar=False):
        for one in state, after[MODEL_STATE]:
            seen = model.encode(one, state)
            assert seen.shape == (LANES, model.predicted + model.read)
            torch.testing.assert_close(model.encode(moved(one), moved(state)), seen, atol=1e-4, rtol=0)
        own = model.encode(state, state)
        assert (own[:, quad.POSITION] == 0).all()
        assert (own[:, quad.ATTITUDE][:, 3] == 0).all()


def test_what_is_constant_in_an_episode_stays_and_attitudes_are_units() -> None:
    for model, state, action, *_ in played(3, lidar=False):
        wild = torch.randn(LANES, model.predicted, generator=torch.Generator().manual_seed(1)) * 1e4
        imagined = model.successor(state, action, wild)
        kept = slice(quad.STATE + CONSTANT.start, quad.STATE + CONSTANT.stop)
        assert torch.equal(imagined[:, kept], state[:, kept])  # goal, wind, load, first distance
        counts = slice(quad.STATE + 13, quad.STATE + 16)  # level, tile, steps
        assert torch.equal(imagined[:, counts], state[:, counts] + torch.tensor([0.0, 0.0, 1.0]))
        torch.testing.assert_close(imagined[:, quad.ATTITUDE].norm(dim=1), torch.ones(LANES))
        for value in (*model.observe(imagined).values(), model.reward(state, action, imagined)):
            assert value.isfinite().all()


def test_the_map_survives_as_bits() -> None:
    for model, state, *_ in played(3, lidar=False, tile_size=30.0, levels=1, level=0):
        lanes = model.lanes_of(state)
        lanes = lanes._replace(seen=torch.rand(lanes.seen.shape, generator=torch.Generator().manual_seed(2)) < 0.5)
        for one, two in zip(lanes, model.lanes_of(torch.cat(model.state_of(lanes), 1)), strict=True):
            assert one.dtype == two.dtype
            assert torch.equal(one, two)


def test_only_who_asks_observes_the_state() -> None:
    plain, modelled = RoughDrone(4, levels=1, lidar=False), RoughDrone(4, levels=1, lidar=False, model_state=True)
    assert plain.model_task is None
    assert {*plain.single_observation_space} == {"policy", "critic"}
    assert {*modelled.single_observation_space} == {"policy", "critic", MODEL_STATE}
    action = torch.zeros(4, 3)
    one, two = (env.reset(seed=0) and env.step(action)[0] for env in (plain, modelled))
    assert torch.equal(one["policy"], two["policy"])
    assert torch.equal(one["critic"], two["critic"])


def test_a_step_of_the_model_can_be_captured_as_far_as_a_cpu_can_tell() -> None:
    kernels = []
    for model, state, action, after, *_ in played(3):
        motion = model.encode(after[MODEL_STATE], state)[:, : model.predicted]
        with Operations() as operations:
            imagined = model.successor(state, action, motion)
            model.observe(imagined)
            model.reward(state, action, imagined)
            model.termination(state, action, imagined)
            model.encode(imagined, imagined)
        kernels.append(operations.names)
    assert kernels[0] == kernels[1] == kernels[2]
