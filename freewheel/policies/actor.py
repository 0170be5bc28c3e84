"""The policy as workers run it: a few numpy matrix products, no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from freewheel.core import Decision, NDArray, Snapshot
from freewheel.policies.spec import (
    LOG_STD,
    FlatParams,
    PolicySpec,
    actor_layout,
    layers,
    network_inputs,
    select,
)

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
MASKED = np.float32(-1e9)  # logit of an action that is not allowed
BLOCK = 256  # random numbers drawn at a time
EDGE = 1.0 - 1e-6  # a squashed action is kept inside (-EDGE, EDGE), so that it can be unsquashed


def _elu(x: NDArray, out: NDArray) -> None:
    np.copyto(out, np.where(x > 0, x, np.expm1(np.minimum(x, 0))))


def _silu(x: NDArray, out: NDArray) -> None:
    np.divide(x, 1 + np.exp(-np.maximum(x, -80)), out=out)  # beyond -80 the result is 0 anyway, and exp would overflow


def _relu(x: NDArray, out: NDArray) -> None:
    np.maximum(x, 0, out=out)


ACTIVATIONS: Mapping[str, Callable[..., object]] = {"tanh": np.tanh, "relu": _relu, "elu": _elu, "silu": _silu}


class NumpyActor:
    """Acts for B lanes at once. Implements core.Actor."""

    def __init__(self, spec: PolicySpec) -> None:
        self.spec = spec
        self.params = FlatParams(actor_layout(spec))
        *self._hidden, self._last = layers(self.params.views, "actor")
        self._activation = ACTIVATIONS[spec.activation]
        self._choose = {"categorical": self._categorical, "gaussian": self._gaussian, "squashed": self._squashed}[
            spec.head
        ]
        self._no_state = np.zeros((0, 0), np.float32)
        self._lanes = np.arange(0)
        self._rng: np.random.Generator | None = None
        self._numbers: list[float] = []  # drawn, and not yet used; the next is the last

    def load(self, snapshot: Snapshot) -> None:
        for name, view in self.params.views.items():
            view[...] = snapshot.params[name]

    def act(self, obs: NDArray, rng: np.random.Generator, *, greedy: bool = False) -> Decision:
        x = select(self.spec.actor_columns, network_inputs(self.spec, self.params.views, obs))
        for weight, bias in self._hidden:
            x = x @ weight
            x += bias
            self._activation(x, out=x)
        out = x @ self._last[0]
        out += self._last[1]
        action, log_prob = self._choose(out, obs, rng, greedy)
        return Decision(action, log_prob, self._no_state)

    def _categorical(
        self, logits: NDArray, obs: NDArray, rng: np.random.Generator, greedy: bool
    ) -> tuple[NDArray, NDArray]:
        if self.spec.mask is not None:
            start, stop = self.spec.mask
            logits = np.where(obs[:, start:stop] > 0, logits, MASKED)
        if len(logits) == 1:
            return _choose_one(logits[0], None if greedy else self._draw(rng, 1)[0])
        lanes = self._lanes
        if len(lanes) != len(logits):
            lanes = self._lanes = np.arange(len(logits))
        logits -= logits.max(axis=1, keepdims=True)
        cumulated = np.exp(logits).cumsum(axis=1)
        total = cumulated[:, -1]
        if greedy:
            action = logits.argmax(axis=1)
        else:
            # float64, so that a draw below 1 stays below the total and never lands on an action of probability 0
            draw = np.array(self._draw(rng, len(lanes))) * total
            action = (cumulated <= draw[:, None]).sum(axis=1)
        return action, logits[lanes, action] - np.log(total)

    def _draw(self, rng: np.random.Generator, count: int) -> list[float]:
        """The generator's next numbers, as it would give them one by one; a block at a time, for a call of it is dear."""
        if rng is not self._rng:
            self._rng, self._numbers = rng, []
        while len(self._numbers) < count:
            self._numbers = rng.random(BLOCK)[::-1].tolist() + self._numbers
        return [self._numbers.pop() for _ in range(count)]

    def _gaussian(self, mean: NDArray, obs: NDArray, rng: np.random.Generator, greedy: bool) -> tuple[NDArray, NDArray]:
        log_std = self.params.views["actor.log_std"]
        constant = -log_std.sum() - HALF_LOG_2PI * mean.shape[1]
        if greedy:
            return mean, np.full(len(mean), constant, np.float32)
        noise = rng.standard_normal(mean.shape, dtype=np.float32)
        return mean + np.exp(log_std) * noise, -0.5 * np.square(noise).sum(axis=1) + constant

    def _squashed(self, out: NDArray, obs: NDArray, rng: np.random.Generator, greedy: bool) -> tuple[NDArray, NDArray]:
        mean, log_std = np.split(out.astype(np.float64), 2, axis=1)
        np.clip(log_std, *LOG_STD, out=log_std)
        raw = mean if greedy else mean + np.exp(log_std) * rng.standard_normal(mean.shape)
        action = np.clip(np.tanh(raw), -EDGE, EDGE).astype(np.float32)
        return action, squashed_log_prob(mean, log_std, action)


def _choose_one(logits: NDArray, draw: float | None) -> tuple[NDArray, NDArray]:
    """The same for one lane, at half the cost: that is what a worker with one slow env does all the time."""
    logits = logits - logits[logits.argmax()]
    cumulated = np.exp(logits).cumsum()
    total = cumulated[-1]
    action = int(logits.argmax() if draw is None else cumulated.searchsorted(draw * total, side="right"))
    return np.array([action]), np.array([logits[action] - np.log(total)])


def squashed_log_prob(mean: NDArray, log_std: NDArray, action: NDArray) -> NDArray:
    """log-probability [N] of squashed actions [N, A], in float64 because atanh magnifies near the edges."""
    wide = action.astype(np.float64)
    noise = (np.arctanh(wide) - mean) * np.exp(-log_std)
    each = -0.5 * np.square(noise) - log_std - HALF_LOG_2PI - np.log1p(-np.square(wide))
    return np.asarray(each.sum(axis=1), np.float32)
