"""This module shows a comparison as text, in table.md and on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freewheel.files import disk
from freewheel_lab.compare.results import CaseInfo, ModeFigures, Results, Spread
from freewheel_lab.plots.numbers import UNKNOWN, duration, megabytes, number, percent, times

if TYPE_CHECKING:
    from rich.console import Console

FILE = "table.md"


@dataclass(frozen=True)
class TextTable:
    """Holds texts in columns. The first column is aligned to the left, and all others to the right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        rules = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
        lines = [
            [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
            for line in (self.header, rules, *self.rows)
        ]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def rich(self, bold: str = "") -> Any:
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for column, name in enumerate(self.header):
            table.add_column(name, justify="left" if column == 0 else "right", no_wrap=column == 0)
        for cells in self.rows:
            table.add_row(*(Text(cell, "bold" if cells[0] == bold else "") for cell in cells))
        return table


SPEED = (
    "mode", "workers x envs", "steps/s", "episodes/s", "time for 100k episodes", "speed-up", "efficiency",
)  # fmt: skip
REST = ("mode", "start-up", "lag mean, max", "return", "at equal time", "memory", "CPU", "GPU", "dropped", "needs")


def speed(results: Results) -> TextTable:
    """Return the table of speeds."""
    return TextTable(SPEED, [_speed(case, results.figures(case.mode)) for case in results.modes])


def rest(results: Results) -> TextTable:
    """Return the table of costs and returns."""
    return TextTable(REST, [_rest(case, results.figures(case.mode)) for case in results.modes])


def scale(results: Results) -> TextTable | None:
    """Return measured and predicted speeds, followed by the extrapolated ones."""
    if results.scale is None:
        return None
    rows = [
        [
            point.mode,
            str(point.workers),
            UNKNOWN if point.measured is None else spread(point.measured),
            number(point.predicted),
            UNKNOWN if point.error is None else f"{100 * point.error:+.0f} %",
            point.failed or point.limit,
            number(point.a_core_each),
        ]
        for point in (*results.scale.points, *results.scale.extrapolated)
    ]
    header = ("mode", "workers", "measured steps/s", "by the law", "error", "waits for", "with a core for each")
    return TextTable(header, rows)


def markdown(results: Results) -> str:
    """Return the text of table.md."""
    parts = [f"# {results.env}, {results.algo}: comparison of the modes", *lines(results)]
    parts += [f"    {results.recommendation.command}"] if results.recommendation is not None else []
    parts += [speed(results).markdown(), rest(results).markdown(), *explained(results)]
    if (law := scale(results)) is not None and results.scale is not None:
        parts += ["## Workers", *results.scale.verdict, law.markdown(), f"Law: {results.scale.law}."]
        parts += ["Assumed: " + "; ".join(results.scale.assumptions) + "."]
    parts.append(origin(results))
    return "\n\n".join(parts) + "\n"


def write(results: Results, folder: Path) -> Path:
    """Write table.md and return its path."""
    disk.replace(folder / FILE, markdown(results).encode())
    return folder / FILE


def show(results: Results, console: Console) -> None:
    """Print the tables and the conclusions."""
    best = results.recommendation.mode if results.recommendation is not None else ""
    for table in filter(None, (speed(results), rest(results), scale(results))):
        console.print(table.rich(best))
        console.print()
    for line in [*(results.scale.verdict if results.scale is not None else ()), *explained(results), *lines(results)]:
        console.print(line, markup=False, soft_wrap=True)
    if results.recommendation is not None:
        console.print(f"  {results.recommendation.command}", style="bold", markup=False, soft_wrap=True)


def lines(results: Results) -> Iterator[str]:
    """Yield the recommendation, and a line if the comparison is incomplete."""
    if results.ended == "interrupted":
        done = len({row.repeat for row in results.rows})
        more = f", and {len(results.scale.rows)} of those of --scale" if results.scale is not None else ""
        yield f"Interrupted: {len(results.rows)} trainings in {done} of {results.repeats} repeats have ended{more}."
    if results.recommendation is not None:
        yield results.recommendation.sentence
    elif not results.rows:
        yield "Nothing was measured."


def explained(results: Results) -> Iterator[str]:
    """Yield lines about failures, about what was compared, and about the meaning of columns."""
    for case in results.modes:
        if case.refused:
            yield f"{case.mode} was skipped: {case.refused}"
        if case.failed:
            yield f"{case.mode} failed: {case.problem}"
    for pair in results.pairs:
        text = pair.sentence if pair.sentence.startswith(pair.what) else f"{pair.what}: {pair.sentence}"
        yield f"{text[0].upper()}{text[1:]}."
    if results.equal_work:
        yield f"{results.equal_work[0].upper()}{results.equal_work[1:]}."
    for one in results.summary:
        if one.episodes_per_s is None:
            yield f"No episode ended in {one.mode}: its trainings were too short"
    lengths = [one.episode_steps for one in results.summary if one.episode_steps]
    if lengths and max(lengths) > 1.1 * min(lengths):
        both = f"{number(min(lengths))} to {number(max(lengths))} steps"
        yield f"Episodes had {both}, because the policies differ: steps/s do not depend on the length, but episodes/s do."
    if results.ideal.steps_per_s is not None:
        yield f"Efficiency is relative to {number(results.ideal.steps_per_s)} steps/s, {results.ideal.formula}."


def origin(results: Results) -> str:
    """Return a line about the machine and the settings of the measurement."""
    hardware = results.hardware
    work = results.work
    versions = ", ".join(f"{name} {version}" for name, version in hardware.get("versions", {}).items() if version)
    machine = f"{hardware.get('cores')} cores ({hardware.get('cpu')}), {hardware.get('memory_gb')} GB, "
    machine += f"GPU: {hardware.get('gpu') or 'none'}"
    what = f"{results.repeats} repeats, seeds {', '.join(map(str, work.seeds))}, {work.envs} envs"
    notes = "".join(f"; {note}" for note in work.notes)
    return f"`{results.command}`, {results.created}, {machine}, {versions}. {what}; median (lowest .. highest){notes}."


def _speed(case: CaseInfo, figures: ModeFigures | None) -> list[str]:
    place = f"{case.workers} x {case.envs // max(1, case.workers)}" if case.envs else UNKNOWN
    if figures is None:
        return [case.mode, place, *[UNKNOWN] * (len(SPEED) - 2)]
    return [
        case.mode,
        place,
        spread(figures.steps_per_s),
        number(_median(figures.episodes_per_s)),
        duration(figures.time_100k_episodes_s),
        times(_median(figures.speedup)),
        percent(figures.efficiency),
    ]


def _rest(case: CaseInfo, figures: ModeFigures | None) -> list[str]:
    needs = ", ".join(case.dependencies) or "nothing"
    if figures is None:
        return [case.mode, *[UNKNOWN] * (len(REST) - 2), needs]
    return [
        case.mode,
        duration(_median(figures.startup_s)),
        UNKNOWN if figures.lag_max is None else f"{number(figures.lag_mean)}, {number(figures.lag_max)}",
        number(_median(figures.return_final)),
        number(figures.return_at),
        megabytes(figures.memory_mb),
        percent(figures.cpu_util),
        percent(figures.gpu_util),
        str(figures.dropped),
        needs,
    ]


def _median(value: Spread | None) -> float | None:
    return None if value is None else value.median


def spread(value: Spread) -> str:
    """Return median (lowest .. highest)."""
    return f"{number(value.median)} ({number(value.low)} .. {number(value.high)})"
