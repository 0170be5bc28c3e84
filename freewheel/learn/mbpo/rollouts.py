"""Rollouts of the model: the present policy acts in it from real states, by replays of one captured step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from freewheel.core import Compile
from freewheel.learn.mbpo.model_env import ModelEnv
from freewheel.learn.replay.rows import pack
from freewheel.policies.nets import TensorPolicy
from freewheel.rollout.graphs import Program


class Rollouts:
    """N parallel rollouts of up to `longest` steps. Fixed tensors hold all state: a step is captured once."""

    def __init__(self, env: ModelEnv, policy: TensorPolicy, longest: int, compile_: Compile) -> None:
        self.env, self.policy, self._compile = env, policy, compile_
        (lanes, obs_size), columns = env.obs.shape, env.model.spec.columns
        width = replace(columns, obs_size=obs_size).width
        self._rows = torch.zeros(longest, lanes, width, device=env.obs.device)
        self._valid = torch.zeros(longest, lanes, dtype=torch.bool, device=env.obs.device)
        self._number = torch.zeros(1, dtype=torch.int64, device=env.obs.device)  # index of the next step
        self._step: Program | None = None
        self._steps = 0  # steps of the present rollouts
        self.between_steps: Callable[[], None] = lambda: None  # an exception from it ends the rollouts

    @property
    def rows(self) -> Tensor:
        """The valid rows [n, width] of the steps so far, in order of steps."""
        return self._rows[: self._steps][self._valid[: self._steps]]

    def __call__(self, states: Tensor, length: int) -> None:
        """Make rollouts of `length` steps from these observations [N, D]."""
        self._steps = 0
        self.env.begin(states)
        self.env.calibrate(self.policy.act)
        self._number.zero_()
        if self._step is None:
            env = self.env
            state = [env.obs, env.alive, self._rows, self._valid, self._number]
            generators = [env.generator, self.policy.generator]
            self._step = Program(self._one_step, self._compile, state=state, generators=generators)
        for _ in range(length):
            self._step()
            self._steps += 1
            self.between_steps()

    def _one_step(self) -> None:
        obs = self.env.obs.clone()
        action, _ = self.policy.act(obs)
        step = self.env.step(action)
        known = torch.ones_like(step.valid)
        rows = pack(obs, action, step.reward, step.terminated, known, step.next_obs)
        self._rows.index_copy_(0, self._number, rows[None])
        self._valid.index_copy_(0, self._number, step.valid[None])
        self._number += 1
