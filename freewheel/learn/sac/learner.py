"""SAC: soft actor-critic as a learner over a replay buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from freewheel.core import NDArray, to_numpy
from freewheel.errors import SetupError
from freewheel.learn.chunks import under
from freewheel.learn.data_parallel import gathered
from freewheel.learn.replay.n_step import Successors
from freewheel.learn.replay.priority import ByError, Recent, Uniform
from freewheel.learn.replay_learner import ReplayLearner
from freewheel.learn.sac.config import SACConfig, first_temperature
from freewheel.learn.sac.continuous import ContinuousUpdate
from freewheel.learn.sac.discrete import DiscreteUpdate
from freewheel.learn.sac.update import SACUpdate
from freewheel.learn.spec import OBS_STATISTICS, POLICY, LearnerSpec
from freewheel.policies.spec import HEADS


def update_for(config: SACConfig, spec: LearnerSpec) -> type[SACUpdate]:
    """Return the gradient step for the kind of actions, which the policy's head decides."""
    head = HEADS[spec.policy.head]
    if head.discrete:
        return DiscreteUpdate
    if head.reparameterised:
        return ContinuousUpdate
    found = f"{spec.world.name or 'this world'} has the head {head.name}"
    remedy = "use policy.head auto, or another algorithm"
    raise SetupError(f"{config.name} needs a head whose actions are discrete or have a gradient; {found}: {remedy}")


def priority_for(config: SACConfig, spec: LearnerSpec) -> Uniform:
    """Return the priority for draws of rows."""
    if config.priority == "td":
        alpha, beta = config.priority_alpha, config.priority_beta
        return ByError(config.rows_kept(spec), spec.compute.device, alpha=alpha, beta=beta)
    return Recent(config.recency) if config.priority == "recent" else Uniform()


def successors_for(config: SACConfig, spec: LearnerSpec) -> Successors | None:
    """Return the links between rows for n-step returns; None: returns are over one step."""
    rows, lanes, device = config.rows_kept(spec), spec.batch.lanes, spec.compute.device
    steps, gamma = config.n_step, config.gamma
    return None if steps == 1 else Successors(rows, lanes, device, steps=steps, gamma=gamma)


class SAC(ReplayLearner):
    """Soft actor-critic over a replay buffer."""

    remedy = "lower its lr, set critic_norm, or scale rewards"
    config: SACConfig
    updater: SACUpdate

    def __init__(self, config: SACConfig, spec: LearnerSpec) -> None:
        update = update_for(config, spec)
        super().__init__(
            config,
            spec,
            lambda draw: update(config, spec, draw, generators=[self.replay.generator]),
            priority=priority_for(config, spec),
            successors=successors_for(config, spec),
        )
        self.updater.priority = self.replay.priority

    def before_updates(self) -> None:
        """Set a temperature that no option sets, from the first rewards of all learners, unless one was adopted."""
        super().before_updates()
        config, temperature = self.config, self.updater.log_temperature
        if config.temperature is None and config.first_temperature is None and not float(temperature):
            rows = self.replay.newest(self.replay.count)[: self.pace.starts]
            rewards = to_numpy(self.replay.columns.split(rows).reward)
            temperature.fill_(math.log(first_temperature(gathered(self._peers, rewards))))

    def learned(self) -> dict[str, NDArray]:
        """Return policy, critics, targets, temperature and observation statistics. MBPO does not add its model."""
        self._keep_finite()
        updater = self.updater
        found = {f"{POLICY}{name}": to_numpy(value) for name, value in updater.policy.weights(on_device=False).items()}
        found |= {name: to_numpy(value).copy() for name, value in updater.beside_policy.items()}
        return found if self._moments is None else found | {OBS_STATISTICS: self._moments.state()}

    def adopt(self, learned: Mapping[str, NDArray]) -> None:
        self.updater.policy.load_weights(under(POLICY, learned))
        for name, value in self.updater.beside_policy.items():
            value.copy_(torch.as_tensor(learned[name]))
        if self._moments is not None:
            self._moments.restore(learned[OBS_STATISTICS])
            self.updater.policy.normalise(self._moments.mean, 1.0 / self._moments.deviation)

    @property
    def learning_rate(self) -> float:
        """The learning rate of actor, critics and temperature."""
        return self.updater.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.updater.learning_rate = value
