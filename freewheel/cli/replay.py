"""The command `freewheel replay`: repeats the learning of a recorded run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from freewheel.cli.eval import parse
from freewheel.errors import COUNT, check_ranges
from freewheel.registry import Command


@dataclass(frozen=True)
class ReplayOptions:
    """Repeat the learning of a run that was recorded with --record-schedule, bit for bit, and report any difference."""

    run: str = ""
    """The run: a name under --runs-dir or a path. It may also be the first or last word."""
    runs_dir: str = "runs"
    """The directory that contains all runs."""
    env: str = ""
    """An environment to use instead of the run's, e.g. one that a script or a notebook defined (./file.py:Toy)."""
    until: Annotated[int | None, COUNT] = None
    """Stop after this many environment steps."""
    until_update: Annotated[int | None, COUNT] = None
    """Stop after this many updates."""
    out: str = ""
    """A new directory for the weights at the end of the replay, to evaluate or play them. Nothing is written into the run."""
    trust: bool = False
    """Run code that the run names (its environment, its network, ...), even if you did not make it on this machine."""
    inline: bool = False
    """Run environments in this process instead of one process per worker: slower, but a debugger can step into them."""

    def __post_init__(self) -> None:
        check_ranges(self)


def _run(argv: Sequence[str]) -> int:
    """Return 0 if the replay is identical, else 1."""
    from pathlib import Path

    options = parse(ReplayOptions, argv, "replay")
    from freewheel.run.planning import print_line
    from freewheel.run.saved import open_run
    from freewheel.run.schedule.replay import Until, replay

    saved = open_run(options.run, options.runs_dir, options.env or None, trust=options.trust, use="train")
    until = Until(steps=options.until, updates=options.until_update)
    out = Path(options.out) if options.out else None
    result = replay(saved, until=until, out=out, inline=options.inline, report=print_line)
    print_line("\n".join(result.lines()))
    return 0 if result.identical else 1


COMMAND = Command(
    name="replay",
    argument="RUN",
    summary="repeat the learning of a run recorded with --record-schedule, bit for bit",
    options=lambda _: ReplayOptions,
    run=_run,
    order=5,
)
