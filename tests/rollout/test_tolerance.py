"""How often an environment may fail: rare failures never add up, one that does little else is given up soon."""

from __future__ import annotations

import numpy as np
import pytest

from freewheel.rollout.tolerance import FAILURES, GOOD_STEPS, TRUSTED_FAILURES, Tolerance


@pytest.mark.parametrize(
    ("trusted_after", "good", "failures"),
    [
        (GOOD_STEPS, 0, FAILURES),
        (GOOD_STEPS, GOOD_STEPS - 1, FAILURES),
        (1, 0, FAILURES),
        (1, GOOD_STEPS - 1, TRUSTED_FAILURES),
    ],
)
def test_an_env_that_does_little_else_is_given_up(trusted_after: int, good: int, failures: int) -> None:
    tolerance = Tolerance(trusted_after)
    assert [tolerance.exhausted(good) for _ in range(failures)] == [False] * (failures - 1) + [True]
    assert tolerance.limit == failures


def test_a_trusted_env_may_fail_more_often() -> None:
    tolerance = Tolerance()
    counted = [tolerance.exhausted(good) for good in (GOOD_STEPS, *[0] * (TRUSTED_FAILURES - 1))]
    assert counted.index(True) == TRUSTED_FAILURES - 1


def test_a_failure_in_one_of_a_hundred_steps_is_never_too_many() -> None:
    """2 000 surveys of 3 000 steps each."""
    rng = np.random.default_rng(0)
    for _ in range(2000):
        tolerance = Tolerance(trusted_after=1)
        assert not any(tolerance.exhausted(good) for good in (rng.geometric(0.01, 30) - 1).tolist())
