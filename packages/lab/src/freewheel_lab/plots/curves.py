"""This module computes learning curves from metrics.jsonl of finished and running runs. Runs that
differ only in their seed form a group, which is drawn as its mean with the standard deviation as a
band."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from freewheel.core import NDArray
from freewheel.errors import FileError, UsageError, nearest
from freewheel.files.read import json_object, lines
from freewheel.metrics.names import GROUPS, describe
from freewheel_lab.plots.chart import ChartLine, LineChart
from freewheel_lab.plots.numbers import Show, duration, short

Axis: TypeAlias = Literal["steps", "time", "updates"]
#: For each axis, its metric, its label, and the format of its numbers.
AXES: Mapping[Axis, tuple[str, str, Show]] = {
    "steps": ("env_steps", "environment steps", short),
    "time": ("wall_s", "wall time", duration),
    "updates": ("updates", "updates", short),
}
#: The metrics that are drawn by default, and their titles.
USUAL = {"return_mean": "return of training episodes", "eval_return": "return of evaluations (greedy)"}
SPREAD = "eval/return_std"  # deviation of eval_return
PLAYED = "eval/step"  # step of the weights that were evaluated
#: Entries of config.json that may differ between the runs of a group.
OWN = ("seed", "run", "runs_dir", "sources", "origin", "sha256", "console", "sinks", "log_every", "checkpoint_every")
LONGEST = 1 << 20  # bytes of a row
MOST_ROWS = 2_000_000
MOST_DAMAGED = 1_000
MOST = 1000  # points of a drawn line


@dataclass(frozen=True)
class PlottedRun:
    """Holds columns of the metrics of a run. A missing value is NaN."""

    path: Path
    config: Mapping[str, Any]
    columns: Mapping[str, NDArray]
    names: frozenset[str]  # names of all numbers in its rows

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def key(self) -> str:
        """Return a key that is the same for two runs that differ only in their seed."""
        return json.dumps({name: value for name, value in self.config.items() if name not in OWN}, sort_keys=True)


@dataclass
class CurveGroup:
    """Holds runs that differ only in their seed."""

    runs: list[PlottedRun] = field(default_factory=list)
    label: str = ""


def read_run(path: Path, wanted: Sequence[str], say: Callable[[str], None]) -> PlottedRun:
    """Read these columns of a run. Raise FileError if it has no rows. Damaged lines are skipped and
    reported. A last line without an end is skipped silently, because a running trainer may still be
    writing it."""
    config = json_object(path / "config.json")
    rows = list[list[float]]()
    names = set[str]()
    damaged = list[int]()
    for number, line in enumerate(lines(path / "metrics.jsonl", LONGEST), 1):
        try:
            row = json.loads(line)
            rows.append([_number(row.get(name)) for name in wanted])
            names.update(name for name, value in row.items() if isinstance(value, int | float))
        except (ValueError, AttributeError, RecursionError):
            if line.endswith(b"\n") or len(line) == LONGEST:
                damaged.append(number)
        if number > MOST_ROWS or len(damaged) > MOST_DAMAGED:
            raise FileError(f"{path / 'metrics.jsonl'} has too many rows or too many damaged lines, so it is not drawn")
    if damaged:
        several = f"{len(damaged)} lines are damaged (the first is {damaged[0]})"
        what = f"line {damaged[0]} is damaged" if len(damaged) == 1 else several
        say(f"{path / 'metrics.jsonl'}: {what} and skipped")
    if not rows:
        raise FileError(f"{path} has no rows of metrics, so there is nothing to draw")
    table = np.array(rows, np.float64).reshape(len(rows), len(wanted))
    return PlottedRun(path, config, {name: table[:, at] for at, name in enumerate(wanted)}, frozenset(names))


def _number(value: object) -> float:
    usable = isinstance(value, int | float) and abs(value) < 1e300
    return float(value) if usable else math.nan  # type: ignore[arg-type] # it is a number


def check_metric(name: str, runs: Sequence[PlottedRun]) -> None:
    """Raise UsageError with the nearest name if no run has this metric."""
    found = frozenset[str]().union(*(run.names for run in runs))
    if name in found:
        return
    if (metric := describe(name)) is not None and "*" not in name:
        raise UsageError(f"these runs have no values of --y {name} ({metric.text.rstrip('.')})")
    known = [metric.name for group in GROUPS.values() for metric in group if "*" not in metric.name]
    raise UsageError(f"unknown metric --y {name}{nearest(name, {*known, *found}, '; docs/metrics.md lists them all')}")


def group(runs: Sequence[PlottedRun]) -> list[CurveGroup]:
    """Group runs that differ only in their seed. Each group gets a unique label."""
    found: dict[str, CurveGroup] = {}
    for run in runs:
        found.setdefault(run.key, CurveGroup()).runs.append(run)
    groups = list(found.values())
    for one in groups:
        stems = {re.sub(r"-s\d+$", "", run.name) for run in one.runs}
        one.label = stems.pop() if len(one.runs) > 1 and len(stems) == 1 else one.runs[0].name
        if len(one.runs) > 1:
            one.label += f" ({len(one.runs)} seeds)"
    labels = [one.label for one in groups]
    for one in groups:
        if labels.count(one.label) > 1:  # groups of the same name in two places
            one.label = f"{one.runs[0].path.parent}/{one.label}"
    return groups


def ended_early(groups: Sequence[CurveGroup]) -> list[str]:
    """Return a line for every group with a run that has come less than half as far as another one.
    Such a run cuts the curve of its group short."""
    found = []
    for one in groups:
        ends = [float(np.nanmax(run.columns["env_steps"], initial=0)) for run in one.runs]
        if 2 * min(ends) < max(ends):
            short_one = one.runs[ends.index(min(ends))]
            far = f"{min(ends):,.0f} of {max(ends):,.0f} steps"
            found.append(
                f"{short_one.path} has done only {far}, so the curve of its group ends there; leave it out to see the others"
            )
    return found


def curve(run: PlottedRun, x: str, y: str, smooth: int = 1) -> tuple[NDArray, NDArray]:
    """Return the points of a run at which both columns are known, in ascending order of x. Each y
    is the mean of the newest `smooth` points."""
    xs = run.columns[x]
    ys = run.columns[y]
    kept = np.isfinite(xs) & np.isfinite(ys)
    xs = xs[kept]
    ys = ys[kept]
    if len(xs):
        newer = np.append(xs[1:] > xs[:-1], True)  # of rows with the same x, the newest one is used
        xs = xs[newer]
        ys = ys[newer]
    if smooth > 1 and len(ys):
        sums = np.concatenate(([0.0], np.cumsum(ys)))
        first = np.maximum(np.arange(1, len(ys) + 1) - smooth, 0)
        ys = (sums[1:] - sums[first]) / (np.arange(1, len(ys) + 1) - first)
    return xs, ys


def band(curves: Sequence[tuple[NDArray, NDArray]], *, steps: bool) -> tuple[NDArray, NDArray, NDArray]:
    """Return points, mean and standard deviation of several curves over the range in which all have
    values. Between two points a curve is linear, or with `steps` it keeps its last value. The
    deviation of a single curve is zero."""
    curves = [one for one in curves if len(one[0])]
    if not curves:
        none: NDArray = np.zeros(0)
        return none, none, none
    low = max(xs[0] for xs, _ in curves)
    high = min(xs[-1] for xs, _ in curves)
    grid = np.unique(np.concatenate([xs for xs, _ in curves]))
    grid = grid[(grid >= low) & (grid <= high)]
    if len(grid) > MOST:
        grid = grid[np.linspace(0, len(grid) - 1, MOST).round().astype(int)]
    values = np.array([_at(grid, xs, ys, steps=steps) for xs, ys in curves]).reshape(len(curves), len(grid))
    return grid, values.mean(0), values.std(0, ddof=1) if len(curves) > 1 else np.zeros(len(grid))


def _at(grid: NDArray, xs: NDArray, ys: NDArray, *, steps: bool) -> NDArray:
    if not steps:
        return np.interp(grid, xs, ys)
    return np.asarray(ys[np.searchsorted(xs, grid, side="right") - 1])


def _evaluations(one: CurveGroup, line: ChartLine, x: str) -> ChartLine:
    """Return a dot for each evaluation of a run, with the deviation of its returns. For several
    runs there is a dot where their mean changes."""
    run = one.runs[0]
    xs, ys = np.array(line.points).T
    since = curve(run, x, PLAYED)[0] if len(one.runs) == 1 else np.zeros(0)
    known = len(since) > 0 and since[0] <= xs[0]  # runs of an earlier version have neither of them
    spread, played = (_at(xs, *curve(run, x, name), steps=True) if known else 0 * xs for name in (SPREAD, PLAYED))
    new = np.append(True, (ys[1:] != ys[:-1]) | (played[1:] != played[:-1]))
    low, high = (tuple((ys + sign * spread)[new].tolist()) if known else () for sign in (-1, 1))
    return replace(line, points=tuple(itertools.compress(line.points, new)), low=low, high=high, style="dots")


def chart(groups: Sequence[CurveGroup], axis: Axis, metric: str, smooth: int = 1) -> LineChart:
    """Return the chart of one metric over one axis. Each group has a line, and groups of several
    seeds have a band."""
    x, x_label, show_x = AXES[axis]
    known = describe(metric)
    steps = known is not None and known.aggregate == "last"
    drawn = []
    for number, one in enumerate(groups):
        xs, mean, spread = band([curve(run, x, metric, smooth) for run in one.runs], steps=steps)
        points = tuple(zip(xs.tolist(), mean.tolist(), strict=True))
        several = len(one.runs) > 1
        low, high = (tuple((mean + sign * spread).tolist()) if several else () for sign in (-1, 1))
        drawn.append(ChartLine(one.label, points, low, high, number + 1, "steps" if steps else "line"))
        if metric == "eval_return" and points:
            drawn.append(_evaluations(one, drawn[-1], x))
    unit = known.unit if known is not None else ""
    return LineChart(
        name=f"{metric.replace('/', '-')}-{axis}",
        title=USUAL.get(metric, metric),
        x_label=x_label,
        y_label=unit if unit not in ("", "reward") else "return" if metric in USUAL else metric,
        lines=tuple(drawn),
        show_x=show_x,
    )
