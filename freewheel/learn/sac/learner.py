"""SAC: soft actor-critic as a learner over a replay buffer."""

from __future__ import annotations

from freewheel.errors import SetupError
from freewheel.learn.replay_learner import ReplayLearner
from freewheel.learn.sac.config import SACConfig
from freewheel.learn.sac.continuous import ContinuousUpdate
from freewheel.learn.sac.discrete import DiscreteUpdate
from freewheel.learn.sac.update import SACUpdate
from freewheel.learn.spec import LearnerSpec
from freewheel.policies.spec import HEADS


def update_for(config: SACConfig, spec: LearnerSpec) -> type[SACUpdate]:
    """The gradient step for these actions, by what their head can do."""
    head = HEADS[spec.policy.head]
    if head.discrete:
        return DiscreteUpdate
    if head.reparameterised:
        return ContinuousUpdate
    found = f"{spec.world.name or 'this world'} has the head {head.name}"
    remedy = "use policy.head auto, or another algorithm"
    raise SetupError(f"{config.name} needs a head whose actions are discrete or have a gradient; {found}: {remedy}")


class SAC(ReplayLearner):
    """Soft actor-critic over a replay buffer. Implements core.AdjustableLearner."""

    remedy = "lower its lr, set critic_norm, or scale rewards"
    updater: SACUpdate

    def __init__(self, config: SACConfig, spec: LearnerSpec) -> None:
        update = update_for(config, spec)
        super().__init__(config, spec, lambda draw: update(config, spec, draw, generators=[self.replay.generator]))

    @property
    def learning_rate(self) -> float:
        """Of actor, critics and temperature."""
        return self.updater.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.updater.learning_rate = value
