"""A quadrotor moves like a rigid body: it agrees with MuJoCo, closed forms and conservation laws."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.core import NDArray
from freewheel_drone import quadrotor as quad
from freewheel_drone.quadrotor import BodyConfig, Quadrotor, heading, rotate, to_heading, to_map, turned

THRUST = BodyConfig(control="thrust", drag_linear=0.0, drag_quadratic=0.0)


def tensor(*values: float) -> Tensor:
    return torch.tensor([values])


def fly(cfg: BodyConfig, state: Tensor, actions: Tensor, wind: Tensor | None = None) -> Tensor:
    """Return the states [T + 1, N, 17] under actions [T, N, A]."""
    body, load = Quadrotor(cfg, "cpu"), torch.ones(len(state), 1)
    states = [state]
    for action in actions:
        states.append(body.advance(states[-1], action, load, torch.zeros(len(state), 3) if wind is None else wind))
    return torch.stack(states)


def hovering(count: int = 1, yaw: float = 0.0) -> Tensor:
    return Quadrotor(THRUST, "cpu").at_rest(torch.zeros(count, 3), torch.full((count, 1), yaw))


def random_actions(steps: int, count: int, seed: int = 0) -> Tensor:
    return torch.rand(steps, count, 4, generator=torch.Generator().manual_seed(seed)) * 2 - 1


BODY = """
<mujoco>
  <option timestep="0.0005" gravity="0 0 -{gravity}" integrator="Euler"/>
  <worldbody>
    <body>
      <freejoint/>
      <inertial pos="0 0 0" mass="{mass}" diaginertia="{inertia[0]} {inertia[1]} {inertia[2]}"/>
    </body>
  </worldbody>
</mujoco>
"""


def in_mujoco(mujoco: Any, cfg: BodyConfig, actions: NDArray) -> tuple[NDArray, NDArray]:
    """Return position and attitude after actions [T, 4] from a hover, with the thrust and moment of the motors."""
    model = mujoco.MjModel.from_xml_string(BODY.format(gravity=quad.GRAVITY, mass=cfg.mass, inertia=cfg.inertia))
    data = mujoco.MjData(model)
    motor, fine = np.array([cfg.mass * quad.GRAVITY, 0, 0, 0]), round(cfg.physics_dt / model.opt.timestep)
    top = np.array([cfg.mass * quad.GRAVITY * cfg.thrust_to_weight, *cfg.max_moment])
    for action in actions:
        wanted = top * np.array([(action[0] + 1) / 2, *action[1:]])
        for _ in range(cfg.decimation):
            motor += (1 - math.exp(-cfg.physics_dt / cfg.motor_tau)) * (wanted - motor)
            for _ in range(fine):
                axis = np.zeros(3)
                mujoco.mju_rotVecQuat(axis, np.array([0.0, 0.0, motor[0]]), data.qpos[3:])
                data.qfrc_applied[:] = [
                    *axis,
                    *motor[1:],
                ]  # a free joint takes forces in the world frame and moments in the body frame
                mujoco.mj_step(model, data)
    return data.qpos[:3].copy(), data.qpos[3:].copy()


def test_a_second_of_random_flight_ends_where_mujoco_ends_it() -> None:
    mujoco = pytest.importorskip("mujoco")
    actions = random_actions(10, 25)
    ours = fly(THRUST, hovering(25), actions)[-1].numpy()
    theirs = [in_mujoco(mujoco, THRUST, actions[:, lane].numpy().astype(np.float64)) for lane in range(25)]
    far = np.linalg.norm(ours[:, quad.POSITION] - [position for position, _ in theirs], axis=1)
    aligned = np.abs((ours[:, quad.ATTITUDE] * np.array([attitude for _, attitude in theirs])).sum(1))
    assert np.linalg.norm(ours[:, quad.POSITION], axis=1).mean() > 1.0  # the body has moved
    assert far.max() < 0.01
    np.testing.assert_allclose(np.linalg.norm(ours[:, quad.ATTITUDE], axis=1), 1, atol=1e-6)  # still rotations
    assert (2 * np.arccos(np.minimum(aligned, 1))).max() < 0.01


def test_motors_follow_with_their_time_constant() -> None:
    states = fly(THRUST, hovering(), torch.tensor([[[1.0, 0.5, 0.0, 0.0]]]).expand(2, 1, 4))
    left = math.exp(-THRUST.step_dt / THRUST.motor_tau)
    spin = 0.5 * THRUST.max_moment[0] / THRUST.inertia[0]
    for steps in 1, 2:
        gone = 1 - left**steps
        expected = tensor(quad.GRAVITY * (1 + gone), spin * gone, 0.0, 0.0)
        torch.testing.assert_close(states[steps][:, quad.MOTOR], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("linear", "quadratic"), [(0.8, 0.0), (0.0, 0.4)])
def test_drag_follows_its_law(linear: float, quadratic: float) -> None:
    cfg = dataclasses.replace(THRUST, drag_linear=linear, drag_quadratic=quadratic)
    state = hovering()
    state[:, quad.VELOCITY] = tensor(2.0, 0.0, 0.0)
    speed = fly(cfg, state, torch.zeros(10, 1, 4))[-1, 0, quad.VELOCITY][0]
    expected = 2 * math.exp(-linear / cfg.mass) if linear else 2 / (1 + 2 * quadratic / cfg.mass)
    assert float(speed) == pytest.approx(expected, rel=0.01)
    cfg = dataclasses.replace(THRUST, drag_linear=linear * 5, drag_quadratic=quadratic * 20)
    end = fly(cfg, hovering(), torch.zeros(100, 1, 4), tensor(1.0, -0.5, 0.0))[-1]
    torch.testing.assert_close(end[:, quad.VELOCITY], tensor(1.0, -0.5, 0.0), atol=0.05, rtol=0)  # that of the wind


def test_a_heavier_body_accelerates_less() -> None:
    cfg = dataclasses.replace(THRUST, motor_tau=0.0)
    load = torch.tensor([[1.0], [1.25]])
    end = Quadrotor(cfg, "cpu").advance(hovering(2), torch.tensor([[1.0, 0.1, 0.0, 0.0]] * 2), load, torch.zeros(2, 3))
    thrust, spin = 2 * quad.GRAVITY / load[:, 0], 0.1 * cfg.max_moment[0] / cfg.inertia[0] / load[:, 0]
    torch.testing.assert_close(end[:, quad.MOTOR][:, 0], thrust)
    torch.testing.assert_close(end[:, quad.OMEGA][:, 0], spin * cfg.step_dt)


def test_a_free_body_keeps_its_energy_and_its_angular_momentum() -> None:
    cfg = dataclasses.replace(THRUST, motor_tau=0.0, inertia=(0.004, 0.006, 0.009))
    state = hovering(20)
    state[:, quad.OMEGA] = torch.rand(20, 3, generator=torch.Generator().manual_seed(0)) * 12 - 6
    state[:, quad.VELOCITY] = torch.rand(20, 3, generator=torch.Generator().manual_seed(1)) * 4 - 2
    coast = torch.tensor([-1.0, 0.0, 0.0, 0.0]).expand(20, 20, 4)
    states, inertia = fly(cfg, state, coast), torch.tensor(cfg.inertia)
    turning = [(inertia * state[:, quad.OMEGA].square()).sum(1) / 2 for state in states]
    momentum = [rotate(state[:, quad.ATTITUDE], inertia * state[:, quad.OMEGA]) for state in states]
    flying = [
        cfg.mass * (s[:, quad.VELOCITY].square().sum(1) / 2 + quad.GRAVITY * s[:, quad.POSITION][:, 2]) for s in states
    ]
    torch.testing.assert_close(turning[-1], turning[0], rtol=3e-3, atol=0)
    torch.testing.assert_close(momentum[-1], momentum[0], rtol=0, atol=2e-3 * float(momentum[0].abs().max()))
    torch.testing.assert_close(flying[-1], flying[0], rtol=0, atol=1e-3)


def test_turning_a_quarter_about_each_axis() -> None:
    level = tensor(1.0, 0.0, 0.0, 0.0)
    for axis, (start, end) in enumerate([((0.0, 1.0, 0.0), (0.0, 0.0, 1.0)), ((0.0, 0.0, 1.0), (1.0, 0.0, 0.0))]):
        half = torch.zeros(1, 3)
        half[0, axis] = math.pi / 4
        torch.testing.assert_close(rotate(turned(level, half), tensor(*start)), tensor(*end), atol=1e-6, rtol=0)
        torch.testing.assert_close(
            quad.rotate_back(turned(level, half), tensor(*end)), tensor(*start), atol=1e-6, rtol=0
        )
    torch.testing.assert_close(turned(level, torch.zeros(1, 3)), level)


def test_the_heading_frame_turns_with_the_nose() -> None:
    yaw = heading(hovering(yaw=math.pi / 6)[:, quad.ATTITUDE])
    torch.testing.assert_close(yaw, tensor(math.sqrt(3) / 2, 0.5))
    torch.testing.assert_close(to_map(yaw, tensor(2.0, 0.0, 3.0)), tensor(math.sqrt(3), 1.0, 3.0))
    torch.testing.assert_close(to_heading(yaw, tensor(math.sqrt(3), 1.0, 3.0)), tensor(2.0, 0.0, 3.0))


@pytest.mark.parametrize("yaw", [0.0, 2.0])
def test_it_flies_at_the_velocity_asked_for(yaw: float) -> None:
    cfg = BodyConfig(drag_linear=0.0, drag_quadratic=0.0)
    asked = torch.tensor([[0.6, 0.0, 0.0], [-0.3, 0.5, 0.2], [0.0, -1.0, -0.5], [1.0, 1.0, 1.0]])
    states = fly(cfg, hovering(4, yaw), asked.expand(30, 4, 3))
    wanted = to_map(heading(states[0, :, quad.ATTITUDE]), asked * cfg.max_speed)
    torch.testing.assert_close(states[-1, :, quad.VELOCITY], wanted, atol=0.05, rtol=0)
    assert (states[..., quad.VELOCITY].norm(dim=-1) < 1.15 * wanted.norm(dim=-1) + 0.05).all()  # little overshoot
    tilt = torch.stack([rotate(state[:, quad.ATTITUDE], tensor(0.0, 0.0, 1.0))[:, 2] for state in states])
    assert tilt.min() > math.cos(math.radians(45))


def test_it_recovers_from_a_tumble() -> None:
    state = hovering(20)
    state[:, quad.OMEGA] = torch.rand(20, 3, generator=torch.Generator().manual_seed(2)) * 10 - 5
    end = fly(BodyConfig(), state, torch.zeros(30, 20, 3))[-1]
    assert end[:, quad.VELOCITY].abs().max() < 0.05
    assert end[:, quad.OMEGA].abs().max() < 0.05
