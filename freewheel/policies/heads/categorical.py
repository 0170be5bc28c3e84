"""The categorical head: a choice among K actions, some of which an action mask may forbid."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from freewheel.core import ActionSpec, NDArray
from freewheel.policies.spec import ACTIVATIONS, FlatParams, Head, PolicySpec, Views, layers, statistics_layout
from freewheel.rollout.kernel import compiled
from freewheel.seeding import Position

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MASKED = np.float32(-1e9)  # logit of an action that is not allowed
BLOCK = 256  # random numbers drawn at a time
BELOW_ONE = 1.0 - 2.0**-23  # the largest draw: its product with a total stays below the total, in float32 too


class CategoricalHead(Head):
    name = "categorical"
    greedy = "argmax"
    analytic = True
    discrete = True

    def misfit(self, action: ActionSpec) -> str:
        return "" if action.kind == "discrete" else "it needs discrete actions; use auto"

    def actor(self, spec: PolicySpec, params: FlatParams) -> CategoricalActor:
        return CategoricalActor(spec, params)

    def distribution(self, outputs: Tensor, mask: Tensor | None, parameters: Mapping[str, Tensor]) -> Categorical:
        return Categorical(outputs, mask)

    def slopes(self, spec: PolicySpec, weights: Views, grads: Views) -> CategoricalSlopes:
        return CategoricalSlopes(spec.mask)


class NumpyCategorical:
    """One lane through network and head in as few numpy calls as possible.

    A bias follows its weights in the flat vector, so they are one matrix [in + 1, out] whose last input is 1.
    """

    def __init__(self, vector: NDArray, start: int, widths: tuple[int, ...], activation: str) -> None:
        self._activation = ACTIVATIONS[activation]
        padded = [np.ones(width + 1, np.float32) for width in widths[:-1]]
        self._inputs, self._logits = padded[0][:-1], np.empty(widths[-1], np.float32)
        outs = [*(values[:-1] for values in padded[1:]), self._logits]
        matrices = []
        for ins, outputs in pairwise(widths):
            end = start + (ins + 1) * outputs
            matrices.append(vector[start:end].reshape(ins + 1, outputs))
            start = end
        *self._hidden, self._last = zip(padded, matrices, outs, strict=True)
        self._weights = np.empty_like(self._logits)  # exp of the logits, scaled so that the largest is 1
        self._cumulated = np.empty_like(self._logits)
        self._beyond = np.empty(widths[-1], np.bool_)

    def choose(self, inputs: NDArray, mask: NDArray | None, draw: float | None) -> tuple[int, float]:
        """Return (action, log-probability) for a draw from [0, 1), or None: the likeliest; mask > 0 means allowed."""
        logits, weights, cumulated = self._logits, self._weights, self._cumulated
        self._inputs[...] = inputs
        for values, matrix, out in self._hidden:
            np.dot(values, matrix, out)
            self._activation(out, out=out)
        np.dot(self._last[0], self._last[1], logits)
        if mask is not None:
            np.copyto(logits, MASKED, where=mask <= 0)
        action = likeliest = int(logits.argmax())
        np.subtract(logits, logits.item(likeliest), weights)
        np.exp(weights, weights)
        weights.cumsum(out=cumulated)
        total = cumulated.item(-1)
        if draw is not None:
            np.greater(cumulated, draw * total, self._beyond)
            action = int(self._beyond.argmax())
        return action, logits.item(action) - logits.item(likeliest) - math.log(total)


FastCategorical = compiled("FastCategorical", NumpyCategorical)


class CategoricalActor:
    """Implements OneLaneForm. Random numbers are drawn in blocks, because a call of the generator is expensive."""

    def __init__(self, spec: PolicySpec, params: FlatParams) -> None:
        self._mask = spec.mask
        weights = [weight for weight, _ in layers(params.views, "actor")]
        start = sum(math.prod(shape) for shape in statistics_layout(spec).values())
        widths = (len(weights[0]), *(weight.shape[1] for weight in weights))
        self._fast = FastCategorical(params.vector, start, widths, spec.activation)
        self._lanes = np.arange(0)
        self._rng: np.random.Generator | None = None
        self._numbers: list[float] = []  # drawn and not yet used; the last one is used next
        self._before: Mapping[str, Any] = {}  # the generator's state before they were drawn

    def choose_one(self, inputs: NDArray, obs: NDArray, rng: np.random.Generator | None) -> tuple[int, float]:
        mask = None if self._mask is None else np.asarray(obs[slice(*self._mask)], np.float32)
        return self._fast.choose(inputs, mask, None if rng is None else self._draw(rng))

    def choose(self, outputs: NDArray, obs: NDArray, rng: np.random.Generator, greedy: bool) -> tuple[NDArray, NDArray]:
        logits = _masked(outputs, obs, self._mask)
        if len(self._lanes) != len(logits):
            self._lanes = np.arange(len(logits))
        logits -= logits.max(axis=1, keepdims=True)
        cumulated = np.exp(logits).cumsum(axis=1)
        total = cumulated[:, -1]
        if greedy:
            action = logits.argmax(axis=1)
        else:
            # float64, so that a draw below 1 stays below the total and never lands on an action of probability 0
            draw = np.array([self._draw(rng) for _ in self._lanes]) * total
            action = (cumulated <= draw[:, None]).sum(axis=1)
        return action, logits[self._lanes, action] - np.log(total)

    def _draw(self, rng: np.random.Generator) -> float:
        if rng is not self._rng or not self._numbers:
            self._before = rng.bit_generator.state
            self._rng, self._numbers = rng, np.minimum(rng.random(BLOCK), BELOW_ONE)[::-1].tolist()
        return self._numbers.pop()

    def position(self, rng: np.random.Generator) -> Position:
        if rng is not self._rng:
            return Position(rng.bit_generator.state)
        return Position(self._before, BLOCK - len(self._numbers))


def _masked(logits: NDArray, obs: NDArray, mask: tuple[int, int] | None) -> NDArray:
    return logits if mask is None else np.where(obs[:, slice(*mask)] > 0, logits, MASKED)


class Categorical:
    """Implements Enumerated."""

    def __init__(self, logits: Tensor, mask: Tensor | None) -> None:
        if mask is not None:
            logits = logits.masked_fill(mask <= 0, float(MASKED))
        self.log_p = logits.log_softmax(-1)

    def log_prob(self, action: Tensor) -> Tensor:
        return self.log_p.gather(-1, action[:, None]).squeeze(-1)

    def entropy(self) -> Tensor:
        return -(self.log_p.exp() * self.log_p).sum(-1)

    def sample(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Sample the index of the smallest of exponential variables whose rates are the probabilities."""
        noise = self.log_p.new_empty(self.log_p.shape).exponential_(generator=generator)
        action = (self.log_p.exp() / noise).argmax(-1)
        return action, self.log_prob(action)

    def mode(self) -> Tensor:
        return self.log_p.argmax(-1)


class CategoricalSlopes:
    """Implements Slopes. Arrays are [K, N]: numpy reduces the first axis much faster."""

    def __init__(self, mask: tuple[int, int] | None) -> None:
        self._mask = mask

    def log_prob(self, outputs: NDArray, inputs: NDArray, action: NDArray) -> NDArray:
        log_p = np.array(_masked(outputs, inputs, self._mask).T, order="C")
        log_p -= log_p.max(axis=0)
        self._p = np.exp(log_p)
        total = self._p.sum(axis=0)
        self._p /= total
        log_p -= np.log(total)
        self._log_p, self._chosen = log_p, (action, np.arange(len(action)))
        return np.asarray(log_p[self._chosen])

    def entropy(self) -> NDArray:
        self._entropy = np.asarray(-(self._p * self._log_p).sum(axis=0))
        return self._entropy

    def slope(self, by_log_prob: NDArray, by_entropy: float) -> NDArray:
        slope = self._p * -by_log_prob
        slope[self._chosen] += by_log_prob
        if by_entropy:
            slope -= by_entropy * self._p * (self._log_p + self._entropy)
        return np.asarray(slope.T)


HEAD = CategoricalHead()
