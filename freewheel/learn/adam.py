"""Two versions of Adam: for one flat vector, and for parameters that get new gradients in every backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, zeros_like

from freewheel.policies.torch_private import fused_adam

MEAN_DECAY, SQUARE_DECAY, EPS = 0.9, 0.999, 1e-5


class Adam:
    """Moves `vector` by `grad` in place, with six operations per step. Its state is two vectors and a count."""

    def __init__(self, vector: Tensor, grad: Tensor) -> None:
        self.vector, self.grad = vector, grad
        self.mean, self.square, self.steps = zeros_like(vector), zeros_like(vector), 0

    def step(self, lr: float) -> None:
        self.steps += 1
        self.mean.lerp_(self.grad, 1 - MEAN_DECAY)
        self.square.lerp_(self.grad * self.grad, 1 - SQUARE_DECAY)
        root = (self.square / (1 - SQUARE_DECAY**self.steps)).sqrt_().add_(EPS)
        self.vector.addcdiv_(self.mean, root, value=-lr / (1 - MEAN_DECAY**self.steps))

    def remember(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return copies of the vector and the state."""
        return self.vector.clone(), self.mean.clone(), self.square.clone(), self.steps

    def recall(self, vector: Tensor, mean: Tensor, square: Tensor, steps: int) -> None:
        for part, value in ((self.vector, vector), (self.mean, mean), (self.square, square)):
            part.copy_(value)
        self.steps = steps


class FusedAdam:
    """Moves parameters by their gradients in one kernel. No wait for the device: a CUDA graph can replay it."""

    def __init__(self, parameters: Sequence[Tensor], lr: float, eps: float = 1e-8) -> None:
        self.parameters, self._eps = list(parameters), eps
        device, sizes = self.parameters[0].device, [parameter.numel() for parameter in self.parameters]
        self.mean, self.square = (torch.zeros(sum(sizes), device=device) for _ in range(2))
        self.steps = torch.zeros((), device=device)
        self.lr = torch.tensor(lr, device=device)  # a tensor, so that a graph can read it
        self._means, self._squares = (
            [part.view(one.shape) for part, one in zip(flat.split(sizes), self.parameters, strict=True)]
            for flat in (self.mean, self.square)
        )

    @property
    def state(self) -> list[Tensor]:
        """The tensors that a step changes, without the parameters."""
        return [self.mean, self.square, self.steps]

    def forget(self) -> None:
        """Drop the gradients, so that the next backward pass writes new ones and adds nothing."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Make one step. Parameters without a gradient stay: the loss does not reach these parts of a user's module."""
        self.steps += 1
        all_of_them = zip(self.parameters, self._means, self._squares, strict=True)
        moved = [(one, one.grad, mean, square) for one, mean, square in all_of_them if one.grad is not None]
        parameters, grads, means, squares = map(list, zip(*moved, strict=True))
        fused_adam(
            parameters, grads, means, squares, [], [self.steps] * len(moved), lr=self.lr, beta1=MEAN_DECAY,
            beta2=SQUARE_DECAY, weight_decay=0.0, eps=self._eps, amsgrad=False, maximize=False,
        )  # fmt: skip
