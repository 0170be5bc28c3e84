"""What learners hand over and take back: all that is learned, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from freewheel.core import ActionSpec, BatchSpec, EnvSpec, NDArray, Slice, to_numpy
from freewheel.learn.mbpo.config import MBPOConfig
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.sac.config import SACConfig
from freewheel.learn.spec import OBS_STATISTICS, POLICY, AlgorithmConfig, LearnerSpec, Services
from freewheel.policies.spec import PolicyConfig
from freewheel.transport.executors import SerialExecutor
from tests.support.learning import play, sign

KINDS: dict[str, AlgorithmConfig] = {
    "ppo in numpy": PPOConfig(gradient="analytic", reward_scale="returns"),
    "ppo in torch": PPOConfig(gradient="autograd", reward_scale="none"),
    "sac": SACConfig(learning_starts=8, batch=8),
    "mbpo": MBPOConfig(
        learning_starts=8, batch=8, model_hidden=(8,), members=2, elites=1, rollouts_per_row=0.1, max_epochs=2,
        updates_per_row=1,
    ),
}  # fmt: skip


def build(kind: str, seed: int) -> Any:
    action = ActionSpec("box", 2, (-1.0, -1.0), (1.0, 1.0))
    world = EnvSpec("toy", 2, 3, "float32", (Slice("policy", 0, 3, (3,)),), action)
    head = "gaussian" if kind.startswith("ppo") else "squashed"
    policy = PolicyConfig(hidden=(4,), normalize_obs=True, head=head).resolve(world)
    services = Services(executors=SerialExecutor)
    return KINDS[kind].build(LearnerSpec(policy=policy, batch=BatchSpec(8, 2), seed=seed, services=services))


def trained(kind: str, seed: int) -> Any:
    learner = build(kind, seed)
    learner.observe(sign(play(learner.spec.policy, learner.snapshot(), (8, 2), seed)))
    learner.update()
    return learner


def same(ours: dict[str, NDArray], theirs: dict[str, NDArray]) -> bool:
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_handed_over_makes_another_learner_the_same(kind: str) -> None:
    one, other = trained(kind, 1), trained(kind, 2)
    for value in one.learned().values():
        value[...] = 7.0  # it is a copy
    learned, before = one.learned(), other.state_dict()
    assert not any((value == 7.0).all() for value in learned.values())
    assert learned[OBS_STATISTICS][-1] == 16, "rows behind the statistics"
    assert not same(learned, other.learned())
    other.adopt(learned)
    assert same(learned, other.learned())
    for name, value in one.snapshot().params.items():
        assert np.array_equal(value, to_numpy(other.snapshot().params[name])), name
        assert np.array_equal(learned[f"{POLICY}{name}"], value)
    after = other.state_dict()
    moved = {name for name in before if not np.array_equal(to_numpy(before[name]), to_numpy(after[name]))}
    kept = "adam", "rng", "replay.", "held.", "counts", "noise", "running_return", "fitter.", "model.", "model_buffer."
    assert moved
    assert not {name for name in moved if any(part in name for part in kept)}, "the optimiser, rows and counts stay"
