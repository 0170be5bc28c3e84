"""A drone that explores rough terrain between pillars on its way to a goal: many at once, in torch, on any device."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Space
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from torch import Tensor

from freewheel.errors import UsageError, nearest
from freewheel.worlds.drone import quadrotor as quad
from freewheel.worlds.drone.quadrotor import BodyConfig, Control, Quadrotor, heading, length, rotate_back, to_heading
from freewheel.worlds.drone.terrain import Terrain, TerrainConfig, grow

Obs: TypeAlias = dict[str, Tensor]

MEASURES = ("success", "crashed", "coverage", "goal_distance", "level")
RADIUS = 0.2  # m, of the drone as a ball
CAUTION = 1.0  # m: nearer to ground or pillars than this costs
#: Columns of a lane's task: its goal, wind, load, how far the goal was at first, how far it is, cells seen, the last action.
GOAL, WIND, LOAD, START, DISTANCE, SEEN = slice(0, 3), slice(3, 6), slice(6, 7), slice(7, 8), slice(8, 9), slice(9, 10)
LAST, TASK = slice(10, None), 10


@dataclass(frozen=True)
class DroneConfig(BodyConfig, TerrainConfig):
    """Everything about the world that can be chosen; see also BodyConfig and TerrainConfig."""

    episode_seconds: float = 20.0  # seconds after which an episode is truncated
    compute_final_obs: bool = False
    """Whether extras["final_obs"] holds what was observed at the end of episodes; it costs a second observation per step."""
    bounded_actions: bool = True
    """Whether the action space is Box(-1, 1) or, as Isaac Lab has it, unbounded; actions are clipped to ±1 all the same."""
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


class RoughDrone(gymnasium.Env[Obs, Tensor]):
    """Reach the goal through the forest without touching ground or pillars, and see much of the tile on the way.

    It has the contract of Isaac Lab: one Env of `num_envs` lanes, torch tensors on `device` in and out, and a lane whose
    episode ends begins the next in the same step. Observations, rewards, flags, final observations and `extras` are the same
    objects at every step, overwritten by the next. An action that is not a number is a crash.

    `policy` observes (all of the order of 1): velocity, angular velocity and gravity in the body; height above ground; the
    goal in the heading frame and its distance; the last action; the height scan; the lidar. `critic` observes the same but for
    the lidar, and what only the world knows: wind, the ground's normal, load, level, time left, distance to the nearest
    pillar, progress, coverage, and the next pillars one by one.

    extras["measures"] has a float a lane, read where an episode has just ended: success, crashed, coverage (share of the tile
    that was seen), goal_distance and level.

    A step has fixed shapes, does not wait for the device, draws only from `generator` and keeps its state in the tensors that
    `state_tensors` lists, so a CUDA graph can hold it.
    """

    metadata = {  # noqa: RUF012 - as gymnasium declares it
        "autoreset_mode": AutoresetMode.SAME_STEP,
        "capturable": True,
        "device_world": True,
        "render_modes": [],
    }

    def __init__(
        self, num_envs: int = 64, device: str = "cpu", seed: int = 0, cfg: DroneConfig | None = None, **options: Any
    ) -> None:
        self.cfg = _configured(cfg or DroneConfig(), options)
        self.num_envs, self.device = num_envs, str(device)
        self.step_dt = self.cfg.step_dt
        self.max_episode_length = math.ceil(self.cfg.episode_seconds / self.step_dt - 1e-6)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.terrain = Terrain(self.cfg, grow(self.cfg, seed), device)
        self._dynamics = Quadrotor(self.cfg, device)
        self._make_tensors()
        self._make_spaces()
        self.reset()

    def _make_tensors(self) -> None:
        cfg, lanes = self.cfg, self.num_envs

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(lanes, *shape, dtype=dtype, device=self.device)

        cells = math.ceil(cfg.tile_size)
        self._down = torch.tensor(((0.0, 0.0, -1.0),), device=self.device)  # [1, 3]
        self._middles = torch.arange(cells, device=self.device) + 0.5  # [G] of the map's cells, which are a metre wide
        self._body, self._task = zeros(quad.STATE), zeros(TASK + cfg.action_size)
        self._level, self._tile = zeros(dtype=torch.int32), zeros(dtype=torch.int32)
        self._length = zeros(dtype=torch.int64)
        self._seen = zeros(cells, cells, dtype=torch.bool)  # by y and x
        self._reward, self._terminated, self._truncated = zeros(), zeros(dtype=torch.bool), zeros(dtype=torch.bool)
        self._measures = torch.zeros(len(MEASURES), lanes, device=self.device)
        self._obs = {name: torch.cat(parts, 1) for name, parts in self._sense().items()}
        self._final = {name: obs.clone() for name, obs in self._obs.items()} if cfg.compute_final_obs else {}
        self.extras: dict[str, Any] = {"measures": dict(zip(MEASURES, self._measures, strict=True))}
        if self._final:
            self.extras["final_obs"] = self._final

    def _make_spaces(self) -> None:
        side = 1.0 if self.cfg.bounded_actions else np.inf
        boxes: dict[str, Space[Any]] = {name: Box(-np.inf, np.inf, obs.shape[1:]) for name, obs in self._obs.items()}
        self.single_observation_space, self.single_action_space = Dict(boxes), Box(-side, side, (self.cfg.action_size,))
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    @property
    def episode_length_buf(self) -> Tensor:
        """[N] steps of each lane's episode so far; what is assigned is copied into it."""
        return self._length

    @episode_length_buf.setter
    def episode_length_buf(self, value: Tensor) -> None:
        self._length.copy_(value)

    def state_tensors(self) -> list[Tensor]:
        """Every tensor that a step changes."""
        state = [self._body, self._task, self._level, self._tile, self._length, self._seen]
        answers = [self._reward, self._terminated, self._truncated, self._measures]
        return [*state, *answers, *self._obs.values(), *self._final.values()]

    @torch.no_grad()
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        """Reset all lanes to the first level; a seed makes everything after it repeatable."""
        if seed is not None:
            self.generator.manual_seed(seed)
        self._level.fill_(self.cfg.level)
        self._renew(torch.ones_like(self._terminated))
        self._observe(self._obs)
        for name, final in self._final.items():
            final.copy_(self._obs[name])
        return self._obs, self.extras

    @torch.no_grad()
    def step(self, action: Tensor) -> tuple[Obs, Tensor, Tensor, Tensor, dict[str, Any]]:  # type: ignore[override]
        self._length += 1
        sane = (action == action).all(1, keepdim=True)
        action = action.detach().nan_to_num(0.0).clamp(-1, 1)
        self._body.copy_(self._dynamics.advance(self._body, action, self._task[:, LOAD], self._task[:, WIND]))
        self._task[:, LAST] = action
        over = self._judge(sane)
        if self._final:
            self._observe(self._final)
        self._promote()
        self._renew(over)
        self._observe(self._obs)
        for name, final in self._final.items():
            torch.where(over[:, None], final, self._obs[name], out=final)
        return self._obs, self._reward, self._terminated, self._truncated, self.extras

    def _judge(self, sane: Tensor) -> Tensor:
        """Reward, flags and measures of the state just reached; which lanes are over [N]."""
        cfg, position = self.cfg, self._body[:, quad.POSITION]
        height, pillar = self.terrain.touch(self._tile, position)
        x, y = self._body[:, quad.ATTITUDE][:, 1:3].chunk(2, 1)
        upright = 1 - 2 * (x * x + y * y)
        inside = ((position[:, :2] > 0) & (position[:, :2] < cfg.tile_size)).all(1, keepdim=True)
        room = torch.minimum(height, pillar)
        safe = sane & inside & (room > RADIUS) & (height < cfg.max_height)
        safe &= upright > math.cos(math.radians(cfg.max_tilt))

        distance = length(self._task[:, GOAL] - position)
        there = safe & (distance < cfg.goal_radius)
        late = self._length[:, None] >= self.max_episode_length
        self._terminated.copy_((there | ~safe)[:, 0])
        self._truncated.copy_((late & safe & ~there)[:, 0])

        found, seen = self._explore(position)
        reward = cfg.reward_progress * (self._task[:, DISTANCE] - distance) + cfg.reward_cell * found
        reward += cfg.reward_success * there + cfg.reward_crash * ~safe
        reward += cfg.reward_effort * self._task[:, LAST].square().mean(1, keepdim=True)
        reward += cfg.reward_proximity * (1 - (room - RADIUS) / CAUTION).clamp(0, 1)
        self._reward.copy_(reward[:, 0])
        self._task[:, DISTANCE] = distance
        measures = (there.float(), ~safe, seen / self._seen[0].numel(), distance, self._level[:, None])
        self._measures.copy_(torch.cat(measures, 1).T)
        return self._terminated | self._truncated

    def _explore(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Mark what is seen from here: [N, 1] how many cells are new (at an episode's first step none), and all so far."""
        away = (self._middles - position[:, :2, None]).square()  # [N, 2, G]
        self._seen |= away[:, 1, :, None] + away[:, 0, None] < self.cfg.view_radius**2  # [N, G, G]
        seen = self._seen.flatten(1).sum(1, keepdim=True)
        found = (seen - self._task[:, SEEN]) * (self._length[:, None] > 1)
        self._task[:, SEEN] = seen
        return found, seen

    def _promote(self) -> None:
        """Move lanes whose episode is over to another level."""
        if self.cfg.curriculum:
            success, crashed, _, distance, _ = self._measures
            step = success - crashed * (distance > self._task[:, START][:, 0] / 2)
            self._level.copy_((self._level + step).clamp(0, self.cfg.levels - 1))

    def _renew(self, over: Tensor) -> None:
        """Start a new episode in the lanes that are over [N]; random numbers are drawn for all lanes."""
        cfg = self.cfg
        draws = torch.rand(self.num_envs, 6, generator=self.generator, device=self.device)
        pairs = len(self.terrain.episodes) // (cfg.levels * cfg.tiles_per_level)
        tile = self._level * cfg.tiles_per_level + _pick(draws[:, 0], cfg.tiles_per_level)
        start, goal = self.terrain.episodes.index_select(0, tile * pairs + _pick(draws[:, 1], pairs)).chunk(2, 1)
        body = self._dynamics.at_rest(start, draws[:, 2:3] * (2 * math.pi))
        wind, load = cfg.wind * (2 * draws[:, 3:5] - 1), 1 + cfg.load_spread * (2 * draws[:, 5:] - 1)
        distance = length(goal - start)
        calm = torch.zeros_like(self._task)
        task = torch.cat((goal, wind, calm[:, :1], load, distance, distance, calm[:, SEEN], calm[:, LAST]), 1)
        torch.where(over, tile, self._tile, out=self._tile)
        torch.where(over[:, None], body, self._body, out=self._body)
        torch.where(over[:, None], task, self._task, out=self._task)
        self._length *= ~over
        self._seen &= ~over[:, None, None]

    def _observe(self, out: Obs) -> None:
        for name, parts in self._sense().items():
            torch.cat(parts, 1, out=out[name])

    def _sense(self) -> dict[str, list[Tensor]]:
        """The columns of each group of the current observation."""
        cfg, body, task = self.cfg, self._body, self._task
        attitude, position, distance = body[:, quad.ATTITUDE], body[:, quad.POSITION], task[:, DISTANCE]
        yaw = heading(attitude)
        sight = self.terrain.look(self._tile, position, yaw)
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
            self._level[:, None] / cfg.levels,
            1 - self._length[:, None] / self.max_episode_length,
            sight.pillar.clamp(max=cfg.lidar_range) / cfg.lidar_range,
            1 - distance / task[:, START].clamp(min=1),
            task[:, SEEN] / self._seen[0].numel(),
            (torch.cat(pillars, 1) / cfg.lidar_range).clamp(-1, 1),
        ]
        lidar = [] if sight.lidar is None else [sight.lidar / cfg.lidar_range]
        return {"policy": plain + lidar, "critic": plain + truth}


def _pick(share: Tensor, count: int) -> Tensor:
    """A whole number below `count` from a random number in [0, 1)."""
    return (share * count).int().clamp(max=count - 1)


def _configured(cfg: DroneConfig, options: dict[str, Any]) -> DroneConfig:
    names = [field.name for field in dataclasses.fields(cfg)]
    for name in options:
        if name not in names:
            raise UsageError(f"RoughDrone has no option '{name}'{nearest(name, names)}")
    cfg = dataclasses.replace(cfg, **options)
    if cfg.control not in get_args(Control):
        raise UsageError(f"RoughDrone has no control '{cfg.control}'{nearest(cfg.control, get_args(Control))}")
    if not 0 <= cfg.level < cfg.levels:
        raise UsageError(f"RoughDrone has levels 0 to {cfg.levels - 1}, not {cfg.level}")
    return cfg
