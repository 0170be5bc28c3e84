"""A collector continues where another one stopped: no episode twice, no row lost, the right version."""

from __future__ import annotations

import pytest

from freewheel.collect.batch import BatchConfig
from freewheel.collect.continuous import ContinuousConfig
from freewheel.collect.episodes import EpisodesConfig
from freewheel.collect.lockstep import LockstepConfig
from freewheel.collect.mode import ModeConfig
from freewheel.collect.sequential import SequentialConfig
from freewheel.rollout.factory import RunnerFactory
from tests.support.collectors import Spec, Weights, stop_and_continue

MODES: dict[str, ModeConfig] = {
    "sequential": SequentialConfig(2),
    "lockstep": LockstepConfig(2, "inline"),
    "batch": BatchConfig(workers=2, envs_per_worker=1, num_envs=2),
    "continuous": ContinuousConfig(workers=2, envs_per_worker=1, num_envs=2),
    "episodes": EpisodesConfig(workers=2, num_envs=2),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_collector_continues(mode: str, factory: RunnerFactory, snapshot: Weights, spec: Spec) -> None:
    stop_and_continue(MODES[mode], factory, spec(7, lanes=2), snapshot, own_episodes=mode != "episodes")
