"""The gradient step of soft actor-critic for all kinds of actions: one fixed-shape computation on a packed batch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from freewheel.core import Array, Compile
from freewheel.learn.adam import FusedAdam
from freewheel.learn.data_parallel import NO_GRAPH, own_seed, sum_gradients
from freewheel.learn.replay.priority import Uniform
from freewheel.learn.replay.rows import ReplayMinibatch
from freewheel.learn.sac.config import SACConfig
from freewheel.learn.sac.critics import Critics
from freewheel.learn.spec import LearnerSpec
from freewheel.policies.nets import TensorPolicy
from freewheel.policies.spec import actor_layout, select
from freewheel.rollout.graphs import Program
from freewheel.seeding import generator, tree

LOSSES = ("loss/critic", "policy/temperature", "value/q_mean", "policy/entropy")


class Improvement(NamedTuple):
    """Results of the actor's step, each a mean over rows."""

    value: Tensor  # the critics' value of the actor's actions
    entropy: Tensor  # entropy of the policy
    excess: Tensor  # entropy minus its target


class SACUpdate(ABC):
    """Actor, critics and temperature. `step` draws a batch, updates all of them once, and never waits for the device.
    Subclasses implement what depends on the kind of actions."""

    def __init__(
        self,
        config: SACConfig,
        spec: LearnerSpec,
        draw: Callable[[], ReplayMinibatch],
        *,
        generators: list[torch.Generator],
    ) -> None:
        self.config, self.draw, device = config, draw, spec.compute.device
        noise = tree(own_seed(spec), "learner", "noise")
        self.policy = TensorPolicy(spec.policy, generator(spec.seed, "weights"), device, noise)
        if spec.start is not None:  # it has no SAC critics, so they start from random weights
            self.policy.begin(spec.start.params)
        self.net = self.policy.net
        weights, norm = generator(spec.seed, "critics"), config.critic_norm
        subset = config.critic_subset
        self.critics = Critics(spec.policy, weights, device, count=config.critics, subset=subset, norm=norm)
        start = config.temperature or config.first_temperature or 1.0
        self.log_temperature = torch.tensor([math.log(start)], device=device)
        self._actor = self._trainable(spec)
        learned = [self.log_temperature] if config.temperature is None else []
        self._lr = config.lr
        self._actor_adam = FusedAdam([*self._actor, *learned], config.lr)
        self._critics_adam = FusedAdam(self.critics.parameters, config.lr)
        critics, targets = self.critics.vector, self.critics.target
        #: Everything that is learned except the policy.
        self.beside_policy = {"critics": critics, "targets": targets, "temperature": self.log_temperature}
        self._losses = torch.zeros(len(LOSSES), device=device)
        self._state = {**self.beside_policy, "losses": self._losses}  # without the policy
        for number, adam in enumerate((self._actor_adam, self._critics_adam)):
            self._state |= {f"adam.{number}.{i}": value for i, value in enumerate(adam.state)}
        self.unread = 0  # updates since `losses` was last called
        self._peers = spec.services.peers
        self._compile: Compile = spec.compute.compile if self._peers.count == 1 else "off"
        self._no_graph = NO_GRAPH if self._compile != spec.compute.compile else ""
        self.generators = [*generators, self.policy.generator, self.critics.generator]  # used by an update
        self.priority = Uniform()  # gets the errors of rows if it wants them
        self._program: Program | None = None

    def step(self) -> None:
        if self._program is None:
            state = [self.net.vector, *self._state.values(), *self.priority.tensors]
            self._program = Program(self._update, self._compile, state=state, generators=self.generators)
        self._program()
        self.unread += 1

    @property
    def fallback(self) -> str:
        """Why there is no CUDA graph where one was requested."""
        return self._no_graph if self._program is None else self._no_graph or self._program.fallback

    @property
    def learning_rate(self) -> float:
        return self._lr

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._lr = value
        for adam in (self._actor_adam, self._critics_adam):
            adam.lr.fill_(value)  # in place: a graph reads it there

    def losses(self) -> dict[str, float]:
        """Return means since the last call. This waits for the device."""
        sums, steps = self._losses.tolist(), max(1, self.unread)
        self._losses.zero_()
        self.unread = 0
        return {name: value / steps for name, value in zip(LOSSES, sums, strict=True)}

    def state_dict(self) -> dict[str, Array]:
        tensors = self._state | {"params": self.policy.flat, "noise": self.policy.generator.get_state()}
        tensors |= {"subsets": self.critics.generator.get_state()}
        state: dict[str, Array] = {name: value.cpu().numpy().copy() for name, value in tensors.items()}
        return state | {"learning_rate": np.array(self._lr), "unread": np.array(self.unread)}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        tensors = {name: torch.as_tensor(np.array(value)) for name, value in state.items()}
        self.policy.load_flat(tensors["params"])
        self.learning_rate = float(state["learning_rate"])
        self.policy.generator.set_state(tensors["noise"])
        self.critics.generator.set_state(tensors["subsets"])
        self.unread = int(state["unread"])
        for name, value in self._state.items():
            value.copy_(tensors[name])

    @abstractmethod
    def future(self, following: Tensor, temperature: Tensor) -> Tensor:
        """Return the soft value [N] of successors by the target critics. `following` holds their network inputs."""

    @abstractmethod
    def values(self, inputs: Tensor, action: Tensor) -> Tensor:
        """Return each critic's values [C, N] of the recorded actions [N, A], with a gradient."""

    @abstractmethod
    def improve(self, inputs: Tensor, temperature: Tensor) -> Improvement:
        """Write the gradient of the actor's loss, and return statistics of the step."""

    def seen(self, inputs: Tensor) -> Tensor:
        """Return the columns that critics read."""
        columns: Tensor = select(self.net.spec.critic_columns, inputs)
        return columns

    def _update(self) -> None:
        batch = self.draw()
        x, following = self.policy.inputs(batch.obs), self.policy.inputs(batch.next_obs)
        temperature = self.log_temperature.exp()
        with torch.no_grad():
            future = self.future(following, temperature)
            goal = torch.addcmul(batch.reward, batch.discount, future)
        q = self.values(x, batch.action)
        error = q.detach() - goal  # [C, N]
        slope = error if batch.weight is None else error * batch.weight  # of the loss, half the weighted square
        self._critics_adam.forget()
        torch.autograd.backward([q], [slope / len(goal)])
        with torch.no_grad():
            loss, share = (error * slope).mean() * 0.5 * len(error), len(goal) / self.config.batch
            about = sum_gradients(self._peers, self.critics.parameters, loss[None], share)
        self._critics_adam.step()
        self.critics.follow(self.config.tau)
        if batch.places is not None:
            self.priority.learned(batch.places, error[:, : len(batch.places)].abs().mean(0))

        self._actor_adam.forget()
        found = self.improve(x, temperature)
        self.log_temperature.grad = found.excess.reshape(1)
        with torch.no_grad():
            shown = torch.stack([temperature.squeeze(0), found.value, found.entropy])
            about = torch.cat([about, sum_gradients(self._peers, self._actor_adam.parameters, shown, share)])
        self._actor_adam.step()
        with torch.no_grad():
            self._losses += about

    def _trainable(self, spec: LearnerSpec) -> list[nn.Parameter]:
        """Return the actor's parameters of the policy, or all parameters of a user's module."""
        names = actor_layout(spec.policy)
        chosen = [p for name, p in self.net.module.named_parameters() if spec.policy.module or name in names]
        for parameter in self.net.module.parameters():
            parameter.requires_grad_(any(parameter is one for one in chosen))
        return chosen
