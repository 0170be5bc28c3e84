"""The private parts of torch do what we use them for. Where one fails, this version of torch has changed it."""

from __future__ import annotations

import ast
import re
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from freewheel.errors import SetupError
from freewheel.policies import torch_private
from tests.support.places import ROOT

CHANGED = f"torch {torch.__version__} has changed it; {torch_private.SEEN} had it as it is used"
PRIVATE = re.compile(r"\._(?!_)")
LEFT = {"torch._C"}  # of torch.distributed, in transport/learners


def tensors(seed: int, count: int = 3) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randn(2 + place, 3, generator=drawn) for place in range(count)]


def test_the_fused_step_is_a_step_of_adam() -> None:
    ours, grads = tensors(1), tensors(2)
    theirs = [nn.Parameter(one.clone()) for one in ours]
    adam = torch.optim.Adam(theirs, lr=0.1, betas=(0.9, 0.999), eps=1e-8)
    means, squares = ([torch.zeros_like(one) for one in ours] for _ in range(2))
    steps = torch.zeros(())
    for _ in range(3):
        steps += 1
        torch_private.fused_adam(
            ours, grads, means, squares, [], [steps] * len(ours), lr=torch.tensor(0.1), beta1=0.9, beta2=0.999,
            weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        for one, grad in zip(theirs, grads, strict=True):
            one.grad = grad.clone()
        adam.step()
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other.detach(), msg=lambda text: f"_fused_adam_: {CHANGED}\n{text}")
    assert steps == 3, f"_fused_adam_: {CHANGED}"


def test_norms_of_a_list_are_those_of_its_tensors() -> None:
    found = torch_private.norms(tensors(3))
    wanted = [torch.linalg.vector_norm(one) for one in tensors(3)]
    torch.testing.assert_close(list(found), wanted, msg=lambda text: f"_foreach_norm: {CHANGED}\n{text}")


def test_a_list_is_scaled_in_place_by_a_tensor_with_one_number() -> None:
    found = tensors(4)
    torch_private.scale_all(found, torch.tensor(0.5))
    torch.testing.assert_close(
        found, [one * 0.5 for one in tensors(4)], msg=lambda text: f"_foreach_mul_: {CHANGED}\n{text}"
    )


def test_all_kinds_of_batch_normalisation_have_one_base() -> None:
    kinds = (nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2))
    assert all(isinstance(one, torch_private.BatchNorm) for one in kinds), f"_BatchNorm: {CHANGED}"
    assert not isinstance(nn.LayerNorm(2), torch_private.BatchNorm), f"_BatchNorm: {CHANGED}"


def test_what_a_version_has_no_more_is_named_with_that_version() -> None:
    with pytest.raises(SetupError) as refusal:
        torch_private._private(SimpleNamespace(__name__="torch"), "_fused_adam_")
    wanted = f"torch {torch.__version__} has no torch._fused_adam_, which torch {torch_private.SEEN} had: install that version"
    assert str(refusal.value) == wanted


def test_no_other_module_uses_private_parts_of_torch() -> None:
    """By its name (torch._x, nn.modules.x._X) or by an import."""
    found = set[str]()
    for path in sorted((ROOT / "freewheel").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            private = [name for name in names if re.fullmatch(r"(torch|nn)(\.\w+)+", name) and PRIVATE.search(name)]
            found |= {f"{path.name}: {name}" for name in private if not name.startswith(tuple(LEFT))}
    assert sorted(found) == []
