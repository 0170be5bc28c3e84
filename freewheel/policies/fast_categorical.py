"""One lane's choice among K actions, in as few calls of numpy as can be, or compiled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise

import numpy as np

from freewheel.core import NDArray
from freewheel.rollout.kernel import compiled

MASKED = np.float32(-1e9)  # logit of an action that is not allowed


def _elu(x: NDArray, out: NDArray) -> None:
    np.copyto(out, np.where(x > 0, x, np.expm1(np.minimum(x, 0))))


def _silu(x: NDArray, out: NDArray) -> None:
    np.divide(x, 1 + np.exp(-np.maximum(x, -80)), out=out)  # beyond -80 the result is 0 anyway, and exp would overflow


def _relu(x: NDArray, out: NDArray) -> None:
    np.maximum(x, 0, out=out)


ACTIVATIONS: Mapping[str, Callable[..., object]] = {"tanh": np.tanh, "relu": _relu, "elu": _elu, "silu": _silu}


class NumpyCategorical:
    """A bias follows its weights in the flat vector, so they are one matrix [in + 1, out] whose last input is 1."""

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
        self._weights = np.empty_like(self._logits)  # e to the logits, the largest being 1
        self._cumulated = np.empty_like(self._logits)
        self._beyond = np.empty(widths[-1], np.bool_)

    def choose(self, inputs: NDArray, mask: NDArray | None, draw: float | None) -> tuple[int, float]:
        """(action, log-probability): where `draw` from [0, 1) falls, or the likeliest for None; allowed is where mask > 0."""
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
