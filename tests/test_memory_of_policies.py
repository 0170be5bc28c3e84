"""Recurrent policies: their memory is kept from step to step, is zero at the start of an episode, and comes with each chunk."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from freewheel.collect.batch import BatchConfig
from freewheel.collect.continuous import ContinuousConfig
from freewheel.collect.episodes import EpisodesConfig
from freewheel.collect.lockstep import LockstepConfig
from freewheel.collect.sequential import SequentialConfig
from freewheel.core import BatchSpec, Chunk, Collector, Decision, NDArray, Snapshot
from freewheel.envs.gym import GymConfig
from freewheel.rollout.factory import CollectSpec, RunnerFactory

LENGTH, LANES, STEPS = 5, 2, 7  # episodes end inside chunks and between them


class Counting:
    """Its memory is the number of steps in the episode, and minus that; it returns the number as log-probability."""

    state_size = 2

    def load(self, snapshot: Snapshot) -> None:
        """It has no weights."""

    def act(
        self, obs: NDArray, rng: np.random.Generator, *, state: NDArray | None = None, greedy: bool = False
    ) -> Decision:
        before = np.zeros((len(obs), 2), np.float32) if state is None else state
        return Decision(np.zeros(len(obs), np.int64), before[:, 0].copy(), before + np.array([1, -1], np.float32))


WORLD = GymConfig(id="freewheel.testing.worlds:Drifting", args={"n": 4, "length": LENGTH})
MODES: dict[str, Callable[[RunnerFactory, CollectSpec], Collector]] = {
    "sequential": SequentialConfig(LANES).build,
    "lockstep": LockstepConfig(LANES, "inline").build,
    "batch": BatchConfig(workers=1, envs_per_worker=LANES, num_envs=LANES, collection_batch_size=3).build,
    "continuous": ContinuousConfig(workers=2, envs_per_worker=1, num_envs=LANES, collection_batch_size=3).build,
    "episodes": EpisodesConfig(workers=2, num_envs=LANES, collection_batch_size=3).build,
}


def check(chunk: Chunk) -> int:
    """Check the memory of every row; returns the number of rows."""
    ends = chunk.data.terminated | chunk.data.truncated
    for lane in range(chunk.data.valid.shape[1]):
        count = chunk.state[lane, 0]
        assert chunk.state[lane].tolist() == [count, -count]
        for t in range(len(ends)):
            assert chunk.data.log_prob[t, lane] == count
            count = 0 if ends[t, lane] else count + 1
    return chunk.rows


@pytest.mark.parametrize("mode", MODES)
def test_the_memory_is_kept_in_every_mode(mode: str) -> None:
    env = WORLD.make(range(LANES))
    env.close()
    spec = CollectSpec(env=env.spec, batch=BatchSpec(STEPS, LANES))
    checked, version = 0, 0
    with MODES[mode](RunnerFactory(WORLD.make, Counting, seed=3), spec) as collector:
        while checked < 6 * STEPS * LANES:
            collector.publish(Snapshot(version, {}), checked)
            for chunk in collector.collect(wait=True):
                assert chunk.state.shape == (chunk.data.valid.shape[1], 2)
                checked += check(chunk)
            version += 1
