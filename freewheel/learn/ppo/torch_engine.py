"""PPO's gradients by autograd, for any network on any device. CUDA graphs replay fixed-shape parts where possible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freewheel.core import TRANSITION_FIELDS, Array, Compile, Transitions
from freewheel.learn.adam import FusedAdam
from freewheel.learn.data_parallel import NO_GRAPH, Split, first_of, standards, sum_gradients
from freewheel.learn.finite import GRADIENT, WEIGHTS, first_not_finite, is_finite
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.ppo.rollout_buffer import RolloutBatch
from freewheel.learn.ppo.targets import BREAKABLE, KL, LOSSES, Coefficients, Everybody, Minibatch, inspected, prepare
from freewheel.learn.spec import LearnerSpec
from freewheel.policies.nets import TensorPolicy
from freewheel.policies.torch_private import norms, scale_all
from freewheel.rollout.graphs import Program
from freewheel.seeding import generator_state, restore_generator

NORM, EFFECTIVE, EXPLAINED, TOTAL = range(len(LOSSES), len(LOSSES) + 4)  # their indices in the sums, after the losses

ADAM = ("adam.mean", "adam.square", "adam.steps")  # names of Adam's state


class TorchEngine:
    """Also implements targets.Network. Rows of a batched simulator keep one shape, and an update waits for the device
    only to read the metrics (and the KL of each minibatch, if target_kl is set). Rows of CPU workers may have gaps and
    vary in number; the learner's numpy generator shuffles them."""

    def __init__(self, config: PPOConfig, spec: LearnerSpec, policy: TensorPolicy, rng: np.random.Generator) -> None:
        self.config, self.policy, self.net, self._rng = config, policy, policy.net, rng
        self._device, self._simulated = self.net.vector.device, spec.world.batched_on_device
        self._peers = spec.services.peers
        wanted: Compile = spec.compute.compile if self._simulated else "off"
        self._compile: Compile = wanted if self._peers.count == 1 else "off"
        self._no_graph = NO_GRAPH if self._compile != wanted else ""
        self._adam = FusedAdam(self.net.parameters, config.lr, eps=1e-5)
        self._shape: tuple[tuple[int, ...], int] | None = None  # shape and rows of the programs' tensors
        self._programs: list[Program] = []
        self._sums = torch.zeros(TOTAL + 1, device=self._device)
        self._at = torch.zeros(1, dtype=torch.int64, device=self._device)  # first row of the next minibatch
        self._kl, self._norm, self._clip, self._entropy, self._factor = torch.zeros(5, device=self._device).unbind()
        self._recompute = self._scaled = False
        # Of the present minibatch: this learner's rows, their share of all; mean and deviation of advantages, if known.
        self._size, self._share = 0, 1.0
        self._standard: tuple[float, float] | None = None
        self._report = spec.services.report

    @property
    def fallback(self) -> str:
        """Why there is no CUDA graph where one was requested."""
        return self._no_graph or next((program.fallback for program in self._programs if program.fallback), "")

    def improve(self, batch: RolloutBatch[Any], all_: Everybody, coefficients: Coefficients) -> dict[str, float] | str:
        """Make all gradient steps of an update and return metrics, or undo them and return what was not finite."""
        self._recompute = all_.lagging or self._simulated
        self._scaled = coefficients.reward_factor is not None
        self._load(batch)
        size = self.config.size(sum(all_.rows))
        self._split = Split.of(all_.rows, self._peers.rank, size, even=self._simulated)
        self._size = self._split.sizes[0]
        before = self.net.vector.clone(), [part.clone() for part in self._adam.state]
        self._adam.lr.fill_(coefficients.lr)
        self._clip.fill_(coefficients.clip)
        self._entropy.fill_(coefficients.entropy)
        if self._scaled:
            self._factor.copy_(torch.as_tensor(coefficients.reward_factor))
        self._sums.zero_()
        self._programs = self._programs or self._make_programs()
        self._programs[0]()
        steps = self._epochs(*self._programs[1:])
        self._sums[TOTAL] = self.net.vector.sum()  # finite only if all weights are
        sums = self._sums.tolist()
        if not (all(np.isfinite(sums[: NORM + 1])) and (np.isfinite(sums[TOTAL]) or is_finite(self.net.vector))):
            self.net.vector.copy_(before[0])
            for part, value in zip(self._adam.state, before[1], strict=True):
                part.copy_(value)
            return self._not_finite(sums)
        metrics = {name: value / steps for name, value in zip((*LOSSES, "gradient/norm"), sums, strict=False)}
        return metrics | {"lag/effective_samples": sums[EFFECTIVE], "value/explained_variance": sums[EXPLAINED]}

    def _not_finite(self, sums: list[float]) -> str:
        reference, weight, advantage, value = self._scalars.unbind(-1)
        rows = Minibatch(self._inputs, self._action, reference, weight, advantage, value)
        losses = zip((*LOSSES, GRADIENT), sums, strict=False)
        return first_of(self._peers, BREAKABLE, first_not_finite({**inspected(rows), **dict(losses)}) or WEIGHTS)

    def _load(self, batch: RolloutBatch[Any]) -> None:
        """Copy the rows to the tensors that programs read."""
        shape = tuple(batch.version.shape), batch.rows
        source = {name: torch.as_tensor(getattr(batch.data, name)) for name in TRANSITION_FIELDS}
        if shape != self._shape:
            self._shape, self._programs = shape, []
            empty = {name: torch.empty_like(value, device=self._device) for name, value in source.items()}
            self._data = Transitions(**empty)
            self._inputs = torch.zeros(batch.rows, self.net.spec.obs_size, device=self._device)
            self._scalars = torch.zeros(batch.rows, 4, device=self._device)  # reference, weight, advantage, value
            self._order = torch.arange(batch.rows, device=self._device)
        for name, value in source.items():
            getattr(self._data, name).copy_(value, non_blocking=True)
        self._batch = RolloutBatch(self._data, batch.version, batch.rows)
        self._action = self._batch.flatten(self._data.action)

    def _make_programs(self) -> list[Program]:
        """Return programs for targets and a gradient step, which has two parts if target_kl is checked in between."""
        targets = Program(self._prepare, self._compile, state=[self._inputs, self._scalars, self._sums])
        shown, moved = [self._sums, self._at, self._kl, self._norm], [self.net.vector, *self._adam.state]
        if self.config.target_kl is None:
            return [targets, Program(self._step, self._compile, state=[*shown, *moved])]
        gradient = Program(self._gradient, self._compile, state=shown)
        return [targets, gradient, Program(self._apply, self._compile, state=moved)]

    @torch.no_grad()
    def _prepare(self) -> None:
        factor = self._factor if self._scaled else None
        found = prepare(
            self, self._batch, self.config, recompute=self._recompute, reward_factor=factor, peers=self._peers
        )
        rows, self._sums[EFFECTIVE], self._sums[EXPLAINED] = found
        self._inputs.copy_(rows.inputs)
        weight = torch.ones_like(rows.reference) if rows.weight is None else rows.weight
        self._scalars.copy_(torch.stack([rows.reference, weight, rows.advantage, rows.value], -1))

    def _epochs(self, step: Program, apply: Program | None = None) -> int:
        """Run epochs × minibatches, and return how many gradients were computed."""
        count = 0
        for _ in range(self.config.epochs):
            if len(self._split.sizes) > 1:
                self._order.copy_(self._permutation(len(self._order)))
            self._at.zero_()
            known = self._standards()
            for part, size in enumerate(self._split.sizes):
                self._size, self._share = size, size / self._split.totals[part]
                self._standard = None if known is None else known[part]
                step()
                self._report()
                count += 1
                if apply is not None and self.config.target_kl is not None:
                    if float(self._kl) > 1.5 * self.config.target_kl:
                        return count
                    apply()
        return count

    def _standards(self) -> list[tuple[float, float]] | None:
        """Return mean and deviation of advantages in this epoch's minibatches, if other learners have rows in them."""
        if self._peers.count == 1 or not self.config.normalize_advantage:
            return None
        advantage, sizes = self._scalars[self._order, 2].cpu().numpy(), self._split.sizes
        return standards(self._peers, np.split(advantage, np.cumsum(sizes))[: len(sizes)], self._split.totals)

    def _permutation(self, rows: int) -> Tensor:
        if self._simulated:
            return torch.rand(rows, generator=self.policy.generator, device=self._device).argsort()
        return torch.from_numpy(self._rng.permutation(rows))

    def _step(self) -> None:
        self._gradient()
        self._apply()

    def _gradient(self) -> None:
        """Compute the gradient of the next minibatch in the present order."""
        places = torch.arange(self._size, device=self._device) + self._at if self._size else self._at * 0
        rows = self._order[places]  # one row of weight 0, if only other learners have rows
        reference, weight, advantage, value = self._scalars[rows].unbind(-1)
        if self._standard is not None:
            advantage = (advantage - self._standard[0]) / (self._standard[1] + 1e-8)
        elif self.config.normalize_advantage and self._size > 1:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        minibatch = Minibatch(self._inputs[rows], self._action[rows], reference, weight, advantage, value)
        losses = self.losses(minibatch)
        self._adam.forget()
        (losses[0] + self.config.value * losses[1] - self._entropy * losses[2]).backward()
        with torch.no_grad():
            shown = sum_gradients(self._peers, self._adam.parameters, losses.detach(), self._share)
            self._norm.copy_(torch.linalg.vector_norm(torch.stack(norms(self._grads))))
            self._kl.copy_(shown[KL])
            self._sums[: NORM + 1] += torch.cat([shown, self._norm[None]])
            self._at += self._size

    def losses(self, batch: Minibatch[Tensor]) -> Tensor:
        """Return the LOSSES of this minibatch. The first three have a gradient."""
        output = self.net(batch.inputs)
        distribution = self.net.distribution(batch.inputs, output.head)
        log_ratio = distribution.log_prob(batch.action) - batch.reference
        ratio = log_ratio.exp()
        limited = ratio.clamp(1 - self._clip, 1 + self._clip)
        gain = torch.minimum(ratio * batch.advantage, limited * batch.advantage)
        if batch.weight is not None:
            gain = gain * batch.weight
        value = (output.value - batch.value).square().mean()
        with torch.no_grad():
            kl = ((ratio - 1) - log_ratio).mean()
            clipped = ((ratio - 1).abs() > self._clip).float().mean()
        return torch.stack([-gain.mean(), value, distribution.entropy().mean(), kl, clipped])

    @property
    def _grads(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._adam.parameters if parameter.grad is not None]

    @torch.no_grad()
    def _apply(self) -> None:
        scale_all(self._grads, (self.config.max_grad_norm / (self._norm + 1e-6)).clamp(max=1.0))
        self._adam.step()

    def inputs(self, obs: Tensor) -> Tensor:
        return self.policy.inputs(obs)

    def evaluate(self, inputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        output = self.net(inputs)
        return output.value, self.net.distribution(inputs, output.head).log_prob(action)

    def values(self, inputs: Tensor) -> Tensor:
        return self.net.values(inputs)

    def next_values(self, batch: RolloutBatch[Tensor], value: Tensor, goes_on: Tensor) -> Tensor:
        """Compute all next values, because a subset would have another shape each time."""
        found: Tensor = batch.spread(self.values(self.inputs(batch.flatten(batch.data.next_obs))))
        return found

    def normalise(self, mean: Array, scale: Array) -> None:
        self.policy.normalise(mean, scale)

    def weights(self) -> Mapping[str, Array]:
        return self.policy.weights(on_device=self._simulated)

    def load(self, weights: Mapping[str, Array]) -> None:
        """Load what `weights` returned, in place."""
        self.policy.load_weights(weights)

    def state_dict(self) -> dict[str, Array]:
        tensors = {"params": self.policy.flat, "generator": self.policy.generator.get_state()}
        tensors |= dict(zip(ADAM, self._adam.state, strict=True))
        state: dict[str, Array] = {name: value.cpu().numpy().copy() for name, value in tensors.items()}
        return state | {"rng": generator_state(self._rng)}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self.policy.load_flat(state["params"])
        for name, part in zip(ADAM, self._adam.state, strict=True):
            part.copy_(torch.as_tensor(state[name]))
        self.policy.generator.set_state(torch.as_tensor(state["generator"]))
        restore_generator(self._rng, np.asarray(state["rng"]))
