"""MBPO in several learners: each has a model of its own rows, and all have the same agent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from freewheel.core import BatchSpec
from freewheel.learn.mbpo.learner import MBPO
from freewheel.learn.spec import LearnerSpec, Services
from freewheel.transport.executors import SerialExecutor
from tests.support.learning import play, sign
from tests.support.model_story import SMALL, SPEC, S
from tests.support.peers import ThreadPeers, in_threads


def test_each_fits_a_model_to_its_rows_and_all_have_the_same_agent() -> None:
    config = replace(SMALL, batch=11, learning_starts=32, model_every=24, rollout_schedule=(40, 80, 1, 3))

    def body(peers: ThreadPeers) -> MBPO:
        services = Services(executors=SerialExecutor, peers=peers)
        learner = MBPO(config, LearnerSpec(policy=SPEC, batch=BatchSpec(S // 2, 2), seed=0, services=services))
        sequence = 0
        while learner.version < 15:
            if learner.hungry or not learner.ready:
                data = play(SPEC, learner.snapshot(), (1 + sequence % (2 + peers.rank), 2), 100 * peers.rank + sequence)
                learner.observe(sign(data, sequence=sequence))
                sequence += 1
            if learner.ready:
                learner.update()
        return learner

    one, other = in_threads(2, body)
    assert one.pace.updates == other.pace.updates > 20
    for name, value in one.updater.state_dict().items():
        if name != "noise":
            assert np.array_equal(value, other.updater.state_dict()[name]), name
    assert not np.array_equal(one.model.vector, other.model.vector)
    assert (one.batch, other.batch) == (5, 6)
    assert (one._real, other._real) == (2, 3)
    for learner in (one, other):
        assert learner.config.model_every == 12
        assert learner._fits >= 3
        assert learner._starts == 6  # rollouts of a model: half of those of one learner
        assert learner.length == (3 if 2 * learner.pace.rows >= 80 else 2)
