"""Soft actor-critic for discrete actions. The probability of every action is known, so expectations are exact sums."""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.learn.sac.update import Improvement, SACUpdate
from freewheel.policies.spec import Enumerated


class DiscreteUpdate(SACUpdate):
    """Critics read the observation and give a value for every action. Actions that a mask forbids have probability 0,
    and do not count in sums or in the maximum of the entropy."""

    def future(self, following: Tensor, temperature: Tensor) -> Tensor:
        log_p = self._log_p(following)
        lower = self.critics.lower_target(self.seen(following))  # [N, K]
        return (log_p.exp() * (lower - temperature * log_p)).sum(-1)

    def values(self, inputs: Tensor, action: Tensor) -> Tensor:
        every = self.critics(self.seen(inputs))  # [C, N, K]
        return every.gather(-1, action.long().expand(len(every), -1, 1)).squeeze(-1)

    def improve(self, inputs: Tensor, temperature: Tensor) -> Improvement:
        log_p = self._log_p(inputs)
        with torch.no_grad():
            p = log_p.exp()
            q = self.critics.for_actor(self.critics(self.seen(inputs)))[0]  # [N, K]
            # The loss is Σ p (temperature × log p - q). Its slope by log p has another term, temperature × p, which the
            # normalisation of log p cancels.
            slope = p * (temperature * log_p - q) / len(p)
            value, entropy = (p * q).sum(-1).mean(), -(p * log_p).sum(-1)
            excess = (entropy - self._wanted(inputs)).mean()
        torch.autograd.backward([log_p], [slope])
        return Improvement(value, entropy.mean(), excess)

    def _wanted(self, inputs: Tensor) -> Tensor:
        """Return the target of the entropy in each row, [N] or [1]."""
        spec, given = self.net.spec, self.config.target_entropy
        if given is not None:
            return inputs.new_full((1,), given)
        if spec.mask is None:
            allowed = inputs.new_full((1,), float(spec.action_size))
        else:
            allowed = (inputs[:, slice(*spec.mask)] > 0).sum(-1).clamp(min=1)
        return self.config.entropy_share * allowed.log()

    def _log_p(self, inputs: Tensor) -> Tensor:
        distribution = self.policy.distribution(inputs)
        assert isinstance(distribution, Enumerated)
        return distribution.log_p
