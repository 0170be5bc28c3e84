"""The command `freewheel workflow`. It is a separate file because `freewheel --help` imports it and must not import more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from freewheel.registry import Command


def _search_options(_argv: Sequence[str]) -> type[Any]:
    from freewheel_cage2.workflow.command import SearchOptions

    return SearchOptions


def _search(argv: Sequence[str]) -> int:
    from freewheel_cage2.workflow.command import run_command

    return run_command(argv)


_SEARCH = "search for the best workflow of CAGE 2:  freewheel workflow search --total-episodes 20000"
COMMAND = Command(name="workflow", argument="search [ENV]", summary=_SEARCH, options=_search_options, run=_search)
