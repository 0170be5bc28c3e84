"""Tests of the figures of a comparison, with made-up numbers and known results."""

from __future__ import annotations

from dataclasses import replace

import pytest

from freewheel_lab.compare import table
from freewheel_lab.compare.results import Spread
from freewheel_lab.compare.summary import equal_work, return_at, spread, summarised, unequal
from packages.lab.tests.support.comparison import ROWS, measured, row


def test_median_spread_speed_up_efficiency_and_time_for_100k_episodes() -> None:
    found = summarised(measured()).figures("continuous")
    assert found is not None
    assert vars(found.steps_per_s) == pytest.approx({"median": 3100.0, "low": 3050.0, "high": 3150.0})
    assert vars(found.episodes_per_s or found) == pytest.approx({"median": 31.0, "low": 30.5, "high": 31.5})
    assert found.time_100k_episodes_s == pytest.approx(100_000 / 31.0)
    assert found.speedup is not None
    assert found.speedup.median == pytest.approx(3.1)  # 3.1, 3.119 and 3.081 in the three repeats
    assert found.speedup.high == pytest.approx(3150 / 1010)
    assert found.efficiency == pytest.approx(3100 / 4000)
    assert found.lag_max == 2.0
    assert found.dropped == 0  # rows under way at the end of a training are not counted
    assert found.repeats == 3


def test_the_length_of_episodes_is_that_of_the_trainings_in_which_they_ended() -> None:
    short = [row("batch", repeat, rate, episodes_per_s=None) for repeat, rate in ((2, 1000.0), (3, 1100.0))]
    some = [row("batch", 1, 3000.0), *short]
    none = [row("lockstep", repeat, 500.0, episodes_per_s=None) for repeat in (1, 2, 3)]
    results = summarised(replace(measured(), rows=(*some, *none)))
    lockstep, batch = results.summary
    assert batch.episode_steps == pytest.approx(100.0)
    assert batch.time_100k_episodes_s == pytest.approx(100_000 / 11.0), "from the median of all three"
    assert (lockstep.episode_steps, lockstep.episodes_per_s, lockstep.time_100k_episodes_s) == (None, None, None)
    told = list(table.explained(results))
    assert "No episode ended in lockstep: its trainings were too short" in told
    assert not [line for line in told if line.startswith("Episodes had")]


def test_returns_are_compared_when_the_fastest_has_ended() -> None:
    results = summarised(measured())
    assert results.equal_wall_s == pytest.approx(ROWS / 3100 + 0.5)
    returns = {one.mode: one.return_at for one in results.summary}
    assert returns["continuous"] == 200.0
    assert returns["sequential"] == 60.0  # 7.1 of 21 s, which is the third of ten points
    assert return_at(row("batch", 1, 1000.0), 0.0) is None


def test_equal_work_is_proven_by_the_ledger() -> None:
    results = measured()
    assert "equal work by the ledger: 20,480 rows trained and 10 updates in each of 12" in equal_work(results.rows)
    assert unequal(results) == []
    short = replace(results, rows=(*results.rows, row("batch", 4, 1.0, trained=ROWS - 1, dropped={"shutdown": 513})))
    assert unequal(short) == ["runs/batch-r4: 20,479 rows and 10 updates instead of 20,480 and 10"]
    assert equal_work(short.rows) == "not equal: 20,479 to 20,480 rows, 10 to 10 updates in 13 trainings"
    lost = replace(results, rows=(row("batch", 1, 1.0, produced=ROWS),))
    assert unequal(lost) == ["runs/batch-r1: its ledger does not balance"]


def test_a_mode_that_does_a_part_of_the_work_does_just_that_part() -> None:
    results = measured()
    slow = [row("sequential", repeat, 10.0, trained=4096, updates=2, produced=4096) for repeat in (1, 2, 3)]
    work = replace(results.work, parts={"sequential": 4096})
    partly = replace(results, work=work, rows=(*(one for one in results.rows if one.mode != "sequential"), *slow))
    assert unequal(partly) == []
    found = summarised(partly)
    told = "in each of 9 trainings; too slow for the whole work: sequential 20.0% (4,096 rows); compare"
    assert told in found.equal_work
    assert found.equal_wall_s == summarised(results).equal_wall_s
    assert len(unequal(replace(partly, work=results.work))) == 3
    alone = summarised(replace(partly, rows=tuple(slow))).equal_work
    assert alone.startswith("too slow for the whole work: sequential 20.0% (4,096 rows); compare")


def test_a_replay_buffer_may_take_a_few_rows_more() -> None:
    results = measured()
    off = replace(results, work=replace(results.work, updates=None))
    more = row("batch", 1, 1.0, trained=ROWS + 100, produced=ROWS + 612, updates=7)
    assert unequal(replace(off, rows=(more,))) == []
    told = equal_work([more, row("batch", 2, 1.0, trained=ROWS + 100, updates=7)], replay=True)
    assert told == "equal work by the ledger: 20,580 rows trained and 7 updates in each of 2 trainings"
    alike = equal_work([row("batch", 1, 1.0, updates=100), row("batch", 2, 1.0, updates=105)], replay=True)
    told = "except for the updates of the last rows: 20,480 rows stored and 100 to 105 updates in 2 trainings"
    assert alike.endswith(told)
    less = row("batch", 1, 1.0, trained=ROWS - 100, produced=ROWS + 412, updates=7)
    assert len(unequal(replace(off, rows=(less,)))) == 1


def test_what_is_not_known_is_left_out() -> None:
    assert spread([None, 2.0, None, 4.0, 3.0]) == Spread(3.0, 2.0, 4.0)
    assert spread([None]) is None
    nothing = summarised(measured({}))
    assert nothing.summary == ()
    assert nothing.equal_wall_s is None
