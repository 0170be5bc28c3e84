"""The policy as workers run it: a few numpy matrix products, no torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from freewheel.core import Decision, NDArray, Snapshot, to_numpy
from freewheel.policies.fast_categorical import ACTIVATIONS, MASKED, FastCategorical, NumpyCategorical
from freewheel.policies.spec import (
    LOG_STD,
    FlatParams,
    PolicySpec,
    actor_layout,
    layers,
    network_inputs,
    select,
    statistics_layout,
)

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
BLOCK = 256  # random numbers drawn at a time
BELOW_ONE = 1.0 - 2.0**-23  # the largest draw: its product with a total stays below the total, in float32 too
EDGE = 1.0 - 1e-6  # a squashed action is kept inside (-EDGE, EDGE), so that it can be unsquashed


class NumpyActor:
    """Acts for B lanes at once, without a memory. Implements core.Actor."""

    state_size = 0

    def __init__(self, spec: PolicySpec) -> None:
        self.spec = spec
        self.params = FlatParams(actor_layout(spec))
        *self._hidden, self._last = layers(self.params.views, "actor")
        self._activation = ACTIVATIONS[spec.activation]
        self._choose = {"categorical": self._categorical, "gaussian": self._gaussian, "squashed": self._squashed}[
            spec.head
        ]
        self._plain = not spec.rescales and spec.actor_columns == ((0, spec.obs_size),)
        self._single = _single(spec, self.params) if spec.head == "categorical" else None
        self._lanes = np.arange(0)
        self._rng: np.random.Generator | None = None
        self._numbers: list[float] = []  # drawn, and not yet used; the next is the last

    def load(self, snapshot: Snapshot) -> None:
        for name, view in self.params.views.items():
            view[...] = to_numpy(snapshot.params[name])

    def act(
        self, obs: NDArray, rng: np.random.Generator, *, state: NDArray | None = None, greedy: bool = False
    ) -> Decision:
        state = np.zeros((len(obs), 0), np.float32) if state is None else state
        if self._single is not None and len(obs) == 1:
            chosen, chance = self._choose_one(obs[0], None if greedy else self._draw(rng))
            return Decision(
                np.array([chosen]),
                np.array([chance], np.float32),
                state,
            )
        x = select(self.spec.actor_columns, network_inputs(self.spec, self.params.views, obs))
        for weight, bias in self._hidden:
            x = x @ weight
            x += bias
            self._activation(x, out=x)
        out = x @ self._last[0]
        out += self._last[1]
        action, log_prob = self._choose(out, obs, rng, greedy)
        return Decision(action, log_prob, state)

    def act_one(self, obs: NDArray, rng: np.random.Generator) -> tuple[Any, float]:
        """For one lane's observation [D]: its action, an int or [A], and the log-probability. What `act` says, for less."""
        if self._single is not None:
            return self._choose_one(obs, self._draw(rng))
        decision = self.act(obs[None], rng)
        return decision.action[0], decision.log_prob.item()

    def _choose_one(self, obs: NDArray, draw: float | None) -> tuple[int, float]:
        spec = self.spec
        assert self._single is not None
        inputs = obs if self._plain else select(spec.actor_columns, network_inputs(spec, self.params.views, obs))
        mask = None if spec.mask is None else np.asarray(obs[slice(*spec.mask)], np.float32)
        return self._single.choose(inputs, mask, draw)

    def _categorical(
        self, logits: NDArray, obs: NDArray, rng: np.random.Generator, greedy: bool
    ) -> tuple[NDArray, NDArray]:
        if self.spec.mask is not None:
            start, stop = self.spec.mask
            logits = np.where(obs[:, start:stop] > 0, logits, MASKED)
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
            draw = np.array([self._draw(rng) for _ in lanes]) * total
            action = (cumulated <= draw[:, None]).sum(axis=1)
        return action, logits[lanes, action] - np.log(total)

    def _draw(self, rng: np.random.Generator) -> float:
        """The generator's next number; a block is drawn at a time, for a call of it is dear."""
        if rng is not self._rng or not self._numbers:
            self._rng, self._numbers = rng, np.minimum(rng.random(BLOCK), BELOW_ONE)[::-1].tolist()
        return self._numbers.pop()

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


def _single(spec: PolicySpec, params: FlatParams) -> NumpyCategorical:
    weights = [weight for weight, _ in layers(params.views, "actor")]
    start = sum(math.prod(shape) for shape in statistics_layout(spec).values())
    return FastCategorical(
        params.vector, start, (len(weights[0]), *(weight.shape[1] for weight in weights)), spec.activation
    )


def squashed_log_prob(mean: NDArray, log_std: NDArray, action: NDArray) -> NDArray:
    """log-probability [N] of squashed actions [N, A], in float64 because atanh magnifies near the edges."""
    wide = action.astype(np.float64)
    noise = (np.arctanh(wide) - mean) * np.exp(-log_std)
    each = -0.5 * np.square(noise) - log_std - HALF_LOG_2PI - np.log1p(-np.square(wide))
    return np.asarray(each.sum(axis=1), np.float32)
