"""Check on a CPU whether a computation could be captured in a CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Records the names of operations. Fails if one would wait for the device or have a shape that depends on data."""

    waits = "_local_scalar_dense nonzero masked_select _unique2 equal is_nonzero lift_fresh unique_dim".split()  # noqa: SIM905

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).removeprefix("aten.")
        assert name not in self.waits, f"{name} cannot be captured"
        if name in ("index", "index_put", "index_put_"):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), "a mask selects rows"
        if name.startswith(("rand", "normal", "uniform", "bernoulli")):
            assert (kwargs or {}).get("generator") is not None, f"{name} draws from the global generator"
        self.names.append(name)
        return func(*args, **kwargs or {})
