"""The learner over a replay buffer: how the statistics of observations move."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from freewheel.core import BatchSpec
from freewheel.learn.sac.config import SACConfig
from tests.learn.sac.test_learner import NORMALISED, S, sac_for, settle
from tests.support.learning import play, sign


def test_statistics_of_observations_move_when_there_are_a_hundredth_more_rows() -> None:
    """Also in a buffer that keeps fewer, and in one that goes on."""
    config = SACConfig(learning_starts=200, updates_per_row=1e-3, buffer=200)
    learner, other = (sac_for(config, NORMALISED) for _ in range(2))
    data, moved, mean = play(NORMALISED, learner.snapshot(), (640, 2)), list[int](), np.zeros(3)
    for rows in range(S, 160 * S + 1, S):
        learner.observe(sign(data, slice((rows - S) // 2, rows // 2)))
        settle(learner)
        if rows == 102 * S:  # the last ones do not count yet
            other.load_state_dict(learner.state_dict())
            other.replay.write(rows - 200, learner.replay.read(rows - 200, rows))
            learner = other
        before, mean = mean, np.asarray(learner.snapshot().params["norm.mean"])
        if (mean != before).any():
            moved.append(rows)
            assert mean == pytest.approx(data.obs[: rows // 2].reshape(-1, 3).mean(0) * [1, 0, 1], rel=1e-4, abs=1e-4)
    assert moved == [*range(S, 101 * S, S), *range(101 * S, 160 * S, 2 * S)]


def test_the_first_updates_read_observations_that_are_normalised_also_before_a_publication() -> None:
    learner = sac_for(SACConfig(batch=8, buffer=1_000, learning_starts=10), NORMALISED, batch=BatchSpec(40, 2))
    data, seen = play(NORMALISED, learner.snapshot(), (20, 2)), list[np.ndarray]()
    step = learner.updater.step
    learner.updater.step = lambda: (seen.append(norm()), step())[1]  # type: ignore[func-returns-value, method-assign]

    def norm() -> np.ndarray:
        return np.concatenate([np.array(learner.snapshot().params[f"norm.{name}"]) for name in ("mean", "scale")])

    learner.observe(sign(data, slice(0, 10)))
    settle(learner)
    learner.observe(sign(data, slice(10, 20)))
    settle(learner)
    assert (learner.version, len(seen)) == (0, 30)
    first = data.obs[:10].reshape(-1, 3)
    mean, scale = first.mean(0) * [1, 0, 1], 1 / np.where([True, False, True], first.std(0), 1)
    assert seen[0] == pytest.approx([*mean, *scale], rel=1e-4, abs=1e-4)
    assert all((one == seen[0]).all() for one in seen), "they move with a publication"


def test_weights_that_are_put_back_get_the_statistics_of_now() -> None:
    """They move with a hundredth more rows, but what was put back had those of many rows ago."""
    learner = sac_for(SACConfig(batch=8, learning_starts=20, updates_per_row=1, buffer=5_000), NORMALISED)
    data, before = play(NORMALISED, learner.snapshot(), (700, 2)), 0.0
    data.obs[400:] += 1_000.0  # since the last weights that are known to be finite
    for at in range(0, 700, S // 2):
        learner.observe(sign(data, slice(at, at + S // 2)))
        settle(learner)
        if not before and at >= 600:
            before = learner.pace.rows
            with torch.no_grad():
                learner.updater.net.vector[0] = float("nan")
        assert learner._moments is not None
        norm = learner.updater.policy.statistics["norm.mean"].numpy()
        assert norm[0] == pytest.approx(learner._moments.mean[0], rel=1e-4, abs=1e-4)
    assert before
