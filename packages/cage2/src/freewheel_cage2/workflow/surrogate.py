"""A Gaussian process over orders that predicts the result of a trial. It needs scikit-learn (extra `workflow`)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor, kernels

from freewheel.core import NDArray
from freewheel_cage2.workflow.envs import Order, precedence

#: Bounds of the hyper-parameters. Variances are relative to the variance of the values; decay is per pair of types.
AMPLITUDE = (0.1, 10.0)
DECAY = (0.03, 3.0)
NOISE = (1e-3, 1.0)
RESTARTS = 1  # further starts of the hyper-parameter optimiser, after the one from the middle of the bounds


class MallowsKernel(kernels.StationaryKernelMixin, kernels.NormalizedKernelMixin, kernels.Kernel):  # type: ignore[misc]
    """The kernel exp(-decay × Kendall's distance) of orders as `precedence` [N, 10]. It is positive definite for decay > 0."""

    def __init__(self, decay: float = 0.3, decay_bounds: tuple[float, float] | str = DECAY) -> None:
        self.decay, self.decay_bounds = decay, decay_bounds  # a Kernel calls all its parameters `theta`

    @property
    def hyperparameter_decay(self) -> Any:
        return kernels.Hyperparameter("decay", "numeric", self.decay_bounds)

    def __call__(self, X: NDArray, Y: NDArray | None = None, eval_gradient: bool = False) -> Any:
        """Return the kernel [N, M], and its derivative by log(decay) [N, N, 1] if asked for."""
        pairs = np.abs(X[:, None] - (X if Y is None else Y)[None]).sum(axis=2)
        value = np.exp(-self.decay * pairs)
        if not eval_gradient:
            return value
        if self.hyperparameter_decay.fixed:
            return value, np.empty((*value.shape, 0))
        return value, (-self.decay * pairs * value)[..., None]

    def __repr__(self) -> str:
        return f"MallowsKernel(decay={self.decay:.3g})"


@dataclass(frozen=True)
class OrderPrediction:
    """The prediction for each of N orders, without the noise of a single trial."""

    mean: NDArray  # [N]
    std: NDArray  # [N]

    def at_least(self, bound: float) -> NDArray:
        """Return [N] the probability that the order's mean is at least this."""
        scores = (self.mean - bound) / np.maximum(self.std, 1e-12)
        return np.array([math.erfc(-score / math.sqrt(2)) / 2 for score in scores])


class Surrogate:
    """A Gaussian process with kernel amplitude × MallowsKernel + noise over standardised values. The marginal likelihood
    determines the hyper-parameters within their bounds."""

    def __init__(self, seed: int = 0, kernel: kernels.Kernel | None = None) -> None:
        amplitude, decay, noise = (math.sqrt(low * high) for low, high in (AMPLITUDE, DECAY, NOISE))
        shape = kernels.ConstantKernel(amplitude, AMPLITUDE) * MallowsKernel(decay, DECAY)
        kernel = kernel or (shape + kernels.WhiteKernel(noise, NOISE))
        self.process = GaussianProcessRegressor(kernel, n_restarts_optimizer=RESTARTS, random_state=seed)
        self._centre = 0.0
        self._scale = 1.0

    def fit(self, orders: Sequence[Order], values: Sequence[float]) -> Surrogate:
        """Learn from trials. An order may have several trials."""
        self._centre = float(np.mean(values))
        self._scale = float(np.std(values)) or 1.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a hyper-parameter may be at its bound
            self.process.fit(precedence(orders), (np.asarray(values) - self._centre) / self._scale)
        return self

    def predict(self, orders: Sequence[Order]) -> OrderPrediction:
        """Return the prediction for these orders."""
        mean, std = self.process.predict(precedence(orders), return_std=True)
        noise = self.process.kernel_.k2.noise_level  # the predicted deviation of a single trial includes this
        return OrderPrediction(
            self._centre + self._scale * mean, self._scale * np.sqrt(np.maximum(std**2 - noise, 0.0))
        )
