"""Undocumented functions of torch that the package uses: the one place to fix when a version of torch changes them.

Each name is torch's own function, not a wrapper, so a call has no extra cost. tests/policies/test_torch_private.py
specifies what each function has to do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from freewheel.errors import SetupError

SEEN = "2.13"  # the version of torch with which all of this was last tried


def _private(owner: Any, name: str) -> Any:
    """Return this attribute; raises SetupError, which names the version, if torch no longer has it."""
    if (found := getattr(owner, name, None)) is None:
        where = getattr(owner, "__name__", type(owner).__name__)
        raise SetupError(
            f"torch {torch.__version__} has no {where}.{name}, which torch {SEEN} had: install that version"
        )
    return found


#: Adam's step for many tensors in one kernel; it does not wait for the device, so a CUDA graph can capture it.
fused_adam = _private(torch, "_fused_adam_")
#: The norm of each tensor of a list, and all tensors of a list times one number in place: one kernel for all of them.
norms = _private(torch, "_foreach_norm")
scale_all = _private(torch, "_foreach_mul_")
#: The base of every kind of batch normalisation.
BatchNorm: type[nn.Module] = _private(nn.modules.batchnorm, "_BatchNorm")
