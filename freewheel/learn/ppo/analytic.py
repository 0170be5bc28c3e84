"""PPO's objective on one minibatch, by hand in numpy: several times faster than autograd for small plain MLPs on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from freewheel.core import NDArray
from freewheel.learn.ppo.objective import Coefficients, Losses, Minibatch
from freewheel.policies.fast_categorical import ACTIVATIONS, MASKED
from freewheel.policies.nets import PolicyNet
from freewheel.policies.numpy_actor import HALF_LOG_2PI
from freewheel.policies.spec import FlatParams, PolicySpec, layers, select


def _through_tanh(out: NDArray) -> NDArray:
    slope = out * out
    np.subtract(1.0, slope, out=slope)
    return slope


#: Slope of an activation, from its output.
SLOPES: Mapping[str, Callable[[NDArray], NDArray]] = {
    "tanh": _through_tanh,
    "relu": lambda out: out > 0,
    "elu": lambda out: np.minimum(out, 0) + 1,
}


def supports(spec: PolicySpec, device: str) -> bool:
    """Whether the gradients of this network are written down here."""
    return device == "cpu" and not spec.module and spec.activation in SLOPES and spec.head != "squashed"


class Trunk:
    """One MLP: remembers its activations forwards, writes its parameters' gradients backwards."""

    def __init__(
        self, weights: Mapping[str, NDArray], grads: Mapping[str, NDArray], part: str, activation: str
    ) -> None:
        self._layers, self._grads = layers(weights, part), layers(grads, part)
        self._activate, self._slope = ACTIVATIONS[activation], SLOPES[activation]
        self._inputs: list[NDArray] = []

    def forward(self, x: NDArray) -> NDArray:
        self._inputs = []
        for weight, bias in self._layers[:-1]:
            self._inputs.append(x)
            x = x @ weight
            x += bias
            self._activate(x, out=x)
        self._inputs.append(x)
        weight, bias = self._layers[-1]
        x = x @ weight
        x += bias
        return x

    def backward(self, slope: NDArray, ones: NDArray) -> None:
        """From d loss / d output [N, K]; `ones` [N] sums columns by a matrix product, which is the fastest way."""
        for i in range(len(self._layers) - 1, -1, -1):
            x, (weight_grad, bias_grad) = self._inputs[i], self._grads[i]
            np.dot(x.T, slope, out=weight_grad)
            np.dot(ones, slope, out=bias_grad)
            if i:
                back = self._layers[i][0].T
                slope = slope * back if len(back) == 1 else slope @ back  # a critic's one output: no need for BLAS
                slope *= self._slope(x)


class CategoricalHead:
    """Over K choices; masked ones have probability 0. Kept as [K, N]: numpy reduces the first axis much faster."""

    def __init__(self, mask: tuple[int, int] | None) -> None:
        self._mask = mask

    def log_prob(self, logits: NDArray, inputs: NDArray, action: NDArray) -> NDArray:
        if self._mask is not None:
            logits = np.where(inputs[:, slice(*self._mask)] > 0, logits, MASKED)
        log_p = np.array(logits.T, order="C")
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
        """d loss / d logits [N, K], from d loss / d log-prob [N] and d loss / d entropy (the same for every row)."""
        slope = self._p * -by_log_prob
        slope[self._chosen] += by_log_prob
        if by_entropy:
            slope -= by_entropy * self._p * (self._log_p + self._entropy)
        return np.asarray(slope.T)


class GaussianHead:
    """Independent columns; the log deviation is a parameter of its own."""

    def __init__(self, log_std: NDArray, grad: NDArray) -> None:
        self._log_std, self._grad = log_std, grad

    def log_prob(self, mean: NDArray, inputs: NDArray, action: NDArray) -> NDArray:
        self._precision = np.exp(-self._log_std)
        self._noise = (action - mean) * self._precision
        constant = self._log_std.sum() + HALF_LOG_2PI * mean.shape[1]
        return np.asarray(-0.5 * np.square(self._noise).sum(axis=1) - constant)

    def entropy(self) -> NDArray:
        return np.full(len(self._noise), (self._log_std + 0.5 + HALF_LOG_2PI).sum(), np.float32)

    def slope(self, by_log_prob: NDArray, by_entropy: float) -> NDArray:
        np.dot(by_log_prob, np.square(self._noise) - 1, out=self._grad)
        self._grad += by_entropy * len(by_log_prob)
        self._noise *= self._precision
        return self._noise * by_log_prob[:, None]


class Analytic:
    """Implements Objective for plain MLPs with categorical or gaussian heads."""

    def __init__(self, net: PolicyNet) -> None:
        self.spec = net.spec
        trainable = {name: view.shape for name, view in net.params.views.items() if not name.startswith("norm.")}
        weights, grads = net.params.views, FlatParams(trainable, net.grad.numpy()).views
        self._actor, self._critic = (Trunk(weights, grads, part, net.spec.activation) for part in ("actor", "critic"))
        self._head: CategoricalHead | GaussianHead
        if net.spec.head == "categorical":
            self._head = CategoricalHead(net.spec.mask)
        else:
            self._head = GaussianHead(weights["actor.log_std"], grads["actor.log_std"])
        self._ones = np.ones(0, np.float32)

    def evaluate(self, inputs: NDArray, action: NDArray) -> tuple[NDArray, NDArray]:
        head = self._actor.forward(select(self.spec.actor_columns, inputs))
        return self.values(inputs), self._head.log_prob(head, inputs, action)

    def values(self, inputs: NDArray) -> NDArray:
        return self._critic.forward(select(self.spec.critic_columns, inputs))[:, 0]

    def gradient(self, batch: Minibatch, weights: Coefficients) -> Losses:
        rows = len(batch.action)
        if len(self._ones) != rows:
            self._ones = np.ones(rows, np.float32)
        value, log_prob = self.evaluate(batch.inputs, batch.action)
        log_ratio = log_prob - batch.reference
        ratio = np.exp(log_ratio)
        moved = ratio - 1
        gain = ratio * batch.advantage
        limited = np.clip(ratio, 1 - weights.clip, 1 + weights.clip) * batch.advantage
        active = gain <= limited  # elsewhere the clipped branch is the smaller one, and it is flat
        by_log_prob = gain * active
        np.minimum(gain, limited, out=limited)
        if batch.weight is not None:
            by_log_prob *= batch.weight
            limited *= batch.weight
        by_log_prob *= -1.0 / rows
        entropy = self._head.entropy()
        self._actor.backward(self._head.slope(by_log_prob, -weights.entropy / rows), self._ones)
        error = value - batch.value
        self._critic.backward((error * (2 * weights.value / rows))[:, None], self._ones)
        return Losses(
            policy=-float(limited.sum()) / rows,
            value=float(error @ error) / rows,
            entropy=float(entropy.sum()) / rows,
            kl=float((moved - log_ratio).sum()) / rows,
            clipped=np.count_nonzero(np.abs(moved, out=moved) > weights.clip) / rows,
        )
