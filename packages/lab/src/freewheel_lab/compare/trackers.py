"""This module writes the results of a comparison to TensorBoard and wandb: the figures of every
mode, its learning curve, and the table as text."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from freewheel.config import flags
from freewheel.config.resolve import OutputOptions
from freewheel.errors import UsageError
from freewheel.sinks import tensorboard, wandb
from freewheel.sinks.sink import chosen
from freewheel_lab.compare import table
from freewheel_lab.compare.results import ModeFigures, Results, Spread
from freewheel_lab.compare.trainings.cases import GivenOptions

#: Options of `freewheel train` that apply to the comparison alone, because trackers would slow down the measured trainings.
OWN = ("tensorboard", "wandb", "wandb_project", "sinks")
GROUP = "Compare"


@dataclass(frozen=True)
class TrackerOptions:
    """Names the trackers that receive the results in addition to the folder of the comparison."""

    names: tuple[str, ...] = ()
    project: str = ""


@dataclass(frozen=True)
class TrackerReport:
    """Says where the results are and which trackers failed."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def split(given: GivenOptions) -> tuple[GivenOptions, TrackerOptions]:
    """Separate the options of the trainings from those of the trackers. Raise SetupError if a
    tracker is not installed."""
    asked = flags.build(OutputOptions, {name: words for name, words in given.flags.items() if name in OWN})
    kept = {name: words for name, words in given.flags.items() if name not in OWN}
    names = tuple(dict.fromkeys(asked.all_sinks))
    if other := [name for name in names if name not in (tensorboard.SINK.name, wandb.SINK.name)]:
        raise UsageError(f"--sinks {other[0]}: a comparison can be written to tensorboard and wandb only")
    chosen(names)
    return replace(given, flags=kept), TrackerOptions(names, asked.wandb_project)


def write(results: Results, folder: Path, trackers: TrackerOptions) -> TrackerReport:
    """Write the results to all trackers. A tracker that fails becomes a problem in the report,
    because the folder has the results anyway."""
    report = TrackerReport()
    for name in trackers.names:
        try:
            if name == tensorboard.SINK.name:
                report.lines.append(_to_tensorboard(results, folder))
            else:
                report.lines.extend(_to_wandb(results, folder, trackers.project))
        except Exception as error:  # noqa: BLE001 - a tracker is somebody else's code
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            report.problems.append(f"{name} did not accept the results of the comparison: {why}")
    return report


def figures(one: ModeFigures) -> dict[str, float]:
    """Return the figures of a mode by their names in charts. A spread becomes its median, its
    minimum and its maximum."""
    found: dict[str, float] = {}
    for item in dataclasses.fields(one):
        value = getattr(one, item.name)
        if isinstance(value, Spread):
            found[item.name] = value.median
            found |= {f"{item.name}/low": value.low, f"{item.name}/high": value.high}
        elif isinstance(value, int | float):
            found[item.name] = float(value)
    return found


def _to_tensorboard(results: Results, folder: Path) -> str:
    """Write a run for each mode with its figures and its returns over env steps. A separate run
    holds the table."""
    place = folder / tensorboard.FOLDER
    for one in results.summary:
        file = tensorboard.EventFile(place / one.mode)
        file.scalars(0, {f"{GROUP}/{name}": value for name, value in figures(one).items()})
        for row in (row for row in results.rows if (row.mode, row.repeat) == (one.mode, 1)):
            for _, step, reached in row.curve:
                file.scalars(int(step), {} if reached is None else {f"{GROUP}/return over env steps": reached})
        file.close()
    file = tensorboard.EventFile(place / "table")
    file.text("comparison", table.markdown(results))
    file.close()
    return f"TensorBoard: tensorboard --logdir {shlex.quote(str(place))}"


def _to_wandb(results: Results, folder: Path, project: str) -> Iterator[str]:
    """Write one run. It has every figure of every mode as Compare/FIGURE/MODE, the same figures as
    a table, and table.md as notes."""
    tracked = wandb.Tracked(
        folder,
        project=project,
        name=folder.resolve().name,
        job_type="compare",
        tags=[results.algo],
        notes=table.markdown(results),
        config={"env": results.env, "algo": results.algo, "command": results.command, **_hardware(results)},
    )
    rows = {one.mode: figures(one) for one in results.summary}
    names = list(dict.fromkeys(name for values in rows.values() for name in values))
    tracked.log({f"{GROUP}/{name}/{mode}": value for mode, values in rows.items() for name, value in values.items()})
    if rows:
        tracked.table("comparison", ["mode", *names], [[mode, *map(of.get, names)] for mode, of in rows.items()])
    tracked.close(0)
    yield from tracked.news
    if not tracked.online and not tracked.news:
        yield f"wandb: offline; {wandb.how_to_sync(folder)}"


def _hardware(results: Results) -> dict[str, Any]:
    return {
        f"hardware.{name}": value for name, value in results.hardware.items() if isinstance(value, str | int | float)
    }
