"""This module lists the runs of a directory with their states. It reads a few small files of each
run and tolerates any damage to them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from freewheel.errors import FileError, printable
from freewheel.files import read
from freewheel.files.reach import typed
from freewheel.run.live.following import state_of
from freewheel.run.live.status import STATUS
from freewheel.run.naming import CONFIG, LOCK, METRICS, SUMMARY

T = TypeVar("T")

SEEDS = "-seeds.json"  # NAME-seeds.json is the table of the runs NAME-s1, NAME-s2, ... of one command
MEMBER = re.compile(r"(?P<group>.+)-s\d+")


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """Describes one run directory."""

    name: str
    path: Path
    env: str = ""
    algo: str = ""
    mode: str = ""
    seed: int | None = None
    steps: int | None = None
    wall_s: float | None = None  # seconds of training
    best: float | None = None  # greedy return of the best weights
    returned: float | None = None  # mean return of the latest training episodes
    state: str = "gone"  # one of following.STATES, or damaged
    updated: float = 0.0  # when a file was last written, in unix seconds
    group: str = ""  # name of the --seeds command that started it
    problem: str = ""  # what is wrong with the directory, or why the run failed


def list_runs(directory: Path, over: Callable[[], bool] = lambda: False) -> list[RunEntry]:
    """Return all runs of a directory, the newest first. Other directories are ignored. The listing
    stops when `over` returns True."""
    try:
        with os.scandir(directory) as found:
            entries = list(found)
    except OSError as error:
        raise FileError(f"{directory} cannot be read: {error.strerror}") from None
    groups = {entry.name.removesuffix(SEEDS) for entry in entries if entry.name.endswith(SEEDS)}
    folders = [Path(entry.path) for entry in entries if entry.is_dir()]
    read_ones = (read_entry(folder, groups) for folder in takewhile(lambda _: not over(), folders))
    return sorted(filter(None, read_ones), key=lambda entry: (-entry.updated, entry.name))


def read_entry(folder: Path, groups: set[str] | None = None) -> RunEntry | None:
    """Return the run in this directory, or None if there is none. `groups` are the names of
    commands with --seeds."""
    name = folder.name
    folder = typed(folder)
    updated = max((_written(folder / name) for name in (CONFIG, METRICS, STATUS, SUMMARY, LOCK)), default=0.0)
    if not updated:
        return None
    member = MEMBER.fullmatch(name)
    group = member["group"] if member and member["group"] in (groups or ()) else ""
    problems: list[str] = []
    config = _object(folder / CONFIG, problems)
    summary = _object(folder / SUMMARY, problems) if _written(folder / SUMMARY) else None
    state = state_of(folder, summary)
    known = {} if summary is not None else _object(folder / STATUS, []) or read.newest_row(folder / METRICS)
    facts: Mapping[str, Any] = summary or {} if summary is not None else known or {}
    if problems and state != "running":
        state = "damaged"
    failed = summary.get("error") if summary is not None and state == "failed" else ""
    return RunEntry(
        name=name,
        path=folder,
        env=printable(_found(config, "env", str) or ""),
        algo=printable(_found(config, "algo", str) or ""),
        mode=printable(_found(config, "mode", str) or ""),
        seed=_found(config, "seed", int),
        steps=_found(facts, "env_steps", int),
        wall_s=_number(facts, "wall_s"),
        best=_number(facts, "best_eval"),
        returned=_number(facts, "return_mean"),
        state=state,
        updated=updated,
        group=group,
        problem=printable(" ".join((problems or [str(failed or "")])[0].split())),
    )


def _written(path: Path) -> float:
    with suppress(OSError):
        return path.lstat().st_mtime
    return 0.0


def _object(path: Path, problems: list[str]) -> Mapping[str, Any] | None:
    try:
        return read.json_object(path)
    except FileError as error:
        problems.append(str(error))
        return None


def _found(found: Mapping[str, Any] | None, name: str, kind: type[T]) -> T | None:
    """Return the value of this name if it has this type."""
    value = (found or {}).get(name)
    return value if isinstance(value, kind) and not isinstance(value, bool) else None


def _number(found: Mapping[str, Any] | None, name: str) -> float | None:
    whole = _found(found, name, int)
    return _found(found, name, float) if whole is None else float(whole)
