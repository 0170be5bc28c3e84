"""This module implements the command `freewheel timeline`, which shows in the terminal or on a page
what every part of a run did."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from freewheel.errors import Range, UsageError, check_ranges, printable
from freewheel.registry import Command

if TYPE_CHECKING:
    from freewheel.timeline.model import Timeline


@dataclass(frozen=True)
class TimelineOptions:
    """Show the timeline of a run that was trained with --trace, also while it runs: who worked, who
    waited, for whom and why.

    trace.json in the run's directory contains the same data for ui.perfetto.dev.
    """

    run: str = ""
    """The run: a name under --runs-dir or a path. The first positional argument also sets it."""
    begin: Annotated[float | None, Range(least=0)] = None
    """Show what came after this second of the run (default: the beginning, or the last --seconds)."""
    seconds: Annotated[float | None, Range(above=0)] = None
    """Show this number of seconds: the last ones, or those after --begin."""
    html: str = ""
    """Write a zoomable page to this file instead of drawing in the terminal. The page needs no
    network."""
    runs_dir: str = "runs"
    """The directory that contains all runs."""

    def __post_init__(self) -> None:
        check_ranges(self)


def _run(argv: Sequence[str]) -> int:
    from freewheel.config import flags

    names, given = flags.read_argv(argv, flags.option_types(TimelineOptions), answers={"out": "say --html FILE"})
    runs = names or [name for name in given.get("run", ()) if name]
    if len(runs) != 1:
        raise UsageError("which run? freewheel timeline NAME, a directory under runs/")
    options = flags.build(TimelineOptions, given | {"run": tuple(runs)})
    from freewheel.run.naming import find_run
    from freewheel.timeline.chrome import read

    folder = find_run(options.run, options.runs_dir)
    shown = _window(read(folder), options)
    if options.html:
        _write_page(shown, Path(options.html), folder.resolve().name)
    else:
        from freewheel.timeline.terminal import show

        show(shown)
    return 0


def _window(timeline: Timeline, options: TimelineOptions) -> Timeline:
    seconds = timeline.end_s if options.seconds is None else options.seconds
    if options.begin is None:
        return timeline.last(seconds)
    if options.begin >= timeline.end_s:
        raise UsageError(f"--begin {options.begin:g} is after the end: the timeline ends at {timeline.end_s:.1f} s")
    return timeline.window(max(options.begin, timeline.begin_s), min(options.begin + seconds, timeline.end_s))


def _write_page(timeline: Timeline, path: Path, title: str) -> None:
    from freewheel.files import disk
    from freewheel_watch.timeline.page import page

    try:
        disk.deliver(path, page(timeline, title).encode())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another --html") from None
    sys.stdout.write(f"{printable(str(path))}\n")


COMMAND = Command(
    name="timeline",
    argument="RUN",
    summary="show who worked, who waited and for whom, in a run trained with --trace",
    options=lambda _: TimelineOptions,
    run=_run,
    order=6,
)
