"""Soft actor-critic for Box actions. One action, drawn with a gradient, estimates each expected value."""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.learn.sac.update import Improvement, SACUpdate


class ContinuousUpdate(SACUpdate):
    """Critics read the observation and the action. The default entropy target is minus the number of action columns."""

    def future(self, following: Tensor, temperature: Tensor) -> Tensor:
        action, log_prob = self.policy.rsample(following)
        return self.critics.lower_target(torch.cat([self.seen(following), action], -1)) - temperature * log_prob

    def values(self, inputs: Tensor, action: Tensor) -> Tensor:
        return self.critics(torch.cat([self.seen(inputs), action], -1))

    def improve(self, inputs: Tensor, temperature: Tensor) -> Improvement:
        action, log_prob = self.policy.rsample(inputs)
        q = self.critics(torch.cat([self.seen(inputs), action], -1), self.critics.frozen)
        with torch.no_grad():  # the actor's loss is temperature × log_prob - q
            each, by_q = self.critics.for_actor(q)
            by_q = by_q * (-1.0 / len(each))
            by_log_prob = (temperature / len(each)).expand_as(log_prob)
            value, entropy = each.mean(), -log_prob.mean()
        torch.autograd.backward([q, log_prob], [by_q, by_log_prob])
        given = self.config.target_entropy
        return Improvement(value, entropy, entropy - (-float(self.net.spec.action_size) if given is None else given))
