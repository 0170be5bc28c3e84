"""Two learners reach what one reaches with the same options; an algorithm that cannot train together is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import freewheel
from freewheel.errors import UsageError
from freewheel.learn.ppo.config import PPOConfig
from tests.support.runs import train


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("learners", [1, 2])
@pytest.mark.parametrize("seed", [1, 2])
def test_cart_pole_is_solved_by_one_learner_and_by_two(tmp_path: Path, learners: int, seed: int) -> None:
    """20 updates of 2,048 rows over all learners, minibatches of 64."""
    result = freewheel.train(
        "CartPole-v1", learners=learners, seed=seed, steps=40_960, num_envs=8, eval_share=1.0, quiet=True,
        runs_dir=tmp_path,
    )  # fmt: skip
    assert (result.summary["trained"], result.summary["updates"]) == (40_960, 20)
    assert result.summary["final_eval"] > 450


def test_an_algorithm_that_sums_no_gradients_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PPOConfig, "trains_together", False)
    with pytest.raises(UsageError, match=r'^algo="ppo" has a learner that does not sum gradients across learners'):
        train(tmp_path, learners=2)
    assert not list(tmp_path.iterdir())
