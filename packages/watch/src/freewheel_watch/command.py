"""This module implements the command `freewheel watch`, which shows runs on a live page or in the
terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from freewheel.errors import Range, SetupError, UsageError, check_ranges
from freewheel.registry import Command

NICE = 10  # increment of the niceness, so that trainings have priority


@dataclass(frozen=True)
class WatchOptions:
    """Show runs while they train, and compare them, on a page that only this machine can open.
    Trainings are not affected."""

    run: str = ""
    """The run to open first: a name under --runs-dir or a path (default: the newest active run).
    The first positional argument also sets it."""
    runs_dir: str = "runs"
    """The directory that contains all runs."""
    port: Annotated[int | None, Range(least=0, most=65535)] = None
    """Port of 127.0.0.1 for the page. 0 selects any free port (default: 8765, or any free port if
    it is taken)."""
    open: bool | None = None
    """Open a browser (default: only if there is a display)."""
    tui: bool = False
    """Show the run in this terminal instead of a page."""

    def __post_init__(self) -> None:
        check_ranges(self)


def _parse(argv: Sequence[str]) -> WatchOptions:
    from freewheel.config import flags, synonyms

    positional, given = flags.read_argv(argv, flags.option_types(WatchOptions), answers=synonyms.ABOUT_RUNS)
    if len(positional) > 1:
        raise UsageError(f"give one run, not {' '.join(positional)}; the page compares several")
    return flags.build(WatchOptions, {**given, **({"run": (positional[0],)} if positional else {})})


def _run(argv: Sequence[str]) -> int:
    """Run the command until Ctrl-C."""
    options = _parse(argv)
    directory, chosen = _find(options)
    if options.tui:
        from freewheel_watch.tui import run_tui

        return run_tui(directory, chosen)
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise SetupError(
            "the page needs starlette and uvicorn: pip install 'freewheel-watch[dash]', or use --tui"
        ) from None
    import asyncio

    from freewheel_watch.hub import RunHub
    from freewheel_watch.server import listen, serve

    os.nice(NICE)
    listener = listen(options.port)

    def ready(address: str) -> None:
        _tell(directory, chosen, address)
        if options.open if options.open is not None else _has_display():
            _open(address)

    asyncio.run(serve(RunHub(directory, chosen), listener, ready))
    sys.stdout.write("the page has ended; trainings continue\n")
    return 0


def _find(options: WatchOptions) -> tuple[Path, str | None]:
    """Return the directory of all runs, and the name of the run to open."""
    if not options.run:
        return Path(options.runs_dir), None
    from freewheel.run.naming import find_run

    run = find_run(options.run, options.runs_dir).absolute()
    return (Path(options.runs_dir) if run.parent == Path(options.runs_dir).absolute() else run.parent), run.name


def _tell(directory: Path, chosen: str | None, address: str) -> None:
    port = address.split(":")[2].partition("/")[0]
    what = f"run {chosen} in {directory}" if chosen else f"the runs in {directory}"
    missing = "" if directory.is_dir() else " (which does not exist yet; runs appear when a training begins)"
    sys.stdout.write(
        f"watching {what}{missing}: open this address, which works once\n\n  {address}\n\n"
        f"from another machine: ssh -L {port}:127.0.0.1:{port} THIS_MACHINE, then open the same address there\n"
        "Ctrl-C ends the page but not the trainings\n"
    )
    sys.stdout.flush()


def _has_display() -> bool:
    return sys.stdout.isatty() and bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _open(address: str) -> None:
    import webbrowser

    if not webbrowser.open(address):
        sys.stdout.write("no browser could be opened; open the address yourself\n")


COMMAND = Command(
    name="watch",
    argument="[RUN]",
    summary="show a run live on a page of this machine, and compare runs",
    options=lambda _: WatchOptions,
    run=_run,
    order=7,
)
