"""A Gaussian process over orders, which predicts the result of a trial. Needs scikit-learn (extra `workflow`)."""

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

#: Bounds of the hyper-parameters: variances relative to the variance of the values, decay per pair of types.
AMPLITUDE, DECAY, NOISE = (0.1, 10.0), (0.03, 3.0), (1e-3, 1.0)
RESTARTS = 1  # of the optimiser of the hyper-parameters, besides the one from the middle of the bounds


class MallowsKernel(kernels.StationaryKernelMixin, kernels.NormalizedKernelMixin, kernels.Kernel):  # type: ignore[misc]
    """exp(-decay × Kendall's distance) of orders as `precedence` [N, 10]: positive definite for every decay above 0."""

    def __init__(self, decay: float = 0.3, decay_bounds: tuple[float, float] | str = DECAY) -> None:
        self.decay, self.decay_bounds = decay, decay_bounds  # `theta` is what a Kernel calls all its parameters

    @property
    def hyperparameter_decay(self) -> Any:
        return kernels.Hyperparameter("decay", "numeric", self.decay_bounds)

    def __call__(self, X: NDArray, Y: NDArray | None = None, eval_gradient: bool = False) -> Any:
        """[N, M], and the derivative by log(decay) [N, N, 1] if asked for."""
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
        """[N] the probability that the order's mean is not below this."""
        scores = (self.mean - bound) / np.maximum(self.std, 1e-12)
        return np.array([math.erfc(-score / math.sqrt(2)) / 2 for score in scores])


class Surrogate:
    """amplitude × MallowsKernel + noise over standardised values, hyper-parameters by marginal likelihood within their bounds."""

    def __init__(self, seed: int = 0, kernel: kernels.Kernel | None = None) -> None:
        amplitude, decay, noise = (math.sqrt(low * high) for low, high in (AMPLITUDE, DECAY, NOISE))
        shape = kernels.ConstantKernel(amplitude, AMPLITUDE) * MallowsKernel(decay, DECAY)
        kernel = kernel or (shape + kernels.WhiteKernel(noise, NOISE))
        self.process = GaussianProcessRegressor(kernel, n_restarts_optimizer=RESTARTS, random_state=seed)
        self._centre, self._scale = 0.0, 1.0

    def fit(self, orders: Sequence[Order], values: Sequence[float]) -> Surrogate:
        """Learn from trials; an order may have had several."""
        self._centre, self._scale = float(np.mean(values)), float(np.std(values)) or 1.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a hyper-parameter at its bound is fine
            self.process.fit(precedence(orders), (np.asarray(values) - self._centre) / self._scale)
        return self

    def predict(self, orders: Sequence[Order]) -> OrderPrediction:
        """The prediction for these orders."""
        mean, std = self.process.predict(precedence(orders), return_std=True)
        noise = self.process.kernel_.k2.noise_level  # included in the prediction of a single trial
        return OrderPrediction(
            self._centre + self._scale * mean, self._scale * np.sqrt(np.maximum(std**2 - noise, 0.0))
        )
