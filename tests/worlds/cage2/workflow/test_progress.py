"""A trial's episodes: their means, and the rules that end it."""

from __future__ import annotations

import math

import pytest

from freewheel.core import Episode
from freewheel.worlds.cage2.workflow.records import Means, Played, Progress, Stops, means

STOPS = Stops(threshold=0.9, window=4, patience=2)


def episode(env_return: float = -10.0, compliance: float = 0.5, alignment: float = 15.0) -> Episode:
    return Episode(0, 0, 0, (), env_return + alignment, 100, 0.1, (env_return, alignment, compliance, 3.0))


def fed(progress: Progress, *episodes: Episode) -> list[str]:
    return [progress.take([one]) for one in episodes]


def test_means_leave_out_what_does_not_apply() -> None:
    rows = [
        Played(-5.0, -20.0, 15.0, 0.5, 4.0),
        Played(-8.0, -8.0, 0.0, math.nan, 0.0),
        Played(11.0, -10.0, 21.0, 0.7, 5.0),
    ]
    assert means(rows) == pytest.approx(Means(-2 / 3, -38 / 3, 12.0, 0.6, 3.0))
    assert means(rows[1:2]).compliance is None


def test_the_threshold_ends_a_trial_once_a_window_is_full() -> None:
    progress = Progress(STOPS)
    assert fed(progress, *[episode(compliance=0.9)] * 4) == ["", "", "", "threshold"]


def test_the_threshold_is_about_the_last_window() -> None:
    progress = Progress(Stops(0.9, 4, 0))
    low, high = episode(compliance=0.0), episode(compliance=1.0)
    assert fed(progress, *[low] * 4, *[high] * 4) == ["", "", "", "", "", "", "", "threshold"]
    assert progress.last.compliance == 1.0


def test_episodes_to_which_compliance_does_not_apply_do_not_reach_the_threshold() -> None:
    progress = Progress(Stops(0.0, 4, 0))
    assert fed(progress, *[episode(compliance=math.nan)] * 8) == [""] * 8
    assert progress.last.compliance is None
    assert progress.take([episode(compliance=0.0)]) == "threshold"


def test_a_return_that_stays_ends_a_trial() -> None:
    progress = Progress(STOPS)
    told = fed(progress, *[episode(-10.0)] * 12)
    assert told == [""] * 11 + ["plateau"]  # the best window is the first, and two more were no better


@pytest.mark.parametrize(("second", "ended"), [(-9.7, ""), (-9.9, "plateau"), (-11.0, "plateau")])
def test_a_better_return_starts_the_count_again(second: float, ended: str) -> None:
    """2 % are what counts as better."""
    progress = Progress(STOPS)
    fed(progress, *[episode(-10.0)] * 4, *[episode(second)] * 4)
    assert fed(progress, *[episode(second)] * 4)[-1] == ended


def test_a_plateau_is_about_the_environments_return_alone() -> None:
    progress = Progress(STOPS)
    windows = [episode(-10.0, alignment=float(step)) for step in range(0, 36, 3)]
    assert fed(progress, *windows)[-1] == "plateau"


def test_without_patience_there_is_no_plateau() -> None:
    assert set(fed(Progress(Stops(0.9, 4, 0)), *[episode()] * 40)) == {""}


def test_fixed_episodes_end_by_no_rule() -> None:
    progress = Progress(STOPS, fixed=True)
    assert set(fed(progress, *[episode(compliance=1.0)] * 40)) == {""}
    assert progress.last.compliance == 1.0


def test_many_episodes_at_once_fill_many_windows() -> None:
    progress = Progress(STOPS)
    assert progress.take([episode(-10.0)] * 13) == "plateau"
    assert progress.take([]) == "plateau"
