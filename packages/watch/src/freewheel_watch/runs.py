"""This module implements the command `freewheel runs`, which lists runs and their states."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from freewheel.errors import Range, UsageError, check_ranges, printable
from freewheel.registry import Command

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from freewheel_watch.listing import RunEntry

COLOURS = {"running": "green", "failed": "red", "damaged": "red", "gone": "yellow", "interrupted": "yellow"}
UNCUT = 100_000  # columns of an output that is not a terminal, so that nothing is cut or folded
COLUMNS = ("run", "env", "algo", "mode", "seed", "steps", "best", "state", "written", "")
NUMBERS = ("seed", "steps", "best", "written")
KEPT = 30  # characters that a long name keeps on a narrow terminal
ROOM = 90  # characters that the other columns take together
GAP = 2  # characters between two columns
UNITS = ((60, "s"), (60, "min"), (24, "h"), (7, "d"), (52, "w"))


@dataclass(frozen=True)
class RunsOptions:
    """List runs, the newest first: what they train, their progress, their best greedy return, and
    their state.

    States: running; ended (its budget is spent); failed; interrupted; gone (its process ended
    without a summary, and `resume` continues it); damaged (its files cannot be read). Runs of one
    command with --seeds form a group.
    """

    runs_dir: str = "runs"
    """The directory that contains the runs, or one run. The first positional argument also sets it."""
    last: Annotated[int | None, Range(least=1)] = None
    """List only this number of newest runs."""
    json: bool = False
    """Print JSON with one object for each run."""

    def __post_init__(self) -> None:
        check_ranges(self)


def _run(argv: Sequence[str]) -> int:
    from freewheel.config import flags

    words, given = flags.read_argv(argv, flags.option_types(RunsOptions))
    if len(words) > 1 or (words and "runs_dir" in given):
        raise UsageError(f"give one directory, not {' '.join([*words, *given.get('runs_dir', ())])}")
    options = flags.build(RunsOptions, given | ({"runs_dir": (words[0],)} if words else {}))
    found = _found(Path(options.runs_dir))[: options.last]
    if options.json:
        sys.stdout.write(json.dumps([dataclasses.asdict(entry) for entry in found], indent=2, default=str) + "\n")
    else:
        _show(found, options.runs_dir)
    return 0


def _found(place: Path) -> list[RunEntry]:
    from freewheel_watch.listing import list_runs, read_entry

    if not place.is_dir():
        raise UsageError(f"there is no directory {place}; train a run first, or name another one")
    own = read_entry(place)
    return list_runs(place) if own is None else [own]


def _show(entries: Sequence[RunEntry], where: str) -> None:
    from freewheel.files.terminal import Terminal

    out = Terminal()
    if not out.is_terminal:
        out = Terminal(width=UNCUT)
    if entries:
        out.print(table(entries, time.time(), out.width))
    else:
        out.print(f"no runs in {where}; train one first")


def table(entries: Sequence[RunEntry], now: float, width: int) -> Table:
    """Return a table of the runs in `width` columns. A group has a line that its members follow."""
    from rich.table import Table

    rows = []
    for entry, members in grouped(entries):
        if members:
            rows.append(_cells(entry, now, name=f"{entry.group}  ({len(members)} seeds)", members=members))
        rows += [_cells(one, now, name=f"  {one.name}" if members else one.name) for one in members or (entry,)]
    shown = Table(box=None, padding=(0, GAP, 0, 0), header_style="dim")
    left = width - GAP
    for name, cells in zip(COLUMNS, zip(*rows, strict=True), strict=True):
        widest = max(len(name), *(cell.cell_len for cell in cells))
        # Names are cut at KEPT on a narrow terminal. The problem of a run, in the last column, takes the rest.
        taken = min(widest, KEPT if name and left < widest + ROOM else max(left, 1) if not name else widest)
        left -= taken + GAP
        shown.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=True, width=taken)
    for row in rows:
        shown.add_row(*row)
    return shown


def grouped(entries: Sequence[RunEntry]) -> Iterator[tuple[RunEntry, Sequence[RunEntry]]]:
    """Yield each run alone, or the newest run of a group with all its members by seed. The newest
    runs come first."""
    groups: dict[str, list[RunEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.group or f"/{entry.name}", []).append(entry)
    for members in groups.values():
        yield members[0], sorted(members, key=lambda one: one.seed or 0) if members[0].group else ()


def _cells(entry: RunEntry, now: float, name: str, members: Sequence[RunEntry] = ()) -> list[Text]:
    from rich.text import Text

    states = list(dict.fromkeys(one.state for one in members)) or [entry.state]
    bests = [one.best for one in members or (entry,) if one.best is not None]
    steps = [one.steps for one in members or (entry,) if one.steps is not None]
    return [
        Text(printable(name), "bold" if members else ""),
        Text(entry.env),
        Text(entry.algo),
        Text(entry.mode),
        Text("" if members or entry.seed is None else str(entry.seed)),
        Text(f"{sum(steps):,}" if steps else "-"),
        Text(f"{statistics.fmean(bests):.1f}" if bests else "-"),
        Text(", ".join(states), COLOURS.get(states[0], "")),
        Text(age(now - entry.updated)),
        Text("" if members else entry.problem, "dim"),
    ]


def age(seconds: float) -> str:
    """Return how long ago something was, in one unit."""
    left = max(0.0, seconds)
    for size, unit in UNITS:
        if left < size:
            return f"{int(left)} {unit}"
        left /= size
    return f"{left:.0f} y"


COMMAND = Command(
    name="runs",
    argument="[DIR]",
    summary="list runs with their settings, progress, best return and state",
    options=lambda _: RunsOptions,
    run=_run,
    order=2,
)
