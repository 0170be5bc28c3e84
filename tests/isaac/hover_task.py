"""A task of our own for Isaac Lab: hold a box in the air by thrust and torques. It needs no file from an asset server."""

from __future__ import annotations

from typing import Any

import gymnasium
import isaaclab.sim as sim_utils  # type: ignore[import-not-found]
import torch
from isaaclab.assets import RigidObjectCfg  # type: ignore[import-not-found]
from isaaclab.envs import DirectRLEnv, DirectRLEnvCfg  # type: ignore[import-not-found]
from isaaclab.scene import InteractiveSceneCfg  # type: ignore[import-not-found]
from isaaclab.utils import configclass  # type: ignore[import-not-found]
from isaaclab_newton.physics import NewtonCfg  # type: ignore[import-not-found]
from torch import Tensor

TASK = "Local-Hover-Direct"
MASS, GRAVITY, HEIGHT = 1.0, 9.81, 1.0
EPISODE_STEPS = 60


@configclass
class HoverSceneCfg(InteractiveSceneCfg):  # type: ignore[misc]
    """A box for every env."""

    box: RigidObjectCfg = RigidObjectCfg(
        prim_path="{ENV_REGEX_NS}/Box",
        spawn=sim_utils.CuboidCfg(
            size=(0.2, 0.2, 0.05),
            rigid_props=sim_utils.RigidBodyPropertiesCfg(),
            mass_props=sim_utils.MassPropertiesCfg(mass=MASS),
            collision_props=sim_utils.CollisionPropertiesCfg(),
        ),
        init_state=RigidObjectCfg.InitialStateCfg(pos=(0.0, 0.0, HEIGHT)),
    )


@configclass
class HoverCfg(DirectRLEnvCfg):  # type: ignore[misc]
    """Control at 60 Hz from physics at 120 Hz; an episode ends after a second, or half a metre off its height."""

    decimation = 2
    episode_length_s = EPISODE_STEPS / 60
    action_space = 4  # thrust above the weight, torques about x, y and z
    observation_space = 12  # offset from the goal, gravity in the body, linear and angular velocity
    state_space = 0
    sim: sim_utils.SimulationCfg = sim_utils.SimulationCfg(dt=1 / 120, render_interval=2, physics=NewtonCfg())
    scene: HoverSceneCfg = HoverSceneCfg(num_envs=16, env_spacing=2.0, replicate_physics=True)
    thrust, torque, slack = 0.5 * MASS * GRAVITY, 0.002, 0.5


class Hover(DirectRLEnv):  # type: ignore[misc]
    """Rewards fall with the distance from the goal."""

    def __init__(self, cfg: HoverCfg, render_mode: str | None = None, **registered: object) -> None:
        super().__init__(cfg, render_mode, **registered)
        self._box = self.scene["box"]
        self._force = torch.zeros(self.num_envs, 1, 3, device=self.device)
        self._torque = torch.zeros_like(self._force)
        self._goal = self.scene.env_origins + torch.tensor([0.0, 0.0, HEIGHT], device=self.device)

    def _pre_physics_step(self, actions: Tensor) -> None:
        self._force[:, 0, 2] = MASS * GRAVITY + self.cfg.thrust * actions[:, 0]
        self._torque[:, 0] = self.cfg.torque * actions[:, 1:]

    def _apply_action(self) -> None:
        self._box.permanent_wrench_composer.set_forces_and_torques_index(forces=self._force, torques=self._torque)

    def _offset(self) -> Tensor:
        offset: Tensor = self._box.data.root_pos_w.torch - self._goal
        return offset

    def _get_observations(self) -> dict[str, Tensor]:
        data = self._box.data
        parts = (self._offset(), data.projected_gravity_b.torch, data.root_lin_vel_b.torch, data.root_ang_vel_b.torch)
        return {"policy": torch.cat(parts, dim=-1)}

    def _get_rewards(self) -> Tensor:
        return torch.exp(-4 * self._offset().norm(dim=-1))

    def _get_dones(self) -> tuple[Tensor, Tensor]:
        lost = self._offset()[:, 2].abs() > self.cfg.slack
        return lost, ~lost & (self.episode_length_buf >= self.max_episode_length)

    def _reset_idx(self, env_ids: Any) -> None:
        super()._reset_idx(env_ids)
        pose = self._box.data.default_root_pose.torch[env_ids].clone()
        pose[:, :3] += self.scene.env_origins[env_ids]
        pose[:, 2] += 0.4 * torch.rand(len(pose), device=self.device) - 0.2
        velocity = self._box.data.default_root_vel.torch[env_ids].clone()
        velocity[:, :3] += 0.4 * torch.rand(len(pose), 3, device=self.device) - 0.2
        self._box.write_root_pose_to_sim_index(root_pose=pose, env_ids=env_ids)
        self._box.write_root_velocity_to_sim_index(root_velocity=velocity, env_ids=env_ids)


gymnasium.register(
    id=TASK, entry_point=f"{__name__}:Hover", disable_env_checker=True, kwargs={"env_cfg_entry_point": HoverCfg}
)
