"""The work of a comparison: the same in every mode, as much as the slowest has time for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from freewheel.compare.trainings.sizing import LEAST_UPDATES, START, Demand, size

RATES = {"sequential": 1024.0, "continuous": 4096.0}
USUAL = Demand(budget_s=60.0, repeats=3, envs=8, steps_per_env=256, rates=RATES)


def test_the_slowest_mode_fits_its_share_of_the_budget() -> None:
    found = size(USUAL)
    assert found.updates == 10  # 20 s at 1,024 rows/s are 10 updates of 2,048 rows
    assert (found.rows, found.steps_per_env) == (20_480, 256)
    assert (found.warm_up, found.warm_up_rows) == (1, 2048)
    assert found.seconds == {"sequential": 20.0, "continuous": 5.0}
    assert found.again == {"sequential": 1, "continuous": 1}
    assert found.duration(3) == 3 * (25 + 2 * START)
    assert found.notes == ("10 updates of 2,048 rows in every mode, as the slowest makes about 1,024 steps/s",)


def test_updates_are_made_smaller_where_not_even_a_few_would_fit() -> None:
    found = size(replace(USUAL, rates={"sequential": 100.0, "continuous": 800.0}))
    assert found.steps_per_env == 62  # 2,000 rows in 4 updates of 8 envs
    assert (found.updates, found.rows) == (LEAST_UPDATES, 4 * 62 * 8)
    assert "an update has 496 rows instead of 2,048" in found.notes[0]


def test_what_the_user_has_said_about_updates_stays_and_the_budget_does_not() -> None:
    found = size(replace(USUAL, rates={"sequential": 100.0}, fixed_steps_per_env=True))
    assert (found.updates, found.steps_per_env) == (LEAST_UPDATES, 256)
    assert "about 82 s a training, more than its budget" in found.notes[-1]


def test_fast_modes_are_trained_more_often_within_a_repeat() -> None:
    found = size(replace(USUAL, rates={"sequential": 400.0, "continuous": 8192.0, "batch": 100_000.0}))
    assert found.rows == 4 * 250 * 8
    assert found.again == {"sequential": 1, "continuous": 4, "batch": 6}
    assert "continuous 4, batch 6" in found.notes[-1]
    for mode, seconds in found.seconds.items():  # and do not take longer than the slowest may
        assert found.again[mode] * (seconds + START) <= 20 + START


def test_steps_fix_the_work() -> None:
    found = size(replace(USUAL, steps=5000))
    assert (found.updates, found.rows) == (3, 6144)
    assert set(found.again.values()) == {1}
    assert size(replace(USUAL, steps=1)).updates == 2  # one to warm up, one to measure


def test_a_replay_buffer_fills_before_it_is_measured() -> None:
    found = size(replace(USUAL, on_policy=False, starts=1000))
    assert (found.rows, found.warm_up_rows, found.updates) == (21_480, 3048, None)
    assert found.seconds["sequential"] == 20.0
    slow = size(replace(USUAL, on_policy=False, starts=1000, rates={"sequential": 10.0}))
    assert (slow.rows, slow.warm_up_rows) == (1500, 1050)


def test_modes_whose_speed_is_not_known_are_taken_for_the_slowest() -> None:
    found = size(replace(USUAL, rates={"sequential": 1024.0, "mine": 0.0}))
    assert found.seconds["mine"] == 20.0
    assert size(replace(USUAL, rates={"mine": 0.0})).seconds["mine"] == pytest.approx(20.0, rel=0.3)
