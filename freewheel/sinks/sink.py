"""Sinks: destinations of a run's output, from this package and from installed ones, chosen by name."""

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
    """Facts about a run for its sinks."""

    path: Path  # the run directory, which exists
    title: str
    budget: Budget
    algorithm: str
    mode: str
    setup: Setup | None = None  # decides which targets the run can reach
    config: Mapping[str, Any] = field(default_factory=dict)  # the content of config.json
    resumed: bool = False  # the run continues after the present rows of metrics.jsonl
    project: str = ""  # for trackers that have projects
    quiet: bool = False  # print nothing
    console: Literal["live", "classic"] = "live"
    say: Callable[[str], None] = lambda _: None  # sends a message to the user through all sinks


class Outputs(NamedTuple):
    """Output settings of a run in addition to its config."""

    quiet: bool  # print nothing
    sinks: Sequence[Sink]


@dataclass(frozen=True)
class SinkEntry:
    """A sink that `--sinks NAME` adds to a run, or that is on by default."""

    name: str
    open: Callable[[RunInfo], Sink | None]  # returns None if there is nothing to write in this run
    default: bool = False
    needs: tuple[str, str] | None = None  # a module, and the extra of this package that installs it


SINKS: Registry[SinkEntry] = Registry("sink", "SINK", "freewheel.sinks")


def chosen(names: Sequence[str]) -> list[SinkEntry]:
    """Return the sinks that are on by default and the named sinks. UsageError if a name is unknown, SetupError if a
    sink needs a package that is missing."""
    named = [SINKS[name] for name in names]
    for entry in named:
        if entry.needs is not None and importlib.util.find_spec(entry.needs[0]) is None:
            raise SetupError(f"--sinks {entry.name} needs {entry.needs[0]}: pip install 'freewheel[{entry.needs[1]}]'")
    return [entry for entry in SINKS.entries.values() if entry.default or entry in named]
