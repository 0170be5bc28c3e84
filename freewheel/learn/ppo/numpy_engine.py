"""PPO's gradients as explicit formulas in numpy: several times faster than autograd for small plain MLPs on a CPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from freewheel.core import Array, NDArray
from freewheel.learn.adam import Adam
from freewheel.learn.data_parallel import Split, first_of, standards
from freewheel.learn.finite import GRADIENT, WEIGHTS, first_not_finite
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.ppo.rollout_buffer import RolloutBatch
from freewheel.learn.ppo.targets import BREAKABLE, KL, LOSSES, Coefficients, Everybody, Minibatch, inspected, prepare
from freewheel.learn.spec import Services
from freewheel.policies.nets import PolicyNet
from freewheel.policies.spec import ACTIVATIONS, HEADS, PolicySpec, Views, layers, network_inputs, select, views
from freewheel.seeding import generator_state, restore_generator


def _tanh_slope(out: NDArray) -> NDArray:
    slope = out * out
    np.subtract(1.0, slope, out=slope)
    return slope


#: The slope of an activation as a function of its output.
SLOPES: Mapping[str, Callable[[NDArray], NDArray]] = {
    "tanh": _tanh_slope,
    "relu": lambda out: out > 0,
    "elu": lambda out: np.minimum(out, 0) + 1,
}


def supports(spec: PolicySpec, device: str) -> bool:
    """Return whether this module has the gradients of such a network."""
    return device == "cpu" and not spec.module and spec.activation in SLOPES and HEADS[spec.head].analytic


class Trunk:
    """One MLP. The forward pass keeps its activations; the backward pass writes the gradients of its parameters."""

    def __init__(self, weights: Views, grads: Views, part: str, activation: str) -> None:
        self._layers, self._grads = layers(weights, part), layers(grads, part)
        self._activate, self._slope = ACTIVATIONS[activation], SLOPES[activation]
        self._inputs: list[NDArray] = []

    def forward(self, x: NDArray) -> NDArray:
        self._inputs = []
        last = len(self._layers) - 1
        for i, (weight, bias) in enumerate(self._layers):
            self._inputs.append(x)
            x = x @ weight
            x += bias
            if i < last:
                self._activate(x, out=x)
        return x

    def backward(self, slope: NDArray, ones: NDArray) -> None:
        """Write gradients from d loss / d output [N, K]. `ones` [N] sums columns by a fast matrix product."""
        for i in range(len(self._layers) - 1, -1, -1):
            x, (weight_grad, bias_grad) = self._inputs[i], self._grads[i]
            np.dot(x.T, slope, out=weight_grad)
            np.dot(ones, slope, out=bias_grad)
            if i:
                back = self._layers[i][0].T
                slope = slope * back if len(back) == 1 else slope @ back  # a critic's one output does not need BLAS
                slope *= self._slope(x)


NO_SERVICES = Services()


class NumpyEngine:
    """The engine for plain MLPs with an analytic head. It also implements targets.Network."""

    fallback = ""

    def __init__(
        self, config: PPOConfig, net: PolicyNet, rng: np.random.Generator, services: Services = NO_SERVICES
    ) -> None:
        """The engine calls services.report after every gradient step."""
        self.config, self.net, self._rng = config, net, rng
        self._report, self._peers = services.report, services.peers
        self._sum = torch.zeros(len(net.vector) + len(LOSSES))  # gradient and losses, to be summed over learners
        self.grad, self._losses = self._sum.split([len(net.vector), len(LOSSES)])
        self._adam = Adam(net.vector, self.grad)
        self._views = net.params.views
        grads = views(self.grad.numpy(), net.trainable_layout)
        self._actor = Trunk(self._views, grads, "actor", net.spec.activation)
        self._critic = Trunk(self._views, grads, "critic", net.spec.activation)
        self._head = HEADS[net.spec.head].slopes(net.spec, self._views, grads)
        self._ones = np.ones(0, np.float32)

    @np.errstate(over="ignore", invalid="ignore")  # the gradient shows an overflow; a warning would not help
    def improve(self, batch: RolloutBatch, all_: Everybody, coefficients: Coefficients) -> dict[str, float] | str:
        """Make all gradient steps of an update and return metrics, or undo them and return what was not finite."""
        factor = None if coefficients.reward_factor is None else np.float32(coefficients.reward_factor)
        rows, effective, explained = prepare(
            self, batch, self.config, recompute=all_.lagging, reward_factor=factor, peers=self._peers
        )
        before = self._adam.remember()
        shown: list[tuple[float, ...]] = []
        for part, total in self._minibatches(rows, all_.rows):
            losses = self._over_all(self.gradient(part, coefficients, total))
            norm = float(torch.linalg.vector_norm(self.grad))
            if not np.isfinite(norm):
                self._adam.recall(*before)
                term = first_not_finite({**inspected(rows), **dict(zip(LOSSES, losses, strict=True))}) or GRADIENT
                return first_of(self._peers, BREAKABLE, term)
            shown.append((*losses, norm))
            if self.config.target_kl is not None and losses[KL] > 1.5 * self.config.target_kl:
                break
            if norm > self.config.max_grad_norm:
                self.grad.mul_(self.config.max_grad_norm / (norm + 1e-6))
            self._adam.step(coefficients.lr)
            self._report()
        if not np.isfinite(self.net.array).all():
            self._adam.recall(*before)
            return WEIGHTS
        means = np.mean(shown, axis=0)
        metrics = {name: float(value) for name, value in zip((*LOSSES, "gradient/norm"), means, strict=True)}
        return metrics | {"lag/effective_samples": float(effective), "value/explained_variance": float(explained)}

    def _minibatches(self, rows: Minibatch, counts: Sequence[int]) -> Iterator[tuple[Minibatch, int]]:
        """Yield this learner's part of each minibatch, and the rows of the whole minibatch."""
        total, peers = sum(counts), self._peers
        split = Split.of(counts, peers.rank, self.config.size(total))
        ends = list(itertools.accumulate(split.sizes, initial=0))
        for _ in range(self.config.epochs):
            shuffled = rows.take(self._rng.permutation(len(rows.action))) if len(split.sizes) > 1 else rows
            parts = [shuffled.take(slice(*place)) for place in itertools.pairwise(ends)]
            known: Sequence[tuple[float, float] | None] = [None] * len(parts)
            if peers.count > 1 and self.config.normalize_advantage:
                known = standards(peers, [part.advantage for part in parts], split.totals)
            for part, standard, of_all in zip(parts, known, split.totals, strict=True):
                yield self._standardise(part, standard), of_all

    def _standardise(self, part: Minibatch, known: tuple[float, float] | None) -> Minibatch:
        """Standardise advantages. known: mean and deviation over the rows of several learners, if there are others."""
        rows = len(part.advantage)
        if known is not None:
            centred = part.advantage - np.float32(known[0])
            return part._replace(advantage=centred / np.float32(known[1] + 1e-8))
        if not self.config.normalize_advantage or rows < 2:
            return part
        centred = part.advantage - part.advantage.sum() / np.float32(rows)
        deviation = math.sqrt(float(centred @ centred) / (rows - 1))
        return part._replace(advantage=centred / np.float32(deviation + 1e-8))

    def _over_all(self, losses: tuple[float, ...]) -> tuple[float, ...]:
        """Sum the gradient and these losses over all learners."""
        if self._peers.count == 1:
            return losses
        self._losses.copy_(torch.tensor(losses))
        self._peers.sum(self._sum)
        return tuple(self._losses.tolist())

    def gradient(self, batch: Minibatch, coefficients: Coefficients, total: int | None = None) -> tuple[float, ...]:
        """Fill `grad` and return the LOSSES. For a part of a minibatch of `total` rows: the part's share of both."""
        clip, rows = coefficients.clip, len(batch.action) if total is None else total
        if len(self._ones) != len(batch.action):
            self._ones = np.ones(len(batch.action), np.float32)
        value, log_prob = self.evaluate(batch.inputs, batch.action)
        log_ratio = log_prob - batch.reference
        ratio = np.exp(log_ratio)
        moved = ratio - 1
        gain = ratio * batch.advantage
        limited = np.clip(ratio, 1 - clip, 1 + clip) * batch.advantage
        active = gain <= limited  # elsewhere the clipped branch is smaller, and its slope is 0
        by_log_prob = gain * active
        np.minimum(gain, limited, out=limited)
        if batch.weight is not None:
            by_log_prob *= batch.weight
            limited *= batch.weight
        by_log_prob *= -1.0 / rows
        entropy = self._head.entropy()
        self._actor.backward(self._head.slope(by_log_prob, -coefficients.entropy / rows), self._ones)
        error = value - batch.value
        self._critic.backward((error * (2 * self.config.value / rows))[:, None], self._ones)
        return (
            -float(limited.sum()) / rows,
            float(error @ error) / rows,
            float(entropy.sum()) / rows,
            float((moved - log_ratio).sum()) / rows,
            np.count_nonzero(np.abs(moved, out=moved) > clip) / rows,
        )

    def inputs(self, obs: NDArray) -> NDArray:
        return network_inputs(self.net.spec, self._views, obs)

    def evaluate(self, inputs: NDArray, action: NDArray) -> tuple[NDArray, NDArray]:
        outputs = self._actor.forward(select(self.net.spec.actor_columns, inputs))
        return self.values(inputs), self._head.log_prob(outputs, inputs, action)

    def values(self, inputs: NDArray) -> NDArray:
        return self._critic.forward(select(self.net.spec.critic_columns, inputs))[:, 0]

    def next_values(self, batch: RolloutBatch, value: NDArray, goes_on: NDArray) -> NDArray:
        """Return the values of successors: that of the next row if there is one, else a computed value."""
        found = np.zeros_like(value)
        found[:-1] = np.where(goes_on[:-1], value[1:], 0)
        bootstrap = batch.data.valid & ~goes_on & ~batch.data.terminated
        if bootstrap.any():
            found[bootstrap] = self.values(self.inputs(batch.data.next_obs[bootstrap]))
        return found

    def normalise(self, mean: Array, scale: Array) -> None:
        for start, stop in self.net.spec.normalised:
            self._views["norm.mean"][start:stop] = mean[start:stop]
            self._views["norm.scale"][start:stop] = scale[start:stop]

    def weights(self) -> dict[str, Array]:
        return {**views(self.net.params.vector.copy(), {name: view.shape for name, view in self._views.items()})}

    def load(self, weights: Mapping[str, Array]) -> None:
        """Load what `weights` returned, in place."""
        self.net.params.load(weights)

    def state_dict(self) -> dict[str, Array]:
        _, mean, square, steps = self._adam.remember()
        return {
            "params": self.net.params.vector.copy(),
            "adam.mean": mean.numpy(),
            "adam.square": square.numpy(),
            "adam.steps": np.array(steps),
            "rng": generator_state(self._rng),
        }

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self.net.params.vector[...] = state["params"]
        mean, square = (torch.as_tensor(np.array(state[f"adam.{name}"])) for name in ("mean", "square"))
        self._adam.recall(self.net.vector, mean, square, int(state["adam.steps"]))
        restore_generator(self._rng, np.asarray(state["rng"]))
