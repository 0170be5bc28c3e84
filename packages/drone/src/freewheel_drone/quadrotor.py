"""A batch of quadrotors as rigid bodies with quaternions, motor lag and drag, and a controller for velocities."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Control: TypeAlias = Literal["velocity", "thrust"]

GRAVITY = 9.81
#: Columns of a body's state: position [m] and velocity [m/s] in the world, attitude (wxyz, body to world), angular velocity
#: in the body [rad/s], and the present output of the motors: thrust over mass [m/s²] and moment over inertia [rad/s²].
COLUMNS = POSITION, VELOCITY, ATTITUDE, OMEGA, MOTOR = [
    slice(start, stop) for start, stop in ((0, 3), (3, 6), (6, 10), (10, 13), (13, 17))
]
STATE = 17

VELOCITY_GAIN = 2.5  # 1/s
ACCELERATION_LIMIT = 5.0  # m/s², for both sideways axes together and for the vertical axis
ATTITUDE_GAIN, RATE_GAIN = 100.0, 18.0  # 1/s², 1/s


@dataclass(frozen=True)
class BodyConfig:
    """The drone's body and its actions."""

    control: Control = "velocity"
    """velocity: 3 actions, the wanted velocity in the heading frame over max_speed. thrust: 4 actions, the collective thrust
    (-1 none, 1 maximum) and the moments about x, y, z over max_moment."""
    max_speed: float = 3.0  # m/s along each axis at an action of 1
    physics_dt: float = 0.01  # seconds of one substep
    decimation: int = 10  # substeps of one step
    mass: float = 0.8  # kg
    inertia: tuple[float, float, float] = (0.005, 0.005, 0.009)  # kg m² about the body's axes
    thrust_to_weight: float = 2.0  # largest thrust divided by the weight
    max_moment: tuple[float, float, float] = (0.2, 0.2, 0.09)  # N m about the body's axes
    motor_tau: float = 0.03  # seconds in which the motors follow 63 % of a change; 0: immediately
    drag_linear: float = 0.1  # N per m/s through the air
    drag_quadratic: float = 0.02  # N per (m/s)² through the air

    @property
    def step_dt(self) -> float:
        return self.physics_dt * self.decimation

    @property
    def action_size(self) -> int:
        return 3 if self.control == "velocity" else 4


def rotate(attitude: Tensor, vector: Tensor) -> Tensor:
    """Rotate a vector from the body into the world; [N, 4] and [N or 1, 3]."""
    axis = attitude[:, 1:]
    across = torch.linalg.cross(axis, vector)
    return torch.add(vector, torch.addcmul(torch.linalg.cross(axis, across), attitude[:, :1], across), alpha=2)


def rotate_back(attitude: Tensor, vector: Tensor) -> Tensor:
    """Rotate a vector from the world into the body; [N, 4] and [N or 1, 3]."""
    axis = attitude[:, 1:]
    across = torch.linalg.cross(vector, axis)
    return torch.add(vector, torch.addcmul(torch.linalg.cross(across, axis), attitude[:, :1], across), alpha=2)


def turned(attitude: Tensor, half: Tensor) -> Tensor:
    """Return the attitude [N, 4] after a turn in the body about the axis `half` [N, 3] by twice its length in radians."""
    angle = length(half)
    cosine, sine = torch.cos(angle), half * torch.sinc(angle / math.pi)
    w, axis = attitude[:, :1], attitude[:, 1:]
    scalar = w * cosine - (axis * sine).sum(1, keepdim=True)
    vector = torch.addcmul(torch.addcmul(torch.linalg.cross(axis, sine), w, sine), axis, cosine)
    return torch.cat((scalar, vector), 1)


def length(vector: Tensor) -> Tensor:
    """Return the lengths [N, 1] of vectors [N, D]."""
    norm: Tensor = torch.linalg.vector_norm(vector, dim=1, keepdim=True)
    return norm


def heading(attitude: Tensor) -> Tensor:
    """Return the direction of the nose on the map as (cosine, sine) of the yaw, [N, 2]."""
    w, x, y, z = attitude.unbind(1)
    nose = torch.stack((0.5 - y * y - z * z, x * y + w * z), 1)
    return torch.nn.functional.normalize(nose, dim=1)


def to_map(yaw: Tensor, vector: Tensor) -> Tensor:
    """Turn vectors [..., 3] from the heading frame (level, turned with the nose) into the world; yaw [..., 2] broadcasts."""
    return _turn(vector, yaw[..., :1], yaw[..., 1:])


def to_heading(yaw: Tensor, vector: Tensor) -> Tensor:
    """Turn vectors [..., 3] from the world into the heading frame; yaw [..., 2] broadcasts."""
    return _turn(vector, yaw[..., :1], -yaw[..., 1:])


def _turn(vector: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    x, y, z = vector.chunk(3, -1)
    return torch.cat((cosine * x - sine * y, sine * x + cosine * y, z), -1)


class Quadrotor:
    """The equations of motion for any number of bodies at once.

    The body's force and moment are constant in a substep. Attitude and angular velocity follow the midpoint rule, and the thrust
    acts along the mean of the old and the new axis. Rotors are not modelled separately: thrust and moments have separate limits
    and lags, and do not reduce each other.
    """

    def __init__(self, cfg: BodyConfig, device: str) -> None:
        self._cfg = cfg
        self._lag = 1 - math.exp(-cfg.physics_dt / cfg.motor_tau) if cfg.motor_tau > 0 else 1.0
        self._inertia = torch.tensor(cfg.inertia, device=device)
        self._lightness = 1 / self._inertia
        self._top_thrust = cfg.thrust_to_weight * GRAVITY  # m/s²
        self._top_spin = torch.tensor(cfg.max_moment, device=device) / self._inertia  # [3] rad/s²
        self._least_spin = -self._top_spin
        self._up = torch.tensor(((0.0, 0.0, 1.0),), device=device)  # [1, 3]
        self._weight = self._up * -GRAVITY
        self._eagerness = self._up * ATTITUDE_GAIN

    def at_rest(self, position: Tensor, yaw: Tensor) -> Tensor:
        """Return states [N, 17] of bodies that hover at [N, 3], turned by [N, 1] radians."""
        still = torch.zeros_like(position)
        attitude = torch.cat((torch.cos(yaw / 2), still[:, :2], torch.sin(yaw / 2)), 1)
        return torch.cat((position, still, attitude, still, still[:, :1] + GRAVITY, still), 1)

    def advance(self, state: Tensor, action: Tensor, load: Tensor, wind: Tensor) -> Tensor:
        """Return the states [N, 17] after one step of `action` [N, A] in [-1, 1].

        `load` [N, 1] scales mass and inertia; the controller does not know it. `wind` [N, 3] is the air's velocity.
        """
        cfg, dt = self._cfg, self._cfg.physics_dt
        position, velocity, attitude, omega, motor = (state[:, columns] for columns in COLUMNS)
        axis = rotate(attitude, self._up)  # [N, 3] along the thrust
        flown = cfg.control == "velocity"
        if flown:
            pull = self._pull(action, velocity, attitude)
            thrust = (pull * axis).sum(1, keepdim=True).clamp(0, self._top_thrust)
            aim = torch.nn.functional.normalize(pull)
        else:
            thrust, moment = (action[:, :1] + 1) * (self._top_thrust / 2), action[:, 1:] * self._top_spin
        braking = -1 / (cfg.mass * load)
        for _ in range(cfg.decimation):
            if flown:
                moment = self._steer(attitude, omega, aim)
            motor = torch.lerp(motor, torch.cat((thrust, moment), 1) / load, self._lag)
            middle = torch.add(omega, self._spin(omega, motor), alpha=dt / 2)
            omega = torch.add(omega, self._spin(middle, motor), alpha=dt)
            attitude = turned(attitude, middle * (dt / 2))
            before, axis = axis, rotate(attitude, self._up)
            push = torch.addcmul(self._weight, motor[:, :1], before + axis, value=0.5)
            if cfg.drag_linear or cfg.drag_quadratic:
                air = velocity - wind
                push = torch.addcmul(push, air, (cfg.drag_linear + cfg.drag_quadratic * length(air)) * braking)
            position = torch.add(position, torch.add(velocity, push, alpha=dt / 2), alpha=dt)
            velocity = torch.add(velocity, push, alpha=dt)
        return torch.cat((position, velocity, torch.nn.functional.normalize(attitude), omega, motor), 1)

    def _spin(self, omega: Tensor, motor: Tensor) -> Tensor:
        """Return the angular acceleration [N, 3] by Euler's equation."""
        whirl = torch.linalg.cross(omega, self._inertia * omega)
        return torch.addcmul(motor[:, 1:], whirl, self._lightness, value=-1)

    def _pull(self, action: Tensor, velocity: Tensor, attitude: Tensor) -> Tensor:
        """Return [N, 3] the acceleration by thrust that leads to the wanted velocity, in m/s²."""
        wanted = to_map(heading(attitude), action * self._cfg.max_speed)
        push = (wanted - velocity) * VELOCITY_GAIN
        sideways, upwards = push[:, :2], push[:, 2:].clamp(-ACCELERATION_LIMIT, ACCELERATION_LIMIT)
        excess = (length(sideways) / ACCELERATION_LIMIT).clamp(min=1)
        return torch.cat((sideways / excess, upwards + GRAVITY), 1)

    def _steer(self, attitude: Tensor, omega: Tensor, aim: Tensor) -> Tensor:
        """Return [N, 3] the angular acceleration that turns the thrust towards the direction `aim` and stops the yaw."""
        error = torch.linalg.cross(self._eagerness, rotate_back(attitude, aim))
        return torch.sub(error, omega, alpha=RATE_GAIN).clamp(self._least_spin, self._top_spin)
