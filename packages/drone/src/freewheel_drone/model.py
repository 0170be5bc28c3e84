"""The learning task for a model of the drone: the motion of the body. Functions of the environment compute everything else."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from freewheel.learn.mbpo.task import ModelTask
from freewheel_drone import quadrotor as quad
from freewheel_drone.quadrotor import length, to_heading, to_map
from freewheel_drone.task import LOAD, TASK, WIND, DroneStates, DroneTask, MoveResult

WORD = 24  # cells of the map in a float32, which holds this many bits exactly
MOST = 1e3  # limit of predicted coordinates, far beyond real motions and far below an overflow


class DroneModel(ModelTask):
    """A state [N, S] contains the body, the task, the level, the tile, the steps so far, and the map as bits.

    The model sees each body in a frame at its position, turned by its yaw. It reads the velocity, tilt, angular velocity, motors,
    wind and load. It predicts position, velocity, attitude (which is normalised), angular velocity and motors after the step.
    """

    predicted, read = quad.STATE, 4

    def __init__(self, task: DroneTask) -> None:
        self.task = task
        self._words = math.ceil(task.cells / WORD)
        self._shifts = torch.arange(WORD, dtype=torch.int32, device=task.terrain.episodes.device)
        self._sizes = [quad.STATE, TASK + task.cfg.action_size, 3, task.cells * self._words]

    def state_of(self, lanes: DroneStates) -> list[Tensor]:
        """Return the columns of the lanes' state."""
        counts = torch.stack((lanes.level, lanes.tile, lanes.length), 1).float()
        padded = torch.nn.functional.pad(lanes.seen, (0, self._words * WORD - self.task.cells))
        bits = padded.unflatten(2, (self._words, WORD)).int() << self._shifts
        return [lanes.body, lanes.task, counts, bits.sum(3).float().flatten(1)]

    def lanes_of(self, state: Tensor) -> DroneStates:
        body, task, counts, words = state.split(self._sizes, 1)
        level, tile, steps = counts.unbind(1)
        bits = words.int().unflatten(1, (self.task.cells, self._words, 1)) >> self._shifts & 1
        seen = bits.flatten(2)[..., : self.task.cells].bool()
        return DroneStates(body, task, level.int(), tile.int(), steps.long(), seen)

    def encode(self, state: Tensor, frame: Tensor) -> Tensor:
        turn, yaw = frame[:, quad.ATTITUDE], _yaw(frame[:, quad.ATTITUDE])
        position, velocity, attitude, *rest = (state[:, columns] for columns in quad.COLUMNS)
        task = frame[:, quad.STATE :]
        vectors = torch.stack((position - frame[:, quad.POSITION], velocity, task[:, WIND]), 1)
        position, velocity, wind = to_heading(yaw[:, None], vectors).unbind(1)
        return torch.cat((position, velocity, _turned(turn, attitude, -1), *rest, wind, task[:, LOAD]), 1)

    def successor(self, state: Tensor, action: Tensor, predicted: Tensor) -> Tensor:
        turn, yaw = state[:, quad.ATTITUDE], _yaw(state[:, quad.ATTITUDE])
        position, velocity, attitude, *rest = (predicted.clamp(-MOST, MOST)[:, columns] for columns in quad.COLUMNS)
        position, velocity = to_map(yaw[:, None], torch.stack((position, velocity), 1)).unbind(1)
        attitude = torch.nn.functional.normalize(_turned(turn, attitude, 1))
        body = torch.cat((state[:, quad.POSITION] + position, velocity, attitude, *rest), 1)
        return torch.cat(self.state_of(self.task.move(self.lanes_of(state), body, action)), 1)

    def observe(self, state: Tensor) -> dict[str, Tensor]:
        return {name: torch.cat(parts, 1) for name, parts in self.task.sense(self.lanes_of(state)).items()}

    def reward(self, state: Tensor, _action: Tensor, next_state: Tensor) -> Tensor:
        return self._judge(state, next_state).reward[:, 0]

    def termination(self, state: Tensor, _action: Tensor, next_state: Tensor) -> Tensor:
        result = self._judge(state, next_state)
        return (result.there | ~result.safe)[:, 0]

    def _judge(self, state: Tensor, next_state: Tensor) -> MoveResult:
        return self.task.judge(self.lanes_of(state), self.lanes_of(next_state))


def _yaw(attitude: Tensor) -> Tensor:
    """Return (cosine, sine) of the turn about the vertical in attitudes [N, 4]."""
    cosine, sine = torch.nn.functional.normalize(attitude[:, ::3]).chunk(2, 1)
    return torch.cat((cosine * cosine - sine * sine, 2 * cosine * sine), 1)


def _turned(frame: Tensor, attitude: Tensor, sign: int) -> Tensor:
    """Return attitudes [N, 4] after the turn about the vertical in `frame`, or before it (sign -1). With sign -1 the last column
    of the frame's own attitude is exactly 0; otherwise a model would mistake rounding errors for information."""
    cosine, sine = frame[:, :1], frame[:, 3:] * sign
    w, x, y, z = attitude.chunk(4, 1)
    both = (cosine * w - sine * z, cosine * x - sine * y, cosine * y + sine * x, cosine * z + sine * w)
    return torch.cat(both, 1) / length(frame[:, ::3]).clamp(min=1e-6)
