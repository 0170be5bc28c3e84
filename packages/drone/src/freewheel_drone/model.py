"""What a model of the drone has to learn: how the body moves. Everything else follows from the world's own functions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from freewheel.learn.mbpo.task import ModelTask
from freewheel_drone import quadrotor as quad
from freewheel_drone.quadrotor import length, to_heading, to_map
from freewheel_drone.task import LOAD, TASK, WIND, DroneStates, DroneTask, MoveResult

WORD = 24  # cells of the map in a float32: as many bits as it holds exactly
MOST = 1e3  # of a predicted coordinate: far beyond what a body does, and far from what overflows


class DroneModel(ModelTask):
    """A state is the body, the task, level, tile and steps so far, and the map as bits, [N, S].

    The model sees a body from where it is: position relative to it, turned by its yaw. So it reads the velocity, the tilt, the
    angular velocity, what the motors give, wind and load, and predicts position, velocity, attitude (which is made a unit
    again), angular velocity and motors after the step.
    """

    predicted, read = quad.STATE, 4

    def __init__(self, task: DroneTask) -> None:
        self.task = task
        self._words = math.ceil(task.cells / WORD)
        self._shifts = torch.arange(WORD, dtype=torch.int32, device=task.terrain.episodes.device)
        self._sizes = [quad.STATE, TASK + task.cfg.action_size, 3, task.cells * self._words]

    def state_of(self, lanes: DroneStates) -> list[Tensor]:
        """The columns of the lanes' state."""
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
        verdict = self._judge(state, next_state)
        return (verdict.there | ~verdict.safe)[:, 0]

    def _judge(self, state: Tensor, next_state: Tensor) -> MoveResult:
        return self.task.judge(self.lanes_of(state), self.lanes_of(next_state))


def _yaw(attitude: Tensor) -> Tensor:
    """Where a body is turned to, as (cosine, sine), by the turn about the vertical that its attitude [N, 4] holds."""
    cosine, sine = torch.nn.functional.normalize(attitude[:, ::3]).chunk(2, 1)
    return torch.cat((cosine * cosine - sine * sine, 2 * cosine * sine), 1)


def _turned(frame: Tensor, attitude: Tensor, sign: int) -> Tensor:
    """The attitude [N, 4] after the turn about the vertical that another one holds, or before it (sign -1). Before its own turn
    its last column is 0 exactly: a model would take rounding errors for information."""
    cosine, sine = frame[:, :1], frame[:, 3:] * sign
    w, x, y, z = attitude.chunk(4, 1)
    both = (cosine * w - sine * z, cosine * x - sine * y, cosine * y + sine * x, cosine * z + sine * w)
    return torch.cat(both, 1) / length(frame[:, ::3]).clamp(min=1e-6)
