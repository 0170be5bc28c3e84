"""Sinks: where a run is written to, chosen by name: ours and those of installed packages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from freewheel.core import Sink
from freewheel.metrics.meter import Budget
from freewheel.metrics.targets import Setup
from freewheel.registry import Registry


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a sink may know about its run."""

    path: Path  # of the run directory, which exists
    title: str
    budget: Budget
    algorithm: str
    mode: str
    setup: Setup | None = None  # which targets it can reach
    quiet: bool = False  # nothing is to be printed
    console: Literal["live", "classic"] = "live"
    say: Callable[[str], None] = lambda _: None  # tells the user something, through all sinks


class Outputs(NamedTuple):
    """What a run prints and writes to, beside what its config names."""

    quiet: bool  # nothing is to be printed
    sinks: Sequence[Sink]


@dataclass(frozen=True)
class SinkEntry:
    """One sink that can be chosen: `--sinks NAME`, or always where it is on by default."""

    name: str
    open: Callable[[RunInfo], Sink | None]  # None: it has nothing to write in this run
    default: bool = False


SINKS: Registry[SinkEntry] = Registry("sink", "SINK", "freewheel.sinks")


def chosen(names: Sequence[str]) -> list[SinkEntry]:
    """The sinks that are on by default, and those of these names; UsageError if there is no such sink."""
    named = [SINKS[name] for name in names]
    return [entry for entry in SINKS.entries.values() if entry.default or entry in named]
