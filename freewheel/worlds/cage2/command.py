"""The command `freewheel workflow search`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from freewheel.registry import Command


def _options(_argv: Sequence[str]) -> type[Any]:
    from freewheel.worlds.cage2.workflow.command import SearchOptions

    return SearchOptions


def _run(argv: Sequence[str]) -> int:
    from freewheel.worlds.cage2.workflow.command import run_command

    return run_command(argv)


COMMAND = Command(
    name="workflow",
    argument="search [ENV]",
    summary="search for the best workflow of CAGE 2:  freewheel workflow search --total-episodes 20000",
    options=_options,
    run=_run,
)
