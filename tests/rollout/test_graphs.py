"""Program on a CPU: it calls its body directly and has a reason why there is no graph. Graphs are tested in tests/gpu."""

from __future__ import annotations

import pytest
import torch

from freewheel.core import Compile
from freewheel.rollout.graphs import Program


class Counting:
    """Adds a random number to a total, and counts how often it is called."""

    def __init__(self) -> None:
        self.total, self.generator = torch.zeros(1), torch.Generator().manual_seed(3)
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        self.total += torch.rand(1, generator=self.generator)


@pytest.mark.parametrize(("compile", "why"), [("off", ""), ("graphs", "its tensors are not on a GPU")])
def test_it_computes_and_has_a_reason_why_there_is_no_graph(compile: Compile, why: str) -> None:  # noqa: A002
    body, wanted = Counting(), Counting()
    program = Program(body, compile, state=[body.total], generators=[body.generator])
    assert (program.graph, program.fallback) == (None, why)
    assert (body.calls, body.total.item()) == (0, 0.0), "making it changes nothing"
    assert torch.equal(body.generator.get_state(), wanted.generator.get_state())
    for _ in range(4):
        program()
        wanted()
        assert torch.equal(body.total, wanted.total)
    assert body.calls == 4
    body.total = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        program()
