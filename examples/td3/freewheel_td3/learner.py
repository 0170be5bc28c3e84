"""TD3: twin critics, delayed updates of the policy, and noise on the actions that targets are computed for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from freewheel.core import Array, Learner
from freewheel.learn.replay.rows import ReplayMinibatch
from freewheel.learn.replay_learner import ReplayLearner
from freewheel.learn.sac.critics import Critics
from freewheel.learn.spec import Algorithm, LearnerSpec, ReplayConfig
from freewheel.policies.nets import TensorPolicy
from freewheel.policies.spec import select
from freewheel.seeding import generator, tree


@dataclass(frozen=True)
class TD3Config(ReplayConfig):
    """Twin delayed deep deterministic policy gradients."""

    name: ClassVar[str] = "td3"

    policy_delay: int = 2
    """Updates of the critics for every update of the policy."""
    target_noise: float = 0.2
    """Standard deviation of the noise on target actions; it is clipped at 2.5 times this."""

    def build(self, spec: LearnerSpec) -> Learner:
        return ReplayLearner(self, spec, partial(TD3Update, self, spec))


class TD3Update:
    """One gradient step on a batch from the replay buffer."""

    def __init__(self, config: TD3Config, spec: LearnerSpec, draw: Callable[[], ReplayMinibatch]) -> None:
        self.config, self.draw, device = config, draw, spec.compute.device
        seed = tree(spec.seed, "learner", "noise")
        self.policy, self.target = (
            TensorPolicy(spec.policy, generator(spec.seed, "weights"), device, seed) for _ in range(2)
        )
        self.critics = Critics(spec.policy, generator(spec.seed, "critics"), device)
        self.generators = [self.policy.generator]
        self.actor_adam = torch.optim.Adam(self.policy.net.module.parameters(), config.lr)
        self.critics_adam = torch.optim.Adam(self.critics.parameters, config.lr)
        self.unread, self.fallback, self._steps = 0, "", 0
        self._sums = torch.zeros(2, device=device)

    def step(self) -> None:
        config, batch = self.config, self.draw()
        x, following = self.policy.inputs(batch.obs), self.policy.inputs(batch.next_obs)
        with torch.no_grad():
            goal = batch.reward + batch.discount * self._future(following)
        loss = (self.critics(self._pair(x, batch.action)) - goal).square().mean(1).sum()
        self.critics_adam.zero_grad()
        loss.backward()
        self.critics_adam.step()
        self._steps += 1
        if self._steps % config.policy_delay == 0:
            value = self.critics(self._pair(x, self.policy.distribution(x).mode()), self.critics.frozen)[0].mean()
            self.actor_adam.zero_grad()
            (-value).backward()
            self.actor_adam.step()
            self.critics.follow(config.tau)
            with torch.no_grad():
                self.target.net.vector.lerp_(self.policy.net.vector, config.tau)
            self._sums[1] += value.detach()
        self._sums[0] += loss.detach()
        self.unread += 1

    def _future(self, following: Tensor) -> Tensor:
        action, spread = self.target.distribution(following).mode(), self.config.target_noise
        noise = torch.empty_like(action).normal_(0, spread, generator=self.policy.generator)
        noisy = (action + noise.clamp(-2.5 * spread, 2.5 * spread)).clamp(-1, 1)
        return self.critics.lower_target(self._pair(following, noisy))

    def _pair(self, inputs: Tensor, action: Tensor) -> Tensor:
        return torch.cat([select(self.policy.spec.critic_columns, inputs), action], -1)

    def losses(self) -> dict[str, float]:
        """Means since the last call."""
        (critic, value), steps = self._sums.tolist(), max(1, self.unread)
        self._sums.zero_()
        self.unread = 0
        return {"loss/critic": critic / steps, "value/q_mean": value * self.config.policy_delay / steps}

    def state_dict(self) -> dict[str, Array]:
        tensors = {"policy": self.policy.flat, "target": self.target.flat, "critics": self.critics.vector}
        return {name: value.cpu().numpy().copy() for name, value in tensors.items()}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self.policy.load_flat(state["policy"])
        self.target.load_flat(state["target"])
        self.critics.vector.copy_(torch.as_tensor(state["critics"]))


DEFAULTS = {"num_steps_per_env": 1, "policy": {"hidden": [64, 64], "activation": "relu", "head": "deterministic"}}
ALGORITHM = Algorithm("td3", TD3Config, DEFAULTS)
