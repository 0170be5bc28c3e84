"""Weights that stay on a GPU are published without a wait for it: what is asked and answered when, and what never leaves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from freewheel.core import to_numpy
from freewheel.learn import finite
from freewheel.learn.finite import Asked
from freewheel.learn.sac.learner import SAC
from freewheel.learn.spec import Compute, WorldFacts
from tests.learn.sac.test_learner import SPEC, S, sac_for
from tests.support.learning import play, sign, to_tensors

SIMULATED = WorldFacts(batched_on_device=True)


def asking(rows: int = 80) -> SAC:
    """One that learns on a CPU as on a GPU, with rows for some publications."""
    learner = sac_for(world=SIMULATED)
    learner.finite.asks = True
    learner.observe(to_tensors(sign(play(SPEC, learner.snapshot(), (rows // 2, 2)))))
    return learner


def publish(learner: SAC) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """Update up to the next version; what is published then."""
    version = learner.version
    while learner.version == version:
        learner.update()
    return {name: to_numpy(value).copy() for name, value in learner.snapshot().params.items()}


def test_a_publication_waits_for_no_answer_but_that_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()

    class Told(Asked):
        def __init__(self, value: torch.Tensor) -> None:
            super().__init__(value)
            self.number = sum(one.startswith("asked") for one in told)
            told.append(f"asked {self.number}")

        def answer(self) -> bool:
            told.append(f"answered {self.number}")
            return super().answer()

    monkeypatch.setattr(finite, "Asked", Told)
    monkeypatch.setattr(finite, "is_finite", lambda _: told.append("waited"))
    learner = asking()
    publish(learner)  # before the first update
    told.clear()
    for _ in range(3):
        publish(learner)
    assert told == ["asked 0", "asked 1", "answered 0", "asked 2", "answered 1"]


def test_it_learns_the_same() -> None:
    asks, waits = asking(), asking()
    waits.finite.asks = False
    for _ in range(6):
        ours, theirs = publish(asks), publish(waits)
        assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


def test_weights_that_are_not_finite_never_leave_and_are_put_back() -> None:
    learner = asking()
    publish(learner)
    before = publish(learner)
    learner.updater.policy.net.vector.fill_(math.nan)
    first = publish(learner)
    assert all(np.array_equal(first[name], before[name]) for name in before)  # the GPU has replaced them
    told = [learner.not_finite]
    second = publish(learner)
    told.append(learner.not_finite)
    assert told == ["", "loss/critic"]  # one publication later: nobody has waited to know
    assert all(np.isfinite(value).all() for value in second.values())
    publish(learner)
    assert not learner.not_finite
    assert all(np.isfinite(value).all() for value in publish(learner).values())


def test_what_is_saved_is_waited_for() -> None:
    learner = asking()
    publish(learner)
    publish(learner)
    learner.updater.policy.net.vector.fill_(math.nan)
    publish(learner)
    state = learner.state_dict()
    assert all(np.isfinite(to_numpy(value)).all() for name, value in state.items() if name.startswith("update."))
    assert all(np.isfinite(to_numpy(value)).all() for value in learner.snapshot().params.values())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_neither_an_update_nor_a_publication_waits() -> None:
    learner = sac_for(world=SIMULATED, compute=Compute(device="cuda"))
    assert learner.finite.asks
    learner.observe(to_tensors(sign(play(SPEC, sac_for().snapshot(), (5 * S, 2)))))
    publish(learner)
    publish(learner)  # what is remembered of the first state has been copied
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            version = learner.version
            while learner.version == version:
                learner.update()
            learner.snapshot()
    finally:
        torch.cuda.set_sync_debug_mode("default")
