"""The policy on tensors: acts beside a batched simulator, and is what learners with torch train."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from freewheel.core import Array, Decision, Snapshot
from freewheel.policies.heads.head import Distribution, Reparameterised
from freewheel.policies.nets import PolicyNet
from freewheel.policies.spec import PolicySpec, network_inputs, statistics_layout


class TensorPolicy:
    """A PolicyNet with its normaliser and its random numbers, all on one device; nothing here waits for that device."""

    def __init__(self, spec: PolicySpec, rng: np.random.Generator, device: str, seed: int) -> None:
        self.spec, self.net = spec, PolicyNet(spec, rng, device)
        self.statistics = {
            name: torch.tensor(self.net.params.views[name], device=device) for name in statistics_layout(spec)
        }
        self.generator = torch.Generator(device)
        self.generator.manual_seed(seed)

    def inputs(self, obs: Tensor) -> Tensor:
        """Observations as the network reads them."""
        return network_inputs(self.spec, self.statistics, obs)

    def normalise(self, mean: Array, scale: Array) -> None:
        """Statistics of the next version."""
        for name, value in (("norm.mean", mean), ("norm.scale", scale)):
            for start, stop in self.spec.normalised:
                self.statistics[name][start:stop] = torch.as_tensor(value[start:stop])

    def distribution(self, inputs: Tensor) -> Distribution:
        return self.net.distribution(inputs, self.net.outputs(inputs))

    def rsample(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [N, A] and their log-probabilities [N]; gradients flow through both."""
        distribution = self.distribution(inputs)
        assert isinstance(distribution, Reparameterised)
        return distribution.rsample(self.generator)

    @torch.no_grad()
    def act(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Sampled actions and their log-probabilities."""
        return self.distribution(self.inputs(obs)).sample(self.generator)

    @torch.no_grad()
    def greedy(self, obs: Tensor) -> Tensor:
        """The likeliest actions."""
        return self.distribution(self.inputs(obs)).mode()

    @property
    def flat(self) -> Tensor:
        """A copy of statistics and weights in one vector."""
        return torch.cat([*self.statistics.values(), self.net.vector])

    @torch.no_grad()
    def load_flat(self, values: Array) -> None:
        """What `flat` returned, in place."""
        parts = [*self.statistics.values(), self.net.vector]
        for part, value in zip(parts, torch.as_tensor(values).split([len(part) for part in parts]), strict=True):
            part.copy_(value)

    def weights(self, *, on_device: bool) -> dict[str, Array]:
        """A copy of statistics and weights by name: on their device, or as numpy; one transfer either way."""
        flat: Array = self.flat if on_device and self.net.vector.is_cuda else self.flat.cpu().numpy()
        copies, start = {}, 0
        for name, view in self.net.params.views.items():
            copies[name] = flat[start : start + view.size].reshape(view.shape)
            start += view.size
        return copies

    @torch.no_grad()
    def load(self, snapshot: Snapshot) -> None:
        """In place: captured graphs read the new weights."""
        for name, view in (*self.statistics.items(), *self.net.named_views()):
            view.copy_(torch.as_tensor(snapshot.params[name]), non_blocking=True)

    def begin(self, params: Mapping[str, Array]) -> None:
        """Replace the first weights and statistics with these."""
        self.net.begin(params)
        for name, value in self.statistics.items():
            value.copy_(torch.from_numpy(self.net.params.views[name]))


class TensorActor:
    """A private copy of the policy beside a simulator. Implements core.Actor[Tensor], with random numbers of its own."""

    state_size = 0

    def __init__(self, spec: PolicySpec, device: str, seed: int) -> None:
        self.policy = TensorPolicy(spec, np.random.default_rng(0), device, seed)

    @property
    def generators(self) -> list[torch.Generator]:
        return [self.policy.generator]

    def load(self, snapshot: Snapshot) -> None:
        self.policy.load(snapshot)

    def act(
        self, obs: Tensor, rng: np.random.Generator, *, state: Tensor | None = None, greedy: bool = False
    ) -> Decision[Tensor]:
        state = obs.new_zeros(len(obs), 0) if state is None else state
        if greedy:
            return Decision(self.policy.greedy(obs), obs.new_zeros(len(obs), dtype=torch.float32), state)
        return Decision(*self.policy.act(obs), state)
