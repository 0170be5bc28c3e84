"""The task of the drone as functions of the complete state: the effect of a move, its reward, and the observation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from freewheel_drone import quadrotor as quad
from freewheel_drone.quadrotor import BodyConfig, heading, length, rotate_back, to_heading
from freewheel_drone.terrain import Terrain, TerrainConfig

RADIUS = 0.2  # m; the drone counts as a ball of this radius
CAUTION = 1.0  # m; being nearer to ground or pillars than this costs reward
#: Columns of a lane's task: goal, wind, load, first and present distance of the goal, number of cells seen, the last action.
GOAL = slice(0, 3)
WIND = slice(3, 6)
LOAD = slice(6, 7)
START = slice(7, 8)
DISTANCE = slice(8, 9)
SEEN = slice(9, 10)
LAST, TASK = slice(10, None), 10
CONSTANT = slice(0, 8)  # the columns that do not change during an episode


@dataclass(frozen=True)
class DroneConfig(BodyConfig, TerrainConfig):
    """All options of the environment, including those of BodyConfig and TerrainConfig."""

    episode_seconds: float = 20.0  # seconds after which an episode is truncated
    compute_final_obs: bool = False
    """Whether extras["final_obs"] holds the last observations of episodes, which costs a second observation per step."""
    bounded_actions: bool = True
    """Whether the action space is Box(-1, 1) or, as in Isaac Lab, unbounded. In both cases actions are clipped to ±1."""
    model_state: bool = False
    """Whether the observation has a group `model_state` with the complete state, for learners that model the world."""
    level: int = 0  # the first level of every lane
    # whether a lane goes up a level when it reaches its goal, and down when it crashes in the first half of the way
    curriculum: bool = False
    wind: float = 0.5  # maximum in m/s along x and y, constant in an episode
    load_spread: float = 0.05  # largest relative change of an episode's mass and inertia
    goal_radius: float = 1.0  # m; the goal is reached at a smaller distance
    max_height: float = 5.0  # m above ground; flying higher counts as a crash
    max_tilt: float = 75.0  # degrees; a larger tilt counts as a crash
    view_radius: float = 3.0  # m; cells of the map are seen if their middle is nearer than this
    reward_progress: float = 1.0  # for each metre nearer to the goal
    reward_cell: float = 0.05  # for each cell of the map (a square metre) that is seen for the first time
    reward_success: float = 10.0
    reward_crash: float = -10.0
    reward_effort: float = -0.02  # times the mean square of the action
    reward_proximity: float = -0.1  # at a touch, falling to 0 at a distance of a metre

    @property
    def episode_steps(self) -> int:
        return math.ceil(self.episode_seconds / self.step_dt - 1e-6)


class DroneStates(NamedTuple):
    """The complete states of N episodes. Together with the actions they determine what happens next."""

    body: Tensor  # [N, 17] see quadrotor.COLUMNS
    task: Tensor  # [N, TASK + A]
    level: Tensor  # [N] int32
    tile: Tensor  # [N] int32
    length: Tensor  # [N] int64 steps so far
    seen: Tensor  # [N, G, G] bool, by y and x: the cells of the map that have been seen


class MoveResult(NamedTuple):
    """The result of a move, [N, 1] each."""

    reward: Tensor
    there: Tensor  # bool: the drone has reached the goal
    safe: Tensor  # bool: the drone has not crashed


class DroneTask:
    """The rules of the task. No method changes its arguments or waits for the device."""

    def __init__(self, cfg: DroneConfig, terrain: Terrain, device: str) -> None:
        self.cfg = cfg
        self.terrain = terrain
        self.cells = math.ceil(cfg.tile_size)  # G; cells are a metre wide
        self._down = torch.tensor(((0.0, 0.0, -1.0),), device=device)  # [1, 3]
        self._middles = torch.arange(self.cells, device=device) + 0.5  # [G]

    def move(self, lanes: DroneStates, body: Tensor, action: Tensor) -> DroneStates:
        """Return the states after a step that has led to these bodies, and mark the cells that are seen from there."""
        position = body[:, quad.POSITION]
        away = (self._middles - position[:, :2, None]).square()  # [N, 2, G]
        seen = lanes.seen | (away[:, 1, :, None] + away[:, 0, None] < self.cfg.view_radius**2)
        count = seen.flatten(1).sum(1, keepdim=True)
        distance = length(lanes.task[:, GOAL] - position)
        task = torch.cat((lanes.task[:, CONSTANT], distance, count, action), 1)
        return lanes._replace(body=body, task=task, length=lanes.length + 1, seen=seen)

    def judge(self, before: DroneStates, after: DroneStates, sane: Tensor | bool = True) -> MoveResult:
        """Return the result of a move. sane [N, 1] is whether the action was a number; any other action is a crash."""
        cfg = self.cfg
        position = after.body[:, quad.POSITION]
        task = after.task
        height, pillar = self.terrain.touch(after.tile, position)
        x, y = after.body[:, quad.ATTITUDE][:, 1:3].chunk(2, 1)
        upright = 1 - 2 * (x * x + y * y)
        inside = ((position[:, :2] > 0) & (position[:, :2] < cfg.tile_size)).all(1, keepdim=True)
        room = torch.minimum(height, pillar)
        safe = sane & inside & (room > RADIUS) & (height < cfg.max_height)
        safe &= upright > math.cos(math.radians(cfg.max_tilt))
        there = safe & (task[:, DISTANCE] < cfg.goal_radius)

        found = (task[:, SEEN] - before.task[:, SEEN]) * (
            after.length[:, None] > 1
        )  # cells seen at the start of an episode give no reward
        reward = cfg.reward_progress * (before.task[:, DISTANCE] - task[:, DISTANCE]) + cfg.reward_cell * found
        reward += cfg.reward_success * there + cfg.reward_crash * ~safe
        reward += cfg.reward_effort * task[:, LAST].square().mean(1, keepdim=True)
        reward += cfg.reward_proximity * (1 - (room - RADIUS) / CAUTION).clamp(0, 1)
        return MoveResult(reward, there, safe)

    def sense(self, lanes: DroneStates) -> dict[str, list[Tensor]]:
        """Return the columns of the groups `policy` and `critic`."""
        cfg = self.cfg
        body = lanes.body
        task = lanes.task
        attitude = body[:, quad.ATTITUDE]
        position = body[:, quad.POSITION]
        distance = task[:, DISTANCE]
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
