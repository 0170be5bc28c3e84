"""Fixed-shape computations: called directly, or captured once in a CUDA graph and replayed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from freewheel.core import Compile

CAPTURING = threading.Lock()  # one capture at a time over all threads
_READY: set[torch.device] = set()  # devices whose thread for backward passes has a context
WARM_UPS = 3  # calls before a capture: libraries allocate handles and workspaces in the first calls


def current(device: torch.device | str) -> AbstractContextManager[object]:
    """Make a GPU the current device of this thread, for new events and graphs and for a simulator that uses "cuda".
    Every thread begins with the first GPU. Do nothing for the CPU."""
    return torch.cuda.device(device) if torch.device(device).type == "cuda" else nullcontext()


class Program:
    """`body` works on static tensors in place; calling the Program runs it once, on the caller's stream.

    After the warm-up calls of a capture, `state` (every tensor that matters and that the body changes) and the
    generators get their old values back, so results do not depend on the capture. A body that cannot be captured is
    called directly, and `fallback` gives the reason.
    """

    def __init__(
        self,
        body: Callable[[], None],
        compile: Compile,  # noqa: A002 - the name of the option
        *,
        state: Sequence[Tensor],
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self._body = body
        for device in {tensor.device for tensor in state if tensor.is_cuda} - _READY:
            _give_context(device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.fallback = ""
        if compile == "graphs":
            device, *others = {tensor.device for tensor in state}
            if others or device.type != "cuda":
                self.fallback = "its tensors are on several devices" if others else "its tensors are not on a GPU"
                return
            before = [tensor.clone() for tensor in state], [generator.get_state() for generator in generators]
            try:
                with CAPTURING, current(device):
                    self.graph = _capture(body, generators)
            except RuntimeError as error:
                self.fallback = str(error).splitlines()[0]
            for tensor, value in zip(state, before[0], strict=True):
                tensor.copy_(value)
            for generator, old in zip(generators, before[1], strict=True):
                generator.set_state(old)

    def __call__(self) -> None:
        if self.graph is None:
            self._body()
        else:
            self.graph.replay()


def _give_context(device: torch.device) -> None:
    """Run a first kernel in the thread that torch uses for the backward passes of a device, which gives the thread a
    context. If cuBLAS came first, it would warn that there is none."""
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros(1, device=device, requires_grad=True).exp().backward()
    _READY.add(device)


def _capture(body: Callable[[], None], generators: Sequence[torch.Generator]) -> torch.cuda.CUDAGraph:
    """Capture on a separate stream of the current device; other threads may continue meanwhile. Torch hands out its
    streams in turn, so a new one may also be in use by another thread, whose work would fail during the capture.
    High-priority streams have no other use."""
    stream = torch.cuda.Stream(priority=-1)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            body()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        body()
    torch.cuda.current_stream().wait_stream(stream)
    return graph
