"""An environment of drones that explore rough terrain with pillars on the way to a goal. It runs in torch on any device."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeAlias, get_args

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Space
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from torch import Tensor

from freewheel.core import NDArray, to_numpy
from freewheel.errors import UsageError, nearest
from freewheel.learn.mbpo.task import MODEL_STATE
from freewheel_drone import quadrotor as quad
from freewheel_drone.model import DroneModel
from freewheel_drone.quadrotor import Control, Quadrotor, heading, length
from freewheel_drone.render import Camera, FlightFrame
from freewheel_drone.task import DISTANCE, GOAL, LAST, LOAD, SEEN, START, WIND, DroneConfig, DroneStates, DroneTask
from freewheel_drone.terrain import Terrain, grow

Obs: TypeAlias = dict[str, Tensor]

MEASURES = ("success", "crashed", "coverage", "goal_distance", "level")


class RoughDrone(gymnasium.Env[Obs, Tensor]):
    """Drones must reach a goal without touching ground or pillars, and see much of the tile on the way.

    The environment follows the contract of Isaac Lab: one Env has `num_envs` lanes, actions and results are torch tensors on
    `device`, and a lane whose episode ends begins the next one in the same step. Observations, rewards, flags, final observations
    and `extras` are the same objects at every step, and the next step overwrites them. An action that is not a number is a crash.

    The group `policy` contains, scaled to the order of 1: velocity, angular velocity and gravity in the body frame; height above
    ground; the goal in the heading frame and its distance; the last action; the height scan; the lidar. The group `critic` has no
    lidar, but adds what only the simulator knows: wind, the ground's normal, load, level, time left, distance to the nearest
    pillar, progress, coverage, and each of the nearest pillars. With cfg.model_state, the group `model_state` contains the
    complete state, and `model_task` describes what a model of the world must learn (see model.py).

    extras["measures"] has a float for each lane, which is valid when an episode has just ended: success, crashed, coverage (share
    of the tile that was seen), goal_distance and level.

    A step has fixed shapes, does not wait for the device, draws only from `generator`, and keeps its state in the tensors that
    `state_tensors` lists. A CUDA graph can therefore capture it.
    """

    metadata = {  # noqa: RUF012 - as gymnasium declares it
        "autoreset_mode": AutoresetMode.SAME_STEP,
        "capturable": True,
        "device_world": True,
        "render_modes": ["rgb_array", "ansi"],
        "render_fps": 10,
    }

    def __init__(
        self,
        num_envs: int = 64,
        device: str = "cpu",
        seed: int = 0,
        cfg: DroneConfig | None = None,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        self.cfg = _configured(cfg or DroneConfig(), options)
        self.num_envs = num_envs
        self.device = str(device)
        self.step_dt = self.cfg.step_dt
        self.max_episode_length = self.cfg.episode_steps
        self.generator = torch.Generator(device).manual_seed(seed)
        tiles = grow(self.cfg, seed)
        self.terrain = Terrain(self.cfg, tiles, device)
        self.render_mode, self._camera = render_mode, Camera(self.cfg, tiles) if render_mode else None
        if self._camera:  # the camera copies from the device at every step
            self.metadata = {**self.metadata, "capturable": False}
        self.task = DroneTask(self.cfg, self.terrain, device)
        self.model_task = DroneModel(self.task) if self.cfg.model_state else None
        self._dynamics = Quadrotor(self.cfg, device)
        self._make_tensors()
        self._make_spaces()
        self.reset()

    def _make_tensors(self) -> None:
        cfg, lanes = self.cfg, self.num_envs

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(lanes, *shape, dtype=dtype, device=self.device)

        self._body = zeros(quad.STATE)
        self._task = zeros(LAST.start + cfg.action_size)
        self._level = zeros(dtype=torch.int32)
        self._tile = zeros(dtype=torch.int32)
        self._length = zeros(dtype=torch.int64)
        self._seen = zeros(self.task.cells, self.task.cells, dtype=torch.bool)
        self._lanes = DroneStates(self._body, self._task, self._level, self._tile, self._length, self._seen)
        self._reward = zeros()
        self._terminated = zeros(dtype=torch.bool)
        self._truncated = zeros(dtype=torch.bool)
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
        """[N] steps of each lane's episode so far. An assignment copies its values into this tensor."""
        return self._length

    @episode_length_buf.setter
    def episode_length_buf(self, value: Tensor) -> None:
        self._length.copy_(value)

    def state_tensors(self) -> list[Tensor]:
        """Return every tensor that a step changes."""
        answers = [self._reward, self._terminated, self._truncated, self._measures]
        return [*self._lanes, *answers, *self._obs.values(), *self._final.values()]

    @torch.no_grad()
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        """Reset all lanes to the first level. With a seed, everything that follows is repeatable."""
        if seed is not None:
            self.generator.manual_seed(seed)
        self._level.fill_(self.cfg.level)
        self._renew(torch.ones_like(self._terminated))
        self._observe(self._obs)
        for name, final in self._final.items():
            final.copy_(self._obs[name])
        if self._camera:
            self._camera.begin(self._moment())
        return self._obs, self.extras

    @torch.no_grad()
    def step(self, action: Tensor) -> tuple[Obs, Tensor, Tensor, Tensor, dict[str, Any]]:  # type: ignore[override]
        if self._camera and self._camera.over:
            self._camera.begin(self._moment())
        sane = (action == action).all(1, keepdim=True)
        action = action.detach().nan_to_num(0.0).clamp(-1, 1)
        body = self._dynamics.advance(self._body, action, self._task[:, LOAD], self._task[:, WIND])
        over = self._judge(self.task.move(self._lanes, body, action), sane)
        if self._camera:
            self._camera.add(self._moment())
        if self._final:
            self._observe(self._final)
        self._promote()
        self._renew(over)
        self._observe(self._obs)
        for name, final in self._final.items():
            torch.where(over[:, None], final, self._obs[name], out=final)
        return self._obs, self._reward, self._terminated, self._truncated, self.extras

    def render(self) -> NDArray | str | None:
        """Return the episode of lane 0 so far, including its end in the last step: RGB [480, 960, 3], a map as text, or None."""
        if self._camera is None:
            return None
        return self._camera.text() if self.render_mode == "ansi" else self._camera.picture()

    def _moment(self) -> FlightFrame:
        """Copy the present state of lane 0 from the device."""

        def plain(lanes: Tensor) -> NDArray:
            return to_numpy(lanes[0]).copy()

        body, length = self._body[:1], int(self._length[0])
        yaw = heading(body[:, quad.ATTITUDE])
        lidar = self.terrain.look(self._tile[:1], body[:, quad.POSITION], yaw).lidar
        success, crashed, *_ = plain(self._measures.T)
        late = "late" if self._truncated[0] else ""
        return FlightFrame(
            tile=int(self._tile[0]),
            goal=plain(self._task[:, GOAL]),
            seconds=length * self.step_dt,
            position=plain(body[:, quad.POSITION]),
            velocity=plain(body[:, quad.VELOCITY]),
            yaw=plain(yaw),
            seen=plain(self._seen),
            lidar=None if lidar is None else plain(lidar).reshape(self.cfg.lidar_channels, -1),
            reward=float(self._reward[0]) if length else 0.0,
            outcome=("success" if success else "crashed" if crashed else late) if length else "",
        )

    def _judge(self, after: DroneStates, sane: Tensor) -> Tensor:
        """Adopt the new state, write its reward, flags and measures, and return [N] whether each episode is over."""
        reward, there, safe = self.task.judge(self._lanes, after, sane)
        for here, new in zip(self._lanes, after, strict=True):
            here.copy_(new)
        late = self._length[:, None] >= self.max_episode_length
        self._terminated.copy_((there | ~safe)[:, 0])
        self._truncated.copy_((late & safe & ~there)[:, 0])
        self._reward.copy_(reward[:, 0])
        coverage, distance = self._task[:, SEEN] / self._seen[0].numel(), self._task[:, DISTANCE]
        self._measures.copy_(torch.cat((there.float(), ~safe, coverage, distance, self._level[:, None]), 1).T)
        return self._terminated | self._truncated

    def _promote(self) -> None:
        """Move the lanes whose episode is over to another level."""
        if self.cfg.curriculum:
            success, crashed, _, distance, _ = self._measures
            step = success - crashed * (distance > self._task[:, START][:, 0] / 2)
            self._level.copy_((self._level + step).clamp(0, self.cfg.levels - 1))

    def _renew(self, over: Tensor) -> None:
        """Start a new episode in the lanes that are over [N]. Random numbers are drawn for all lanes."""
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
        """Return the columns of each group of the current observation."""
        groups = self.task.sense(self._lanes)
        return groups if self.model_task is None else groups | {MODEL_STATE: self.model_task.state_of(self._lanes)}


def _pick(share: Tensor, count: int) -> Tensor:
    """Return an integer below `count` for a random number in [0, 1)."""
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
