"""The model as an environment: begins from any states, never resets, keeps its shapes; and its error over several steps."""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.core import Step
from freewheel.learn.mbpo.dynamics import Ensemble
from freewheel.learn.mbpo.terminations import TaskFunction


class ModelEnv:
    """N rows stepped by a random elite each. All of its state is in fixed tensors, so that a step can be captured.

    `reward` and `termination` are functions of the task, or None where the model has learned them. A row that ends, or whose
    prediction is not finite, stays where it is and is no longer valid. There is no time limit: nothing is ever truncated.
    """

    def __init__(
        self,
        model: Ensemble,
        elites: int,
        lanes: int,
        generator: torch.Generator,
        reward: TaskFunction | None,
        termination: TaskFunction | None,
    ) -> None:
        device = model.vector.device
        self.model, self.generator = model, generator
        self.elites = torch.arange(elites, device=device)  # [k] copy new ones into it
        self.obs = torch.zeros(lanes, model.spec.columns.obs_size, device=device)  # [N, D]
        self.alive = torch.zeros(lanes, dtype=torch.bool, device=device)  # [N]
        self._reward, self._termination = reward, termination
        self._never = torch.zeros_like(self.alive)
        self._measures = torch.zeros(lanes, 0, device=device)

    def begin(self, states: Tensor) -> None:
        """Begin all rows from these observations [N, D]."""
        self.obs.copy_(states)
        self.alive.fill_(True)

    def autoreset(self) -> Tensor:
        """What to act on next [N, D]; a step overwrites it."""
        return self.obs

    @torch.no_grad()
    def step(self, action: Tensor) -> Step[Tensor]:
        drawn = self.model.sample(self.obs, action, self.elites, self.generator)
        rewards = self._reward_of(drawn.reward, action, drawn.next_obs)
        valid = self.alive & drawn.next_obs.isfinite().all(-1) & rewards.isfinite()
        next_obs = torch.where(valid[:, None], drawn.next_obs, self.obs)
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
def open_loop_error(
    model: Ensemble,
    elites: Tensor,
    obs: Tensor,
    action: Tensor,
    next_obs: Tensor,
    horizon: int,
    has_successor: Tensor | None = None,
) -> Tensor:
    """How wrong the elites' mean prediction is after 1 .. horizon steps along recorded actions, [horizon].

    Of consecutive rows [T, B, ...], every one that has `horizon` rows ahead begins a prediction, which counts while next_obs is
    the observation of the row after; rows whose `has_successor` [T, B] is 0 do not count. The unit is the deviation of each
    observed column in the data; constant ones are left out.
    """
    size = model.spec.columns.obs_size
    starts = len(obs) - horizon + 1
    scale = model.statistics["in_scale"][:size]
    state = obs[:starts].reshape(-1, size)  # [S * B, D]
    known = torch.ones_like(obs[..., 0]) if has_successor is None else has_successor
    counts = known[:starts].reshape(-1)
    errors = []
    for ahead in range(horizon):
        here = slice(ahead, ahead + starts)
        state = model.expect(state, action[here].reshape(len(state), -1), elites)
        truth = next_obs[here].reshape(len(state), -1)
        error = torch.where(scale > 0, (state - truth) / scale, 0).square().sum(-1)
        columns = torch.count_nonzero(scale) * counts.sum()
        errors.append((torch.where(counts > 0, error, 0).sum() / columns.clamp(min=1)).sqrt())
        if ahead + 1 < horizon:
            after = slice(ahead + 1, ahead + 1 + starts)
            follows = (next_obs[here] == obs[after]).all(-1) * known[after]
            counts = counts * follows.reshape(-1)
    return torch.stack(errors)
