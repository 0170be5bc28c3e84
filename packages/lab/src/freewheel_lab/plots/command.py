"""This module implements the command `freewheel plot`, which draws learning curves of runs as
pictures."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from freewheel.errors import FileError, Range, UsageError, check_ranges, printable
from freewheel.files.reach import typed
from freewheel.registry import Command

if TYPE_CHECKING:
    from freewheel_lab.plots.chart import LineChart
    from freewheel_lab.plots.curves import PlottedRun


@dataclass(frozen=True)
class PlotOptions:
    """Draw learning curves as PNG and SVG. Runs that differ only in their seed (NAME-s1, NAME-s2,
    ...) become one curve with a band."""

    x: Literal["steps", "time", "updates"] | None = None
    """The horizontal axis: environment steps, wall time or updates (default: a chart for steps and
    one for time)."""
    y: str = ""
    """A metric of docs/metrics.md, such as loss/policy (default: the returns of training episodes
    and of evaluations)."""
    out: str = ""
    """The file to write, FILE.png or FILE.svg (default: curves.png and curves.svg in the run's
    directory, or in --runs-dir for several runs)."""
    smooth: Annotated[int, Range(least=1, most=100_000)] = 1
    """Replace each point by the mean of this number of points."""
    runs_dir: str = "runs"
    """The directory that contains all runs."""

    def __post_init__(self) -> None:
        check_ranges(self)


def _run(argv: Sequence[str]) -> int:
    from freewheel.config import flags

    names, given = flags.read_argv(argv, flags.option_types(PlotOptions))
    options = flags.build(PlotOptions, given)
    if not names:
        raise UsageError("which runs? freewheel plot NAME ..., directories under runs/")
    from freewheel_lab.plots import picture

    picture.require()
    folders = list(dict.fromkeys(folder for name in names for folder in _folders(name, options.runs_dir)))
    paths = _outputs(options, folders)
    charts, title = _charts(options, folders)
    for path in paths:
        try:
            picture.write(charts, path, columns=len(charts) if options.y else min(len(charts), 2), title=title)
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}; choose another --out") from None
        sys.stdout.write(f"{printable(str(path))}\n")
    return 0


def _folders(name: str, runs_dir: str) -> list[Path]:
    """Return the run of this name, or the runs NAME-s1, NAME-s2, ... in the order of their seeds."""
    from freewheel.run.naming import find_run

    for base in (Path(runs_dir) / name, Path(name)):
        if not (base / "config.json").is_file() and base.parent.is_dir():
            seeds = [
                (int(match[1]), path)
                for path in typed(base.parent).iterdir()
                if (match := re.fullmatch(re.escape(base.name) + r"-s(\d+)", path.name)) and path.is_dir()
            ]
            if seeds:
                return [path for _, path in sorted(seeds)]
    return [find_run(name, runs_dir)]


def _outputs(options: PlotOptions, folders: Sequence[Path]) -> list[Path]:
    from freewheel_lab.plots.picture import FORMATS

    if not options.out:
        base = folders[0] if len(folders) == 1 else typed(Path(options.runs_dir))
        return [(base if base.is_dir() else Path()) / f"curves.{ending}" for ending in FORMATS]
    path = Path(options.out)
    if path.suffix not in [f".{ending}" for ending in FORMATS]:
        raise UsageError(f"--out must end in .png or .svg, not {options.out}")
    return [typed(path.parent) / path.name]


def _charts(options: PlotOptions, folders: Sequence[Path]) -> tuple[list[LineChart], str]:
    from freewheel.files.stdout import complain
    from freewheel_lab.plots import curves

    metrics = [options.y] if options.y else list(curves.USUAL)
    runs = _runs(folders, [*(name for name, _, _ in curves.AXES.values()), *metrics, curves.SPREAD, curves.PLAYED])
    if options.y:
        curves.check_metric(options.y, runs)
    groups = curves.group(runs)
    axes: list[curves.Axis] = [options.x] if options.x else ["steps", "time"]
    charts = [curves.chart(groups, axis, metric, options.smooth) for metric in metrics for axis in axes]
    drawn = [chart for chart in charts if not chart.empty]
    if not drawn:
        reason = f"these runs have no values of {options.y}" if options.y else "no episode of these runs has ended"
        raise UsageError(f"nothing to draw: {reason}")
    for line in dict.fromkeys([*_missing(drawn), *curves.ended_early(groups)]):
        complain(line)
    if len(groups) == 1:
        return drawn, groups[0].label
    worlds = {re.sub(r"^.*/(?=[^/]*\.py\b)", "", str(run.config.get("env", ""))) for run in runs}
    return drawn, worlds.pop() if len(worlds) == 1 else ""


def _missing(charts: Sequence[LineChart]) -> list[str]:
    return [f"{line.label} has no {chart.title} to draw" for chart in charts for line in chart.lines if not line.points]


def _runs(folders: Sequence[Path], columns: Sequence[str]) -> list[PlottedRun]:
    """Read all runs that can be read, and report the others."""
    from freewheel.files.stdout import complain
    from freewheel_lab.plots.curves import read_run

    runs = []
    problems = []
    for folder in folders:
        try:
            runs.append(read_run(folder, columns, complain))
        except FileError as error:
            problems.append(str(error))
    if not runs:
        raise FileError(problems[0])
    for problem in problems:
        complain(f"{problem}; the run is skipped")
    return runs


COMMAND = Command(
    name="plot",
    argument="RUN ...",
    summary="draw learning curves as PNG and SVG; seeds become a band",
    options=lambda _: PlotOptions,
    run=_run,
    order=5,
)
