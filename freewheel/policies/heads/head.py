"""What an action head is: the step from a network's outputs to actions, in numpy, in torch, and with its gradient.

A head is one module of this folder (or of a package with an entry point in `freewheel.heads`) that ends with `HEAD = ...`.
B lanes or N rows, K outputs of the network, A columns of an action. Nothing in these modules imports torch on its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from numpy.random import Generator

from freewheel.core import ActionSpec, NDArray
from freewheel.errors import SetupError
from freewheel.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from freewheel.policies.spec import FlatParams, PolicySpec

Views = Mapping[str, NDArray]  # parameters or their gradients by name
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class NumpyForm(Protocol):
    """The head of one numpy actor: actions [B, ...] and their log-probabilities [B]; may overwrite the outputs [B, K]."""

    def choose(self, outputs: NDArray, obs: NDArray, rng: Generator, greedy: bool) -> tuple[NDArray, NDArray]: ...


@runtime_checkable
class OneLaneForm(NumpyForm, Protocol):
    """A NumpyForm that computes a single lane faster: from the actor's input columns and the whole observation [D]."""

    def choose_one(self, inputs: NDArray, obs: NDArray, rng: Generator | None) -> tuple[int, float]: ...  # None: greedy


class Distribution(Protocol):
    """The head in torch: the distribution that N rows of outputs describe."""

    def log_prob(self, action: Tensor) -> Tensor: ...  # [N]
    def entropy(self) -> Tensor: ...  # [N]
    def sample(self, generator: torch.Generator) -> tuple[Tensor, Tensor]: ...  # actions and log-probabilities
    def mode(self) -> Tensor: ...  # the greedy actions


@runtime_checkable
class Reparameterised(Distribution, Protocol):
    """A Distribution whose samples have a gradient."""

    def rsample(self, generator: torch.Generator) -> tuple[Tensor, Tensor]: ...  # as `sample`, differentiable


class Slopes(Protocol):
    """The head with its gradient in numpy, for minibatches of N rows: first log_prob, then entropy, then slope."""

    def log_prob(self, outputs: NDArray, inputs: NDArray, action: NDArray) -> NDArray: ...  # [N]
    def entropy(self) -> NDArray: ...  # [N]
    # d loss / d outputs [N, K]; writes the gradient of the head's own parameters
    def slope(self, by_log_prob: NDArray, by_entropy: float) -> NDArray: ...


class Head(Protocol):
    """Everything about one head; a head derives from this and defines at least what has no default."""

    name: str
    analytic: bool = False  # whether `slopes` exists
    reparameterised: bool = False  # whether its distribution is Reparameterised

    def misfit(self, action: ActionSpec) -> str: ...  # why it cannot serve these actions, and what to do; empty: it can
    def outputs(self, action_size: int) -> int:
        """K."""
        return action_size

    def parameters(self, spec: PolicySpec) -> dict[str, tuple[tuple[int, ...], float]]:
        """Of the head itself: name -> shape and first value."""
        return {}

    def actor(self, spec: PolicySpec, params: FlatParams) -> NumpyForm: ...
    # mask [N, K]: which actions are allowed; None: all
    def distribution(self, outputs: Tensor, mask: Tensor | None, parameters: Mapping[str, Tensor]) -> Distribution: ...
    def slopes(self, spec: PolicySpec, weights: Views, grads: Views) -> Slopes:
        raise SetupError(f"the {self.name} head has no analytic gradient; use autograd")


HEADS: Registry[Head] = Registry("head", "HEAD", "freewheel.policies.heads")
