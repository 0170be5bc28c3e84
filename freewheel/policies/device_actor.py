"""The policy on tensors: acts where its simulator lives, and is what a learner with a replay buffer trains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from freewheel.core import Array, Decision, NDArray, Snapshot
from freewheel.policies.nets import Categorical, PolicyNet
from freewheel.policies.numpy_actor import EDGE, HALF_LOG_2PI
from freewheel.policies.spec import CLIP, LOG_STD, PolicySpec, statistics_layout


class TensorPolicy:
    """A PolicyNet with its normaliser and its dice, all on one device; nothing here waits for that device."""

    def __init__(self, spec: PolicySpec, rng: np.random.Generator, device: str, seed: int) -> None:
        self.spec, self.net = spec, PolicyNet(spec, rng, device)
        self.mean, self.scale = (
            torch.tensor(self.net.params.views[name], device=device) for name in statistics_layout(spec)
        )
        self.dice = torch.Generator(device)
        self.dice.manual_seed(seed)

    def inputs(self, obs: Tensor) -> Tensor:
        """Observations as the network sees them."""
        if not self.spec.rescales:
            return obs
        scaled = (obs - self.mean) * self.scale
        for start, stop in self.spec.normalised:
            scaled[..., start:stop].clamp_(-CLIP, CLIP)
        return scaled

    def normalise(self, mean: NDArray, scale: NDArray) -> None:
        """Statistics of the next version."""
        views = self.net.params.views
        for start, stop in self.spec.normalised:
            views["norm.mean"][start:stop], views["norm.scale"][start:stop] = mean[start:stop], scale[start:stop]
        self.refresh()

    def squashed(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [N, A] of a squashed head and their log-probability [N]; gradients flow through both."""
        head = self.net.head(inputs)
        noise = torch.empty_like(head[..., : self.spec.action_size]).normal_(generator=self.dice)
        action, log_prob = _Squash.apply(head, noise)  # type: ignore[no-untyped-call]
        return action, log_prob

    @torch.no_grad()
    def act(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Actions and their log-probabilities, drawn."""
        inputs = self.inputs(obs)
        if self.spec.head == "squashed":
            action, log_prob = self.squashed(inputs)
            return action.clamp(-EDGE, EDGE), log_prob
        law = self.net.law(inputs, self.net.head(inputs))
        if isinstance(law, Categorical):
            noise = torch.empty_like(law.log_p).exponential_(generator=self.dice)
            action = (law.log_p.exp() / noise).argmax(-1)  # the first of exponential clocks with these rates
        else:
            action = torch.addcmul(law.mean, law.log_std.exp(), torch.empty_like(law.mean).normal_(generator=self.dice))
        return action, law.log_prob(action)

    @torch.no_grad()
    def greedy(self, obs: Tensor) -> Tensor:
        """The likeliest actions."""
        inputs = self.inputs(obs)
        head = self.net.head(inputs)
        if self.spec.head == "squashed":
            return torch.tanh(head.chunk(2, dim=-1)[0]).clamp(-EDGE, EDGE)
        law = self.net.law(inputs, head)
        return law.log_p.argmax(-1) if isinstance(law, Categorical) else law.mean

    def weights(self, *, on_device: bool) -> dict[str, Array]:
        """A copy of all weights and statistics by name: where they live, or on the CPU as numpy; one transfer either way."""
        whole = torch.cat([self.mean, self.scale, self.net.vector])
        flat: Array = whole if on_device and whole.is_cuda else whole.cpu().numpy()
        copies, start = {}, 0
        for name, view in self.net.params.views.items():
            copies[name] = flat[start : start + view.size].reshape(view.shape)
            start += view.size
        return copies

    @torch.no_grad()
    def load(self, snapshot: Snapshot) -> None:
        """In place: whatever was captured reads the new weights."""
        for name, view in self.net.named_views():
            view.copy_(torch.as_tensor(snapshot.params[name]), non_blocking=True)
        self.mean.copy_(torch.as_tensor(snapshot.params["norm.mean"]), non_blocking=True)
        self.scale.copy_(torch.as_tensor(snapshot.params["norm.scale"]), non_blocking=True)

    def begin(self, params: Mapping[str, Array]) -> None:
        """With these weights and statistics instead of those that were drawn."""
        self.net.begin(params)
        self.refresh()

    def refresh(self) -> None:
        """Take the statistics from the numpy side."""
        self.mean.copy_(torch.from_numpy(self.net.params.views["norm.mean"]))
        self.scale.copy_(torch.from_numpy(self.net.params.views["norm.scale"]))


class _Squash(torch.autograd.Function):
    """tanh of a Gaussian, with the slopes written down: fewer operations than autograd would make of it.

    With a = tanh(x), x = mean + σ noise:  ∂a/∂x = 1 - a²,  ∂ log p/∂x = 2a,  ∂ log p/∂ log σ = 2a σ noise - 1.
    """

    @staticmethod
    def forward(ctx: Any, head: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = head.chunk(2, dim=-1)
        bounded = log_std.clamp(*LOG_STD)
        kick = bounded.exp() * noise
        raw = mean + kick
        action = torch.tanh(raw)
        # log(1 - tanh²) = 2 (log 2 - x - softplus(-2x)), which does not lose digits where tanh is 1
        each = 2 * (raw + functional.softplus(-2 * raw)) - bounded
        log_prob = (
            torch.addcmul(each, noise, noise, value=-0.5).sum(-1) - (2 * math.log(2) + HALF_LOG_2PI) * noise.shape[-1]
        )
        ctx.save_for_backward(action, kick, log_std == bounded)
        return action, log_prob

    @staticmethod
    def backward(ctx: Any, by_action: Tensor, by_log_prob: Tensor) -> tuple[Tensor, None]:
        action, kick, inside = ctx.saved_tensors
        by_log_prob = by_log_prob.unsqueeze(-1)
        by_raw = torch.addcmul(by_action, action, 2 * by_log_prob - by_action * action)
        by_log_std = (by_raw * kick - by_log_prob) * inside
        return torch.cat([by_raw, by_log_std], dim=-1), None


class TensorActor:
    """A private copy of the policy beside a simulator. Implements core.Actor[Tensor], with random numbers of its own."""

    state_size = 0

    def __init__(self, spec: PolicySpec, device: str, seed: int) -> None:
        self.policy = TensorPolicy(spec, np.random.default_rng(0), device, seed)

    @property
    def generators(self) -> list[torch.Generator]:
        return [self.policy.dice]

    def load(self, snapshot: Snapshot) -> None:
        self.policy.load(snapshot)

    def act(
        self, obs: Tensor, rng: np.random.Generator, *, state: Tensor | None = None, greedy: bool = False
    ) -> Decision[Tensor]:
        state = obs.new_zeros(len(obs), 0) if state is None else state
        if greedy:
            action = self.policy.greedy(obs)
            return Decision(action, torch.zeros_like(obs[:, 0]), state)
        return Decision(*self.policy.act(obs), state)
