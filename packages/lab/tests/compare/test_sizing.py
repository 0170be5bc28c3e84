"""Tests of the amount of work. It is the same in every mode, and the slowest mode has enough time for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from freewheel_lab.compare.trainings.sizing import LEAST_UPDATES, START, WorkDemand, size

RATES = {"sequential": 1024.0, "continuous": 4096.0}
USUAL = WorkDemand(budget_s=60.0, repeats=3, envs=8, steps_per_env=256, rates=RATES)


def test_the_slowest_mode_fits_its_share_of_the_budget() -> None:
    found = size(USUAL)
    assert found.updates == 10  # 20 s at 1,024 rows/s are 10 updates of 2,048 rows
    assert (found.rows, found.steps_per_env) == (20_480, 256)
    assert found.warm_up_rows == 2048
    assert found.seconds == {"sequential": 20.0, "continuous": 5.0}
    assert found.parts == {}
    assert found.duration(3) == 3 * (25 + 2 * START)
    assert found.notes == ("10 updates of 2,048 rows in every mode, because the slowest makes about 1,024 steps/s",)


def test_updates_are_made_smaller_where_not_even_a_few_would_fit() -> None:
    found = size(replace(USUAL, rates={"sequential": 100.0, "continuous": 800.0}))
    assert found.steps_per_env == 125  # 2,000 rows of sequential in 2 updates of 8 envs
    assert (found.updates, found.rows, found.parts) == (16, 16 * 1000, {"sequential": 2000})
    assert "an update has 1,000 rows instead of 2,048" in found.notes[0]


def test_what_the_user_has_said_about_updates_stays_and_the_budget_does_not() -> None:
    found = size(replace(USUAL, rates={"sequential": 100.0}, fixed_steps_per_env=True))
    assert (found.updates, found.steps_per_env) == (LEAST_UPDATES, 256)
    assert "about 82 s per training, which is more than its budget" in found.notes[-1]


def test_a_far_slower_mode_does_a_part_of_the_work_and_does_not_dictate_it() -> None:
    found = size(replace(USUAL, rates={"sequential": 300.0, "batch": 2048.0, "continuous": 4096.0}))
    assert (found.updates, found.parts) == (20, {"sequential": 2 * 2048})  # 20 s at 2,048 and at 300 rows/s
    assert found.of("batch") == (20 * 2048, 2 * 2048)
    assert found.of("sequential") == (4096, 409), "its first update warms it up"
    assert found.notes[-1] == "sequential makes about 300 steps/s and does 10.0% of that, 4,096 rows"


def test_episodes_end_in_every_mode_that_can_end_one_in_a_bounded_time() -> None:
    slow = replace(USUAL, rates={"sequential": 100.0, "continuous": 3000.0}, episode_steps=300.0)
    assert size(slow).parts["sequential"] == 4000, "1.5 episodes of 300 steps in 8 envs are 3,600 rows"
    assert size(replace(slow, episode_steps=1000.0)).parts["sequential"] == 2000, "12,000 rows would take two minutes"


def test_steps_fix_the_work() -> None:
    found = size(replace(USUAL, steps=5000))
    assert (found.updates, found.rows) == (3, 6144)
    assert size(replace(USUAL, steps=5000, rates={"sequential": 10.0, "batch": 2048.0})).parts == {}
    assert size(replace(USUAL, steps=1)).updates == 2  # one to warm up, one to measure


def test_a_replay_buffer_fills_before_it_is_measured() -> None:
    found = size(replace(USUAL, on_policy=False, starts=1000))
    assert (found.rows, found.warm_up_rows, found.updates) == (21_480, 3048, None)
    assert found.seconds["sequential"] == 20.0
    slow = size(replace(USUAL, on_policy=False, starts=1000, rates={"sequential": 10.0}))
    assert (slow.rows, slow.warm_up_rows) == (1500, 1050)
    assert slow.of("sequential") == (1500, 1050)


def test_rows_before_the_first_update_are_no_part_of_what_a_slower_mode_is_measured_over() -> None:
    rates = {"sequential": 10.0, "lockstep": 2000.0, "continuous": 4000.0}
    found = size(replace(USUAL, on_policy=False, starts=1001, rates=rates))
    assert found.of("lockstep") == (41_001, 5001)
    assert found.of("sequential") == (1501, 1051), "a tenth of the rows that updates follow, as in the whole work"
    none = size(replace(USUAL, on_policy=False, starts=1001, steps=600))
    assert none.of("sequential") == (600, 1001), "no update is ever made"


def test_modes_whose_speed_is_not_known_are_taken_for_the_slowest() -> None:
    assert size(replace(USUAL, rates={"sequential": 1024.0, "mine": 0.0})).seconds["mine"] == 20.0
    assert size(replace(USUAL, rates={"mine": 0.0})).seconds["mine"] == pytest.approx(20.0, rel=0.3)
