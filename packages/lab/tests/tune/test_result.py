"""Tests of the recommendation of a tuning. The setting that was measured to be better wins, and errors are reported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from freewheel_lab.tune.result import Tuning
from freewheel_lab.tune.search import TuningCandidate, best_two
from freewheel_lab.tune.trial import TuningTrial
from packages.lab.tests.tune.test_file import tuned


def trial(candidate: TuningCandidate, times: float) -> TuningTrial:
    """Return a run whose speed is the prediction times this factor."""
    measured: Any = SimpleNamespace(steps_per_s=times * candidate.forecast.rate, lag_mean=1.0, memory_mb=100.0)
    return TuningTrial(candidate, measured)


def run(*times: float) -> tuple[Tuning, list[TuningCandidate]]:
    tuning = tuned()
    pair = best_two(tuning.order)
    tuning.trials = [trial(one, factor) for one, factor in zip(pair, times, strict=True)]
    return tuning, pair


def test_without_measurements_the_prediction_decides() -> None:
    tuning = tuned()
    assert tuning.chosen is tuning.order[0]
    assert "env steps/s are predicted" in tuning.sentence


def test_a_prediction_that_holds_is_told_with_its_error() -> None:
    tuning, (first, second) = run(0.9, 0.5)
    assert tuning.chosen is first
    assert f"measured (predicted {first.forecast.rate:,.0f}, +11%)" in tuning.sentence
    assert f"--mode {second.mode}" in tuning.sentence


def test_the_measured_better_wins_and_the_contradiction_is_told() -> None:
    tuning, (first, second) = run(0.3, 1.0)
    assert tuning.chosen is second
    assert f"--mode {first.mode} with" in tuning.sentence
    assert "was predicted to be best but made only" in tuning.sentence
    assert [round(one["error"], 2) for one in tuning.to_json()["trials"]] == [2.33, 0.0]
    assert tuning.to_json()["chosen"]["options"] == second.options


def test_a_little_more_speed_is_not_worth_lag() -> None:
    tuning, pair = run(1.0, 1.0)
    less, more = sorted(pair, key=lambda one: one.forecast.lag)
    assert less.forecast.lag < more.forecast.lag
    for gain, better in ((1.08, less), (1.12, more)):
        tuning.trials = [trial(less, 1000.0 / less.forecast.rate), trial(more, gain * 1000.0 / more.forecast.rate)]
        assert tuning.chosen is better


def test_a_setting_that_could_not_be_run_is_not_chosen() -> None:
    tuning = tuned()
    first, second = best_two(tuning.order)
    tuning.trials = [TuningTrial(first, None, "it died")]
    assert tuning.chosen is not first
    tuning.trials.append(trial(second, 1.0))
    assert tuning.chosen is second
    assert "could not be measured (it died)" in tuning.sentence


def test_the_table_shows_what_was_run_and_the_best_of_every_mode() -> None:
    tuning, pair = run(1.0, 1.0)
    shown = tuning.shown(8)
    assert {one.mode for one in shown} == {one.mode for one in tuning.order}
    assert all(one in shown for one in pair)
    assert len(shown) == 8
