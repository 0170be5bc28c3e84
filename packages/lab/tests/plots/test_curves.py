"""Tests of learning curves: groups of seeds, means and bands computed by hand, damaged or missing rows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest

from freewheel.errors import FileError, UsageError
from freewheel_lab.plots import curves
from freewheel_lab.plots.chart import ChartLine, LineChart
from freewheel_lab.plots.numbers import duration

COLUMNS = ["env_steps", "wall_s", "updates", "return_mean", "eval_return"]


Points = Sequence[tuple[float, float | None]]


def make(folder: Path, points: Points, metric: str = "return_mean", **config: Any) -> Path:
    """Create a run directory whose metric has these values at these steps."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"env": "CartPole-v1", "seed": 1, "algo": "ppo", **config}))
    rows = [{"env_steps": x, "wall_s": x / 10, "updates": n, metric: y} for n, (x, y) in enumerate(points)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def read(path: Path, said: list[str] | None = None) -> curves.PlottedRun:
    return curves.read_run(path, COLUMNS, (said if said is not None else []).append)


def test_a_band_is_the_mean_and_the_deviation_of_the_seeds(tmp_path: Path) -> None:
    first = read(make(tmp_path / "a-s1", [(10, 1.0), (20, 3.0), (40, 5.0)]))
    (group,) = curves.group([first, read(make(tmp_path / "a-s2", [(10, 2.0), (30, 8.0), (40, 9.0)], seed=2))])
    (line,) = curves.chart([group], "steps", "return_mean").lines
    by_hand = {10: (1.0, 2.0), 20: (3.0, 5.0), 30: (4.0, 8.0), 40: (5.0, 9.0)}  # linear between points
    assert group.label == "a (2 seeds)"
    assert [x for x, _ in line.points] == list(by_hand)
    assert [y for _, y in line.points] == pytest.approx([mean(both) for both in by_hand.values()])
    assert line.low == pytest.approx([mean(both) - stdev(both) for both in by_hand.values()])
    assert line.high == pytest.approx([mean(both) + stdev(both) for both in by_hand.values()])


def test_an_evaluation_holds_until_the_next_one(tmp_path: Path) -> None:
    first = read(make(tmp_path / "a-s1", [(10, 1.0), (20, 1.0), (30, 4.0)], "eval_return"))
    second = read(make(tmp_path / "a-s2", [(10, 3.0), (25, 5.0), (30, 5.0)], "eval_return"))
    line, dots = curves.chart(curves.group([first, second]), "steps", "eval_return").lines
    assert (line.style, dots.style) == ("steps", "dots")
    assert line.points == ((10, 2.0), (20, 2.0), (25, 3.0), (30, 4.5))
    assert dots.points == ((10, 2.0), (25, 3.0), (30, 4.5))


def test_a_dot_of_one_run_has_the_deviation_of_its_evaluation(tmp_path: Path) -> None:
    run = read(make(tmp_path / "a", [(10, 1.0), (15, 1.0), (20, 1.0), (30, 4.0)], "eval_return"))
    beside = {curves.SPREAD: np.array([0.5, 0.5, 0.2, 1.0]), curves.PLAYED: np.array([9.0, 9.0, 19.0, 29.0])}
    run = replace(run, columns={**run.columns, **beside})
    dots = curves.chart(curves.group([run]), "steps", "eval_return").lines[-1]
    assert (dots.points, dots.low, dots.high) == (((10, 1.0), (20, 1.0), (30, 4.0)), (0.5, 0.8, 3.0), (1.5, 1.2, 5.0))


@pytest.mark.parametrize("since", [1, 3])
def test_evaluations_of_an_earlier_version_have_no_deviation(tmp_path: Path, since: int) -> None:
    """An earlier version recorded neither the deviation nor the step; a resumed run has them in later rows only."""
    path = make(tmp_path / "a", [(10, 1.0), (20, 2.0), (30, 3.0)], "eval_return")
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for row in rows[since:]:
        row |= {"eval/return_std": 0.5, "eval/step": row["env_steps"]}
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run = curves.read_run(path, [*COLUMNS, "eval/return_std", "eval/step"], print)
    dots = curves.chart(curves.group([run]), "steps", "eval_return").lines[1]
    assert (dots.points, dots.low, dots.high) == (((10, 1.0), (20, 2.0), (30, 3.0)), (), ())


@pytest.mark.parametrize(("ys", "span"), [((-44.9, -45.8), 4.58), ((480, 500), 50), ((0, 10), 10), ((3, 3), 0.3)])
def test_a_small_difference_looks_small_and_times_are_round(ys: tuple[float, float], span: float) -> None:
    lines = LineChart("x", "x", "wall time", "y", (ChartLine("a", ((0.3, ys[0]), (154.0, ys[1]))),), show_x=duration)
    low, high = lines.y_span()
    assert high - low == pytest.approx(span)
    assert low <= min(ys) <= max(ys) <= high
    assert lines.x_ticks() == [0, 30, 60, 90, 120, 150, 180]


def test_a_band_ends_where_the_shortest_seed_does_and_that_is_told(tmp_path: Path) -> None:
    runs = [read(make(tmp_path / f"a-s{n}", [(10, 1.0), (end, 2.0)], seed=n)) for n, end in ((1, 30), (2, 100))]
    (group,) = curves.group(runs)
    (line,) = curves.chart([group], "steps", "return_mean").lines
    assert [x for x, _ in line.points] == [10, 30]
    (told,) = curves.ended_early([group])
    assert "a-s1 has done only 30 of 100 steps" in told
    assert curves.ended_early(curves.group(runs[1:])) == []


def test_runs_that_differ_in_more_than_the_seed_are_groups_of_their_own(tmp_path: Path) -> None:
    points = [(10, 1.0), (20, 2.0)]
    configs: tuple[tuple[str, dict[str, Any]], ...] = (
        ("a-s1", {"seed": 1, "run": "a-s1"}),
        ("b", {"seed": 1, "ppo": {"lr": 0.1}}),
        ("a-s2", {"seed": 2, "run": "a-s2", "sources": {"seed": "flag"}}),
    )
    groups = curves.group([read(make(tmp_path / name, points, **config)) for name, config in configs])
    assert [(one.label, len(one.runs)) for one in groups] == [("a (2 seeds)", 2), ("b", 1)]
    lines = curves.chart(groups, "steps", "return_mean").lines
    assert [bool(line.low) for line in lines] == [True, False]  # one seed has no band
    assert len({line.colour for line in lines}) == 2


def test_runs_of_the_same_name_in_two_places_can_be_told_apart(tmp_path: Path) -> None:
    runs = [read(make(tmp_path / place / "a", [(1, 1.0)], algo=place)) for place in ("ppo", "sac")]
    assert [one.label for one in curves.group(runs)] == [f"{tmp_path / 'ppo'}/a", f"{tmp_path / 'sac'}/a"]


@pytest.mark.parametrize(
    ("points", "smooth", "drawn"),
    [
        ([(1, 3.0), (2, 6.0), (3, 0.0), (4, 9.0)], 3, [(1, 3.0), (2, 4.5), (3, 3.0), (4, 5.0)]),
        ([(1, None), (2, 5.0), (2, 6.0), (3, 7.0)], 1, [(2, 6.0), (3, 7.0)]),  # the newest row of a step counts
    ],
)
def test_smoothing_is_the_mean_of_the_newest_points(tmp_path: Path, points: Points, smooth: int, drawn: Points) -> None:
    xs, ys = curves.curve(read(make(tmp_path / "a", points)), "env_steps", "return_mean", smooth)
    assert list(zip(xs.tolist(), ys.tolist(), strict=True)) == drawn


def test_long_curves_are_thinned_between_their_ends(tmp_path: Path) -> None:
    xs = np.arange(5000.0)
    grid, values, spread = curves.band([(xs, xs), (xs, xs + 2)], steps=False)
    assert (len(grid), grid[0], grid[-1]) == (curves.MOST, 0, 4999)
    assert values == pytest.approx(grid + 1)
    assert spread == pytest.approx(np.full(len(grid), math.sqrt(2)))


def test_a_damaged_line_is_left_out_and_told_and_half_a_line_is_a_row_to_come(tmp_path: Path) -> None:
    path = make(tmp_path / "a", [(1, 1.0), (2, 2.0)])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 3, "return\n[]\n{"env_steps": 4, "return_mean": 4.0}\n{"env_st')
    said: list[str] = []
    assert read(path, said).columns["env_steps"].tolist() == [1, 2, 4]
    assert said == [f"{path}/metrics.jsonl: 2 lines are damaged (the first is 3) and skipped"]


@pytest.mark.parametrize("content", [None, "", '{"env_'])
def test_a_run_without_rows_is_one_line(tmp_path: Path, content: str | None) -> None:
    path = make(tmp_path / "a", [])
    if content is None:
        (path / "metrics.jsonl").unlink()
    else:
        (path / "metrics.jsonl").write_text(content)
    with pytest.raises(FileError, match="is missing" if content is None else "has no rows of metrics"):
        read(path)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("return_meen", "did you mean 'return_mean'"),
        ("my/own_x", "did you mean 'my/own'"),
        ("gpu_util", "have no values of --y gpu_util"),
        ("xyz", "docs/metrics.md"),
    ],
)
def test_a_metric_that_is_not_there_is_answered_with_the_nearest(tmp_path: Path, metric: str, message: str) -> None:
    runs = [read(make(tmp_path / "a", [(1, 1.0)], "my/own"))]
    curves.check_metric("my/own", runs)
    with pytest.raises(UsageError, match=message):
        curves.check_metric(metric, runs)


def test_numbers_that_are_none_are_not_drawn(tmp_path: Path) -> None:
    path = make(tmp_path / "a", [(1, 1.0)])
    (path / "metrics.jsonl").write_text('{"env_steps": 1, "wall_s": "x", "return_mean": true, "updates": 1e999}\n')
    found = read(path).columns
    assert found["env_steps"].tolist() == [1.0]
    assert all(math.isnan(found[name][0]) for name in ("wall_s", "updates", "eval_return"))
