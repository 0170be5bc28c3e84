"""Sinks: where a run is written to, chosen by name: ours and those of installed packages."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from freewheel.errors import SetupError
from freewheel.metrics.meter import Budget
from freewheel.metrics.targets import Setup
from freewheel.registry import Registry


class Sink(Protocol):
    """A destination for the results of a run."""

    def write(self, row: Mapping[str, Any]) -> None: ...  # one row of metrics
    def note(self, text: str) -> None: ...  # a message for the user
    def close(self, summary: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a sink may know about its run."""

    path: Path  # of the run directory, which exists
    title: str
    budget: Budget
    algorithm: str
    mode: str
    setup: Setup | None = None  # which targets it can reach
    config: Mapping[str, Any] = field(default_factory=dict)  # what config.json says
    resumed: bool = False  # it goes on after the rows that metrics.jsonl has now
    project: str = ""  # for trackers that have projects
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
    needs: tuple[str, str] | None = None  # a module, and the extra of this package that brings it


SINKS: Registry[SinkEntry] = Registry("sink", "SINK", "freewheel.sinks")


def chosen(names: Sequence[str]) -> list[SinkEntry]:
    """The sinks that are on by default, and those of these names; UsageError if there is no such sink, SetupError if it needs
    a package that is missing."""
    named = [SINKS[name] for name in names]
    for entry in named:
        if entry.needs is not None and importlib.util.find_spec(entry.needs[0]) is None:
            raise SetupError(f"--sinks {entry.name} needs {entry.needs[0]}: pip install 'freewheel[{entry.needs[1]}]'")
    return [entry for entry in SINKS.entries.values() if entry.default or entry in named]
