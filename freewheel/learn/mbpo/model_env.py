"""The model as an environment that begins in any states, its termination rules, and its multi-step error."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from freewheel.core import Step
from freewheel.errors import SetupError
from freewheel.learn.mbpo.config import MBPOConfig
from freewheel.learn.mbpo.dynamics import Ensemble
from freewheel.learn.mbpo.task import NamedColumns, StateColumns, TaskFunction, View, find_columns, whole
from freewheel.learn.replay.rows import Batch
from freewheel.learn.spec import LearnerSpec
from freewheel.registry import own_object

Task: TypeAlias = tuple[TaskFunction | None, TaskFunction | None]  # reward, termination
POLE = 0.6  # metres, length of each pole of the double pendulum
TRUSTED = 0.95  # the share of rows at real states that defines the usual disagreement


class ModelEnv:
    """An environment of N rows, each stepped by a random elite. Fixed tensors hold its state: a step can be captured.

    The task's reward and termination are None if the model has learned them. A row ends if it terminates, if its
    prediction is not finite, or if elites disagree more than `max_disagreement` times as much as usual at real states.
    It then stays in place and is not valid any more. There is no time limit, so nothing is ever truncated.
    """

    def __init__(
        self,
        model: Ensemble,
        elites: int,
        lanes: int,
        seed: int,
        task: Task,
        view: View | None = None,
        max_disagreement: float | None = None,
    ) -> None:
        device = model.vector.device
        self.model, (self._reward, self._termination) = model, task
        self.view = whole(model.spec.columns.obs_size) if view is None else view
        self._max_disagreement = max_disagreement
        self._limit = torch.full((), torch.inf, device=device)  # largest disagreement allowed
        self.generator = torch.Generator(device).manual_seed(seed)
        self.elites = torch.arange(elites, device=device)  # [k] new elites are copied into it
        self.obs = torch.zeros(lanes, self.view.width, device=device)  # [N, D]
        self.alive = torch.zeros(lanes, dtype=torch.bool, device=device)  # [N]
        self._never = torch.zeros_like(self.alive)
        self._measures = torch.zeros(lanes, 0, device=device)

    def begin(self, states: Tensor) -> None:
        """Begin all rows at these observations [N, D]."""
        self.obs.copy_(states)
        self.alive.fill_(True)

    def calibrate(self, act: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        """Measure the usual disagreement, for the policy's actions in the states that rollouts begin in."""
        if self._max_disagreement is not None:
            action, _ = act(self.obs)
            seen = self.view.encode(self.obs, self.obs)
            found = self.model.sample(seen, action, self.elites, self.generator, compare=True).disagreement
            assert found is not None, "disagreement was requested"
            usual = found.nan_to_num(torch.inf).sort().values[int(TRUSTED * (len(found) - 1))]
            self._limit.copy_(self._max_disagreement * usual)

    @torch.no_grad()
    def step(self, action: Tensor) -> Step[Tensor]:
        seen, compare = self.view.encode(self.obs, self.obs), self._max_disagreement is not None
        drawn = self.model.sample(seen, action, self.elites, self.generator, compare=compare)
        finite = drawn.next_obs.isfinite().all(-1)
        predicted = torch.where(finite[:, None], drawn.next_obs, seen[:, : self.view.predicted])
        following = self.view.successor(self.obs, action, predicted)
        rewards = self._reward_of(drawn.reward, action, following)
        valid = self.alive & finite & following.isfinite().all(-1) & rewards.isfinite()
        if drawn.disagreement is not None:
            valid = valid & (drawn.disagreement <= self._limit)
        next_obs = torch.where(valid[:, None], following, self.obs)
        terminated = valid & self._ends(drawn.termination, action, next_obs)
        self.alive.copy_(valid & ~terminated)
        self.obs.copy_(torch.where(self.alive[:, None], next_obs, self.obs))
        return Step(torch.where(valid, rewards, 0), terminated, self._never, next_obs, valid, self._measures)

    def _reward_of(self, learned: Tensor | None, action: Tensor, next_obs: Tensor) -> Tensor:
        if self._reward is not None:
            return self._reward(self.obs, action, next_obs)
        assert learned is not None, "neither the model nor the task gives the reward"
        return learned

    def _ends(self, learned: Tensor | None, action: Tensor, next_obs: Tensor) -> Tensor:
        if self._termination is not None:
            return self._termination(self.obs, action, next_obs)
        assert learned is not None, "neither the model nor the task decides when an episode ends"
        return torch.rand(learned.shape, generator=self.generator, device=learned.device) < learned


@torch.no_grad()
def open_loop_error(model: Ensemble, elites: Tensor, batch: Batch, horizon: int, view: View) -> Tensor:
    """Return the error [horizon] of the elites' mean prediction after 1 .. horizon steps with recorded actions.

    A prediction begins at each of the consecutive rows [T, B, ...] that has enough rows ahead. It counts as long as
    next_obs is the observation of the next row and `has_successor` is not 0. The unit is the deviation of each column
    in the model's data; constant columns are left out.
    """
    obs, action, next_obs, known = batch.obs, batch.action, batch.next_obs, batch.has_successor
    starts = len(obs) - horizon + 1
    scale = model.statistics["in_scale"][: view.predicted]
    state = obs[:starts].flatten(0, 1)  # [S * B, D]
    counts = known[:starts].reshape(-1)
    errors = []
    for ahead in range(horizon):
        here = slice(ahead, ahead + starts)
        chosen, truth = action[here].reshape(len(state), -1), next_obs[here].flatten(0, 1)
        state = view.successor(state, chosen, model.expect(view.encode(state, state), chosen, elites))
        gap = (view.encode(state, truth) - view.encode(truth, truth))[:, : view.predicted]
        error = torch.where(scale > 0, gap / scale, 0).square().sum(-1)
        columns = torch.count_nonzero(scale) * counts.sum()
        errors.append((torch.where(counts > 0, error, 0).sum() / columns.clamp(min=1)).sqrt())
        if ahead + 1 < horizon:
            after = slice(ahead + 1, ahead + 1 + starts)
            follows = (next_obs[here] == obs[after]).all(-1) * known[after]
            counts = counts * follows.reshape(-1)
    return torch.stack(errors)


#: The termination rules of Gymnasium's tasks (MuJoCo v5 and classic control, default arguments) follow.
def never(_obs: Tensor, _action: Tensor, next_obs: Tensor) -> Tensor:
    return torch.zeros(len(next_obs), dtype=torch.bool, device=next_obs.device)


def hopper(_obs: Tensor, _action: Tensor, next_obs: Tensor) -> Tensor:
    """Columns: height, angle, joints, velocities (limited to ±100 in the task, but observed with a clip at ±10)."""
    height, angle, state = next_obs[:, 0], next_obs[:, 1], next_obs[:, 1:]
    return ~((height > 0.7) & (height < torch.inf) & (angle.abs() < 0.2) & (state.abs() < 100).all(-1))


def walker2d(_obs: Tensor, _action: Tensor, next_obs: Tensor) -> Tensor:
    height, angle = next_obs[:, 0], next_obs[:, 1]
    return ~((height > 0.8) & (height < 2.0) & (angle.abs() < 1.0))


def inverted_pendulum(_obs: Tensor, _action: Tensor, next_obs: Tensor) -> Tensor:
    return ~next_obs.isfinite().all(-1) | (next_obs[:, 1].abs() > 0.2)


def inverted_double_pendulum(_obs: Tensor, _action: Tensor, next_obs: Tensor) -> Tensor:
    """Columns: cart, sines of both hinges, their cosines, ... The second angle is relative to the first pole."""
    (sine, sine2), (cosine, cosine2) = next_obs[:, 1:3].unbind(-1), next_obs[:, 3:5].unbind(-1)
    tip = POLE * (cosine + cosine * cosine2 - sine * sine2)
    return tip <= 1


def cart_pole(_obs: Tensor, _action: Tensor, next_obs: Tensor) -> Tensor:
    return (next_obs[:, 0].abs() > 2.4) | (next_obs[:, 2].abs() > math.radians(12))


def acrobot(_obs: Tensor, _action: Tensor, next_obs: Tensor) -> Tensor:
    """Columns: cosine and sine of the first joint, those of the second, ... The goal is one link above the axis."""
    cosine, sine, cosine2, sine2 = next_obs[:, :4].unbind(-1)
    return -cosine - (cosine * cosine2 - sine * sine2) > 1


def ant(_obs: Tensor, _action: Tensor, next_obs: Tensor) -> Tensor:
    height = next_obs[:, 0]
    return ~(next_obs.isfinite().all(-1) & (height >= 0.2) & (height <= 1.0))


def humanoid(_obs: Tensor, _action: Tensor, next_obs: Tensor) -> Tensor:
    height = next_obs[:, 0]
    return ~((height > 1.0) & (height < 2.0))


ENDLESS = ("HalfCheetah-v5", "HumanoidStandup-v5", "Pendulum-v1", "Pusher-v5", "Reacher-v5", "Swimmer-v5")
RULES: Mapping[str, TaskFunction] = dict.fromkeys(ENDLESS, never) | {
    "Acrobot-v1": acrobot,
    "Ant-v5": ant,
    "CartPole-v1": cart_pole,
    "Hopper-v5": hopper,
    "Humanoid-v5": humanoid,
    "InvertedDoublePendulum-v5": inverted_double_pendulum,
    "InvertedPendulum-v5": inverted_pendulum,
    "Walker2d-v5": walker2d,
}


def rule(name: str, env: str, declared: TaskFunction | None = None) -> TaskFunction | None:
    """Return the function for mbpo.termination in this env, which may have declared one; None: the model learns it."""
    if name == "auto":
        return declared or RULES.get(env)
    if name == "learned":
        return None
    return never if name == "never" else task_function("mbpo.termination", name)


def task_function(option: str, place: str) -> TaskFunction:
    """Return the user's function from package.module:function."""
    found: TaskFunction = own_object(option, place, "function")
    if not callable(found):
        raise SetupError(f"{option} '{place}' is a {type(found).__name__}; name a function of (obs, action, next_obs)")
    return found


def look(config: MBPOConfig, spec: LearnerSpec) -> tuple[View, Task]:
    """Return the model's view and the functions of the task: the user's choice, else what the simulator declares."""
    world, width, mask = spec.world, spec.policy.obs_size, spec.policy.mask
    view: View = whole(width, mask)
    reward = termination = None
    if config.predicted:
        predicted, read = (
            find_columns(f"mbpo.{name}", getattr(config, name), world.slices) for name in ("predicted", "read")
        )
        view = NamedColumns(width, predicted, read, mask)
    elif world.model_task is not None:
        view = StateColumns(world.model_task, world.slices)
        reward, termination = view.function("reward"), view.function("termination")
    if config.reward != "auto":
        reward = None if config.reward == "learned" else task_function("mbpo.reward", config.reward)
    return view, (reward, rule(config.termination, world.name, termination))
