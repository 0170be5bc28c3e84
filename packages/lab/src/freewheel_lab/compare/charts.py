"""This module defines the charts of a comparison as data. The page draws them as SVG, and
matplotlib draws them into files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from freewheel.errors import FileError
from freewheel.metrics.names import SHARES
from freewheel.timeline.model import KINDS, UNKNOWN, Timeline, is_wait, look
from freewheel_lab.compare.results import CaseInfo, ModeFigures, Results, ScalePoint, Spread
from freewheel_lab.plots.chart import (
    Bar,
    BarChart,
    Chart,
    ChartLine,
    LineChart,
    SpanChart,
    SpanTrack,
    StackedBar,
    StackedBarChart,
)
from freewheel_lab.plots.curves import band
from freewheel_lab.plots.numbers import Show, duration, megabytes, percent, short, times

FAILED = "failed"
MOST_WORKERS = 8  # of a timeline in a picture
MOST_SPANS = 400  # of a row of it


class ChartGroup(NamedTuple):
    """A group of charts with one title."""

    name: str  # base name of its file
    title: str
    about: str
    charts: tuple[Chart, ...]


def ranked(results: Results) -> list[CaseInfo]:
    """Return every mode, the fastest first and those without results last. A variant follows its
    mode."""

    def speed(case: CaseInfo) -> float:
        found = results.figures(case.mode)
        return -1.0 if found is None else found.steps_per_s.median

    order = sorted((case for case in results.modes if case.of is None), key=speed, reverse=True)
    variants = sorted((case for case in results.modes if case.of is not None), key=speed, reverse=True)
    placed = [one for case in order for one in (case, *(own for own in variants if own.of == case.mode))]
    return [*placed, *(case for case in variants if case not in placed)]


def colour(results: Results, mode: str) -> int:
    """Return the number of the colour of a mode, which is the same in every chart."""
    return next((at for at, case in enumerate(results.modes) if case.mode == mode), 0)


def topics(results: Results) -> list[ChartGroup]:
    """Return all groups of charts that have something to show."""
    several = max((figures.repeats for figures in results.summary), default=0) > 1
    whiskers = (
        "; whiskers are the minimum and the maximum of the repeats." if several else "; a single repeat has no spread."
    )
    spread = "Mean of the repeats; the band is one standard deviation." if several else "One training in each mode."
    shares = "Shares of the time of a worker and of the learner. Point at a part to see its name."
    found = [
        ChartGroup("speed", "Speed", f"Every mode does the same work{whiskers}", tuple(_speed(results))),
        ChartGroup("learning", "Learning", spread, tuple(_learning(results))),
        ChartGroup("cost", "Cost", f"Medians over the trainings{whiskers}", tuple(_cost(results))),
        ChartGroup("time", "Where the time goes", shares, tuple(_shares(results))),
    ]
    kept = [topic._replace(charts=tuple(chart for chart in topic.charts if not chart.empty)) for topic in found]
    return [topic for topic in kept if topic.charts]


def _bars(results: Results, chart: BarChart, pick: Callable[[ModeFigures], Spread | None]) -> BarChart:
    """Return the chart with a bar for each mode."""
    bars = []
    for case in (case for case in ranked(results) if not case.refused):
        figures = results.figures(case.mode)
        found = None if figures is None else pick(figures)
        note = FAILED if figures is None and case.failed else ""
        bar = Bar(case.mode, None, colour=colour(results, case.mode), note=note)
        bars.append(bar if found is None else replace(bar, value=found.median, low=found.low, high=found.high))
    return replace(chart, bars=tuple(bars))


def _speed(results: Results) -> Iterator[Chart]:
    more = "higher is better"
    less = "lower is better"
    yield _bars(results, BarChart("episodes-per-s", "Episodes per second", more), lambda one: one.episodes_per_s)
    yield _bars(results, BarChart("steps-per-s", "Env steps per second", more), lambda one: one.steps_per_s)
    yield _bars(results, BarChart("time-100k", "Time for 100,000 episodes", less, show=duration), _time_100k)
    yield _bars(results, BarChart("speed-up", "Speed-up over sequential", more, show=times), lambda one: one.speedup)
    about = "share of the ideal, in which environments never wait"
    yield _bars(
        results,
        BarChart("efficiency", "Efficiency", about, show=percent, ideal=1.0, ideal_label="ideal"),
        lambda one: _single(one.efficiency),
    )
    yield _bars(results, BarChart("updates-per-s", "Updates per second", more), lambda one: one.updates_per_s)


def _time_100k(figures: ModeFigures) -> Spread | None:
    rate = figures.episodes_per_s
    return None if rate is None else Spread(1e5 / rate.median, 1e5 / rate.high, 1e5 / rate.low)


def _single(value: float | None) -> Spread | None:
    return None if value is None else Spread(value, value, value)


def _over_rows(results: Results, field: str) -> Callable[[ModeFigures], Spread | None]:
    """Return a function that picks a figure of the summary with its minimum and maximum over the
    rows."""

    def pick(figures: ModeFigures) -> Spread | None:
        value = getattr(figures, field)
        rows = [getattr(row, field) for row in results.rows if row.mode == figures.mode]
        known = [one for one in rows if one is not None]
        return None if value is None else Spread(value, min([value, *known]), max([value, *known]))

    return pick


def _cost(results: Results) -> Iterator[Chart]:
    lag = BarChart("lag", "Maximum lag of the data", "updates between acting and learning")
    yield _bars(results, lag, _over_rows(results, "lag_max"))
    memory = BarChart("memory", "Memory", "maximum of trainer and workers together", show=megabytes)
    yield _bars(results, memory, _over_rows(results, "memory_mb"))
    cpu = BarChart("cpu", "CPU use", "share of all cores", show=percent, whole=1.0)
    yield _bars(results, cpu, _over_rows(results, "cpu_util"))
    gpu = BarChart("gpu", "GPU use", "as reported by the driver", show=percent, whole=1.0)
    yield _bars(results, gpu, _over_rows(results, "gpu_util"))
    drops = BarChart("drops", "Rows dropped", "sum of all repeats; zero is best")
    yield _bars(results, drops, lambda one: _single(float(one.dropped)))
    start = BarChart("start-up", "Start-up", "until the first step of an environment", show=duration)
    yield _bars(results, start, lambda one: one.startup_s)


def _learning(results: Results) -> Iterator[Chart]:
    over: list[tuple[Literal["time", "steps"], str, Show]] = [
        ("time", "wall time of the training", duration),
        ("steps", "environment steps", short),
    ]
    for axis, label, show in over:
        lines = tuple(_curve(results, case.mode, axis) for case in ranked(results) if case.of is None)
        at = results.equal_wall_s if axis == "time" else None
        yield LineChart(
            f"return-over-{axis}", f"Return over {'wall time' if axis == 'time' else 'steps'}", label, "return", lines,
            show_x=show, mark=at, mark_label="the fastest mode has ended" if at is not None else "",
        )  # fmt: skip


def _curve(results: Results, mode: str, axis: Literal["time", "steps"]) -> ChartLine:
    curves = []
    for row in results.rows:
        points = [
            (wall if axis == "time" else float(steps), value) for wall, steps, value in row.curve if value is not None
        ]
        if row.mode == mode and points:
            xs, ys = np.array(points).T
            curves.append((xs, ys))
    xs, mean, spread = band(curves, steps=False)
    low, high = (tuple((mean + sign * spread).tolist()) if len(curves) > 1 else () for sign in (-1, 1))
    return ChartLine(mode, tuple(zip(xs.tolist(), mean.tolist(), strict=True)), low, high, colour(results, mode))


def scaling(results: Results) -> tuple[LineChart, ...]:
    """Return charts of env steps/s over the number of workers: measured, predicted by the law, and
    extrapolated. A second chart shows a machine with more cores."""
    if results.scale is None or not results.scale.points:
        return ()
    here: list[ChartLine] = []
    elsewhere: list[ChartLine] = []
    for mode in dict.fromkeys(point.mode for point in results.scale.points):
        law = _by_workers(results.scale.points, mode)
        beyond = _by_workers(results.scale.extrapolated, mode)
        own = ChartLine(mode, (), colour=colour(results, mode))
        measured = tuple((float(one.workers), one.measured.median) for one in law if one.measured is not None)
        last = law[-1:] if law and beyond and law[-1].workers < beyond[0].workers else []
        here += [
            replace(own, points=_points(law)),
            replace(own, points=_points([*last, *beyond]), style="dashed"),
            replace(own, points=measured, style="dots"),
        ]
        cores = [(float(one.workers), one.a_core_each) for one in [*law, *beyond]]
        elsewhere.append(replace(own, points=tuple((x, y) for x, y in sorted(cores) if y is not None), style="dashed"))
    styles = {"dots": "measured", "line": "the law", "dashed": "extrapolated"}
    chart = LineChart("scaling", "Env steps per second over workers, on this machine", "workers", "env steps/s", tuple(here),
                  log_x=True, from_zero=True, styles=styles)  # fmt: skip
    other = replace(
        chart, name="scaling-cores", title="By the law, with a core for every worker", lines=tuple(elsewhere)
    )
    return (chart,) if other.empty else (chart, other)


def _points(points: Sequence[ScalePoint]) -> tuple[tuple[float, float], ...]:
    return tuple((float(point.workers), point.predicted) for point in points)


def _by_workers(points: Sequence[ScalePoint], mode: str) -> list[ScalePoint]:
    return sorted((point for point in points if point.mode == mode), key=lambda point: point.workers)


def _shares(results: Results) -> Iterator[Chart]:
    titles: Mapping[str, tuple[str, str]] = {
        "worker": ("One second of a worker", "acting: environments and policy"),
        "learner": ("One second of the learner", "learning: updates and what the learner waits for"),
    }
    for party, (title, about) in titles.items():
        stacks = []
        for case in ranked(results):
            figures = results.figures(case.mode)
            shares = figures.shares.get(party, {}) if figures is not None else {}
            order = sorted(shares.items(), key=lambda pair: _place(pair[0]))
            stacks.append(StackedBar(case.mode, tuple((kind, share) for kind, share in order if share > 0)))
        kinds = dict.fromkeys(kind for stack in stacks for kind, _ in stack.shares)
        colours = {kind: look(kind).color for kind in sorted(kinds, key=_place)}
        shown = tuple(stack for stack in stacks if stack.shares)
        yield StackedBarChart(f"time-{party}", title, about, shown, colours, SHARES[party])


def tracks(results: Results, mode: str) -> SpanChart | None:
    """Return the timeline of a mode for a picture. It shows the first workers and all other rows."""
    if not results.timelines.get(mode):
        return None
    try:
        whole = Timeline.from_json(results.timelines[mode], f"the timeline of {mode}")
    except FileError:
        return None
    envs = list(whole.group("envs"))
    others = [row for row in whole.rows if row.group != "envs"]
    most = max((len(row.spans) for row in whole.rows), default=0)
    shown = whole.window(whole.begin_s, whole.begin_s + whole.seconds * min(1.0, MOST_SPANS / max(most, 1)))
    kept = {row.name for row in [*envs[:MOST_WORKERS], *others]}
    rows = tuple(
        SpanTrack(row.name, tuple((one.t0_s, one.t1_s, one.kind) for one in row.spans))
        for row in shown.rows
        if row.name in kept
    )
    more = f"{MOST_WORKERS} of {len(envs)} workers; " if len(envs) > MOST_WORKERS else ""
    kinds = shown.kinds()
    return SpanChart(f"timeline-{mode}", mode, f"{more}thin bars are waits", rows, shown.begin_s, shown.end_s,
                  {kind: look(kind).color for kind in kinds}, frozenset(filter(is_wait, kinds)))  # fmt: skip


def _place(kind: str) -> int:
    return list(KINDS).index(kind) if look(kind) is not UNKNOWN else len(KINDS)
