"""What references of soft actor-critic share: networks in float64, and torch's own Adam for each of three losses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from freewheel.core import Array
from freewheel.learn.sac.config import SACConfig
from freewheel.learn.sac.update import LOSSES, SACUpdate
from freewheel.policies.spec import PolicySpec

ACTOR, CRITICS, TEMPERATURE = range(3)  # what a loss moves


@dataclass
class Reference:
    """A copy of an update's agent. What follows from a batch is the subclass's."""

    config: SACConfig
    spec: PolicySpec
    weights: Mapping[str, Array]
    actor: list[nn.Parameter]
    critics: list[list[nn.Parameter]]
    log_temperature: nn.Parameter

    def __post_init__(self) -> None:
        self.targets = [[part.detach().clone() for part in critic] for critic in self.critics]
        trained = (self.actor, [*itertools.chain(*self.critics)], [self.log_temperature])
        self._trained = trained
        self._optimisers = [torch.optim.Adam(parts, lr=self.config.lr) for parts in trained]
        self.grads: dict[int, list[Tensor]] = {}  # of the last step, by what they move
        self.losses: dict[str, float] = {}  # what the last step should say, by name

    @classmethod
    def of(cls, update: SACUpdate) -> Self:
        weights, spec = update.policy.weights(on_device=False), update.net.spec
        names = [f"actor.{i}.{part}" for i in range(len(spec.hidden) + 1) for part in ("weight", "bias")]
        actor = [nn.Parameter(torch.tensor(weights[name]).double()) for name in names]
        critics = [[nn.Parameter(part[i].detach().double()) for part in update.critics.parameters] for i in range(2)]
        return cls(update.config, spec, weights, actor, critics, nn.Parameter(update.log_temperature.double().clone()))

    def mlp(self, parts: Sequence[Tensor], x: Tensor, *, norm: bool = False) -> Tensor:
        for i in range(0, len(parts), 2):
            x = x @ parts[i] + parts[i + 1]
            if i < len(parts) - 2:
                x = torch.tanh(functional.layer_norm(x, x.shape[-1:]) if norm else x)
        return x

    def descend(self, which: int, loss: Any) -> None:
        self._optimisers[which].zero_grad()
        loss.backward()
        self.grads[which] = [part.grad.clone() for part in self._trained[which] if part.grad is not None]
        self._optimisers[which].step()

    def say(self, *losses: Any) -> None:
        """In the order of update.LOSSES."""
        self.losses = {name: float(loss) for name, loss in zip(LOSSES, losses, strict=True)}

    def follow(self) -> None:
        """The targets follow the critics."""
        with torch.no_grad():
            for target, part in zip(itertools.chain(*self.targets), itertools.chain(*self.critics), strict=True):
                target.copy_((1 - self.config.tau) * target + self.config.tau * part)

    def assert_equal(self, update: SACUpdate) -> None:
        """The update's agent is this one, after the same step, with the same gradients and losses."""
        pairs: list[tuple[Any, Tensor]] = list(zip(update._actor, self.actor, strict=True))
        pairs += zip([one.grad for one in update._actor], self.grads[ACTOR], strict=True)
        flat, parts = update.critics.views(update.critics.target), len(update.critics.parameters)
        for i, (parameter, target) in enumerate(zip(update.critics.parameters, flat, strict=True)):
            for twin in range(2):
                pairs += [(parameter[twin], self.critics[twin][i]), (target[twin], self.targets[twin][i])]
                pairs += [(parameter.grad[twin], self.grads[CRITICS][twin * parts + i])]  # type: ignore[index]
        pairs += zip([update.log_temperature.grad], self.grads.get(TEMPERATURE, []), strict=False)
        for ours, theirs in [*pairs, (update.log_temperature, self.log_temperature)]:
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
        assert update.losses() == pytest.approx(self.losses, rel=1e-4, abs=1e-5)


def assert_goes_on(update_for: Callable[[int], SACUpdate]) -> None:
    """An agent of another seed that takes over a state makes the same next step, bit for bit."""
    ours, theirs = update_for(0), update_for(3)
    for _ in range(2):
        ours.step()
    theirs.load_state_dict(ours.state_dict())
    for update in (ours, theirs):
        update.step()
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == other.keys()
    assert all(np.array_equal(mine[name], other[name]) for name in mine)
    assert not np.array_equal(mine["params"], update_for(0).state_dict()["params"])
