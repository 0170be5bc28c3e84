"""Fixed-shape computations: run as they are, or captured once in a CUDA graph and replayed without a launch each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from freewheel.core import Compile

CAPTURING = threading.Lock()  # one capture at a time, whichever thread it is in
WARM_UPS = 3  # calls before a capture: libraries make their handles and workspaces in the first ones


class Program:
    """`body` works on static tensors in place; calling the Program runs it once, on the caller's stream.

    Where it is captured, `state` (every tensor it changes that matters) and the generators are put back after the calls that
    warm it up, so a Program starts where it would have started without a graph. What cannot be captured runs as it is, and
    `fallback` says why.
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
        self.graph: torch.cuda.CUDAGraph | None = None
        self.fallback = ""
        if compile == "graphs":
            if not all(tensor.is_cuda for tensor in state):
                self.fallback = "its tensors are not on a GPU"
                return
            before = [tensor.clone() for tensor in state], [generator.get_state() for generator in generators]
            try:
                with CAPTURING:
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


def _capture(body: Callable[[], None], generators: Sequence[torch.Generator]) -> torch.cuda.CUDAGraph:
    """On a stream of its own; other threads may go on meanwhile."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM_UPS):
            body()
    aside.synchronize()
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
        body()
    torch.cuda.current_stream().wait_stream(aside)
    return graph
