"""Adam is torch's, over one flat vector, and can be taken back."""

from __future__ import annotations

import pytest
import torch

from freewheel.learn.adam import EPS, MEAN_DECAY, SQUARE_DECAY, Adam, FusedAdam


def gradients(count: int, size: int = 40) -> torch.Tensor:
    """Of all sizes, from rounding errors to explosions."""
    rng = torch.Generator().manual_seed(0)
    return torch.randn(count, size, generator=rng) * torch.logspace(-8, 3, size)


def test_fifty_steps_are_those_of_torch() -> None:
    start = torch.linspace(-1, 1, 40)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Adam([theirs], lr=1e-2, betas=(MEAN_DECAY, SQUARE_DECAY), eps=EPS)
    ours, grad = start.clone(), torch.zeros(40)
    adam = Adam(ours, grad)
    for step, gradient in enumerate(gradients(50)):
        lr = 1e-2 * (1 - step / 50)
        optimizer.param_groups[0]["lr"] = lr
        theirs.grad = gradient
        optimizer.step()
        grad.copy_(gradient)
        adam.step(lr)
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-7)
    assert adam.steps == 50
    assert (ours - start).abs().min() > 1e-5


def test_what_is_remembered_is_recalled_bit_for_bit() -> None:
    vector, grad = torch.linspace(-1, 1, 40), torch.zeros(40)
    adam = Adam(vector, grad)

    def run(parts: torch.Tensor) -> torch.Tensor:
        for gradient in parts:
            grad.copy_(gradient)
            adam.step(1e-2)
        return vector.clone()

    parts = gradients(12)
    run(parts[:5])
    before = adam.remember()
    once = run(parts[5:])
    adam.recall(*before)
    assert torch.equal(vector, before[0])
    assert adam.steps == 5
    assert torch.equal(run(parts[5:]), once)


def test_fused_steps_are_those_of_torch_and_what_has_no_gradient_stays() -> None:
    start = torch.linspace(-1, 1, 40)
    ours, theirs = ([torch.nn.Parameter(start[:10].clone()), torch.nn.Parameter(start.clone())] for _ in range(2))
    adam, optimizer = FusedAdam(ours, 1e-2, eps=EPS), torch.optim.Adam(theirs, lr=1e-2, eps=EPS)
    for gradient in gradients(20):
        adam.forget()
        assert ours[1].grad is None
        ours[1].grad = theirs[1].grad = gradient
        adam.step()
        optimizer.step()
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-7)
    assert torch.equal(ours[0], start[:10])
    assert not adam.mean[:10].any()
    assert int(adam.steps) == 20


def test_a_step_size_can_be_changed_in_place() -> None:
    parameter = torch.zeros(1)
    adam = FusedAdam([parameter], 0.5)
    for lr, place in ((0.5, -0.5), (0.25, -0.75)):
        adam.lr.fill_(lr)
        parameter.grad = torch.ones(1)
        adam.step()
        assert float(parameter) == pytest.approx(place, rel=1e-5)
