"""Adam over one flat vector: six in-place operations a step, on any device, and a state of two vectors and a count."""

from __future__ import annotations

from torch import Tensor, zeros_like

MEAN_DECAY, SQUARE_DECAY, EPS = 0.9, 0.999, 1e-5


class Adam:
    """Moves `vector` by `grad`, in place."""

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
        """Vector and state, copied."""
        return self.vector.clone(), self.mean.clone(), self.square.clone(), self.steps

    def recall(self, vector: Tensor, mean: Tensor, square: Tensor, steps: int) -> None:
        self.vector.copy_(vector)
        self.mean.copy_(mean)
        self.square.copy_(square)
        self.steps = steps
