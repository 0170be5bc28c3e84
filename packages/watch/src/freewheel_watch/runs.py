"""The command `freewheel runs`: which runs there are, and how they stand."""

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
UNCUT = 100_000  # columns of an output that is no terminal: nothing is cut or folded there
COLUMNS = ("run", "env", "algo", "mode", "seed", "steps", "best", "state", "written", "")
NUMBERS = ("seed", "steps", "best", "written")
KEPT, ROOM, GAP = 30, 90, 2  # columns that a long name keeps on a narrow terminal; that the others take; between two
UNITS = ((60, "s"), (60, "min"), (24, "h"), (7, "d"), (52, "w"))


@dataclass(frozen=True)
class RunsOptions:
    """List runs, the newest first: what they train, how far they are, their best greedy return, and their state.

    States: running; ended (its budget is spent), failed, interrupted; gone (its process has ended without a summary: `resume`
    goes on); damaged (its files cannot be read). Runs of one command with --seeds stand together.
    """

    runs_dir: str = "runs"
    """The directory that contains the runs, or one run. Also the first word."""
    last: Annotated[int | None, Range(least=1)] = None
    """Only so many, the newest."""
    json: bool = False
    """As JSON, one object a run."""

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
    """The runs as they are listed, in so many columns; the members of a group follow a line about it."""
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
        # Names are cut at KEPT on a narrow terminal; what is wrong with a run, in the last column, takes what is left.
        taken = min(widest, KEPT if name and left < widest + ROOM else max(left, 1) if not name else widest)
        left -= taken + GAP
        shown.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=True, width=taken)
    for row in rows:
        shown.add_row(*row)
    return shown


def grouped(entries: Sequence[RunEntry]) -> Iterator[tuple[RunEntry, Sequence[RunEntry]]]:
    """Each run alone, or the newest of a group with all of them by seed; the newest first."""
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
    """How long ago, in one unit."""
    left = max(0.0, seconds)
    for size, unit in UNITS:
        if left < size:
            return f"{int(left)} {unit}"
        left /= size
    return f"{left:.0f} y"


COMMAND = Command(
    name="runs",
    argument="[DIR]",
    summary="list runs: what they train, how far they are, their best return and their state",
    options=lambda _: RunsOptions,
    run=_run,
    order=2,
)
