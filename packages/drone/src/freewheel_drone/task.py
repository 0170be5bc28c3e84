"""The task of the drone as functions of a lane's whole state: what a move leads to, what it is worth, and what is observed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from freewheel_drone import quadrotor as quad
from freewheel_drone.quadrotor import BodyConfig, heading, length, rotate_back, to_heading
from freewheel_drone.terrain import Terrain, TerrainConfig

RADIUS = 0.2  # m, of the drone as a ball
CAUTION = 1.0  # m: nearer to ground or pillars than this costs
#: Columns of a lane's task: its goal, wind, load, how far the goal was at first, how far it is, cells seen, the last action.
GOAL, WIND, LOAD, START, DISTANCE, SEEN = slice(0, 3), slice(3, 6), slice(6, 7), slice(7, 8), slice(8, 9), slice(9, 10)
LAST, TASK = slice(10, None), 10
CONSTANT = slice(0, 8)  # the columns that stay as they are in an episode


@dataclass(frozen=True)
class DroneConfig(BodyConfig, TerrainConfig):
    """Everything about the world that can be chosen; see also BodyConfig and TerrainConfig."""

    episode_seconds: float = 20.0  # seconds after which an episode is truncated
    compute_final_obs: bool = False
    """Whether extras["final_obs"] holds what was observed at the end of episodes; it costs a second observation per step."""
    bounded_actions: bool = True
    """Whether the action space is Box(-1, 1) or, as Isaac Lab has it, unbounded; actions are clipped to ±1 all the same."""
    model_state: bool = False
    """Whether a group `model_state` is observed: the whole state of a lane, for learners that model the world."""
    level: int = 0  # where every lane begins
    # whether a lane goes up a level when it reaches its goal, and down when it crashes before half of its way
    curriculum: bool = False
    wind: float = 0.5  # m/s at most along x and y, constant in an episode
    load_spread: float = 0.05  # an episode's mass and inertia are up to so much larger or smaller
    goal_radius: float = 1.0  # m: nearer to the goal than this is there
    max_height: float = 5.0  # m above ground: higher counts as a crash
    max_tilt: float = 75.0  # degrees: more counts as a crash
    view_radius: float = 3.0  # m: cells of the map whose middle is nearer than this are seen
    reward_progress: float = 1.0  # for each metre nearer to the goal
    reward_cell: float = 0.05  # for each cell of the map, a square metre, that is seen for the first time
    reward_success: float = 10.0
    reward_crash: float = -10.0
    reward_effort: float = -0.02  # times the mean square of the action
    reward_proximity: float = -0.1  # at a touch; nothing from a metre on

    @property
    def episode_steps(self) -> int:
        return math.ceil(self.episode_seconds / self.step_dt - 1e-6)


class DroneStates(NamedTuple):
    """All that decides what happens next in N episodes, given their actions."""

    body: Tensor  # [N, 17] see quadrotor.COLUMNS
    task: Tensor  # [N, TASK + A]
    level: Tensor  # [N] int32
    tile: Tensor  # [N] int32
    length: Tensor  # [N] int64 steps so far
    seen: Tensor  # [N, G, G] bool, by y and x: the cells of the map that have been seen


class MoveResult(NamedTuple):
    """What a move was worth, [N, 1] each."""

    reward: Tensor
    there: Tensor  # bool: the goal is reached
    safe: Tensor  # bool: no crash


class DroneTask:
    """No method changes anything or waits for the device."""

    def __init__(self, cfg: DroneConfig, terrain: Terrain, device: str) -> None:
        self.cfg, self.terrain = cfg, terrain
        self.cells = math.ceil(cfg.tile_size)  # G: cells are a metre wide
        self._down = torch.tensor(((0.0, 0.0, -1.0),), device=device)  # [1, 3]
        self._middles = torch.arange(self.cells, device=device) + 0.5  # [G]

    def move(self, lanes: DroneStates, body: Tensor, action: Tensor) -> DroneStates:
        """After a step that led to these bodies: what is seen from there is marked."""
        position = body[:, quad.POSITION]
        away = (self._middles - position[:, :2, None]).square()  # [N, 2, G]
        seen = lanes.seen | (away[:, 1, :, None] + away[:, 0, None] < self.cfg.view_radius**2)
        count = seen.flatten(1).sum(1, keepdim=True)
        distance = length(lanes.task[:, GOAL] - position)
        task = torch.cat((lanes.task[:, CONSTANT], distance, count, action), 1)
        return lanes._replace(body=body, task=task, length=lanes.length + 1, seen=seen)

    def judge(self, before: DroneStates, after: DroneStates, sane: Tensor | bool = True) -> MoveResult:
        """sane [N, 1]: the action was a number; anything else is a crash."""
        cfg, position, task = self.cfg, after.body[:, quad.POSITION], after.task
        height, pillar = self.terrain.touch(after.tile, position)
        x, y = after.body[:, quad.ATTITUDE][:, 1:3].chunk(2, 1)
        upright = 1 - 2 * (x * x + y * y)
        inside = ((position[:, :2] > 0) & (position[:, :2] < cfg.tile_size)).all(1, keepdim=True)
        room = torch.minimum(height, pillar)
        safe = sane & inside & (room > RADIUS) & (height < cfg.max_height)
        safe &= upright > math.cos(math.radians(cfg.max_tilt))
        there = safe & (task[:, DISTANCE] < cfg.goal_radius)

        found = (task[:, SEEN] - before.task[:, SEEN]) * (after.length[:, None] > 1)  # an episode's first look is free
        reward = cfg.reward_progress * (before.task[:, DISTANCE] - task[:, DISTANCE]) + cfg.reward_cell * found
        reward += cfg.reward_success * there + cfg.reward_crash * ~safe
        reward += cfg.reward_effort * task[:, LAST].square().mean(1, keepdim=True)
        reward += cfg.reward_proximity * (1 - (room - RADIUS) / CAUTION).clamp(0, 1)
        return MoveResult(reward, there, safe)

    def sense(self, lanes: DroneStates) -> dict[str, list[Tensor]]:
        """The columns of `policy` and of `critic`."""
        cfg, body, task = self.cfg, lanes.body, lanes.task
        attitude, position, distance = body[:, quad.ATTITUDE], body[:, quad.POSITION], task[:, DISTANCE]
        yaw = heading(attitude)
        sight = self.terrain.look(lanes.tile, position, yaw)
        vectors = torch.stack((task[:, GOAL] - position, task[:, WIND], sight.normal), 1)
        goal, wind, normal, *pillars = to_heading(yaw[:, None], torch.cat((vectors, sight.closest), 1)).unbind(1)
        plain = [
            rotate_back(attitude, body[:, quad.VELOCITY]) / cfg.max_speed,
            body[:, quad.OMEGA] / 5,
            rotate_back(attitude, self._down),
            sight.height / 2,
            goal / distance.clamp(min=5),
            distance / 10,
            task[:, LAST],
            *([] if sight.scan is None else [(sight.scan / 2).clamp(-1, 1)]),
        ]
        truth = [
            wind,
            normal,
            task[:, LOAD],
            lanes.level[:, None] / cfg.levels,
            1 - lanes.length[:, None] / cfg.episode_steps,
            sight.pillar.clamp(max=cfg.lidar_range) / cfg.lidar_range,
            1 - distance / task[:, START].clamp(min=1),
            task[:, SEEN] / self.cells**2,
            (torch.cat(pillars, 1) / cfg.lidar_range).clamp(-1, 1),
        ]
        lidar = [] if sight.lidar is None else [sight.lidar / cfg.lidar_range]
        return {"policy": plain + lidar, "critic": plain + truth}
