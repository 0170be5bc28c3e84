"""Run directories: choose and claim a name that no other run uses, and find a run by its name or path."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from freewheel.errors import SetupError, UsageError, nearest
from freewheel.files.lock import FileLock
from freewheel.files.reach import typed
from freewheel.run.checkpoints import checkpoint

if TYPE_CHECKING:  # not needed by a process that only loads a policy
    from freewheel.config.resolve import Config

CONFIG, SUMMARY, METRICS, LOCK, CHECKPOINTS = "config.json", "summary.json", "metrics.jsonl", ".lock", "checkpoints"
LINKS = ("best", "latest")
LONGEST = 255  # bytes of a name in a path, on all usual file systems
ROOM = 25  # bytes of these that are reserved for additions to a run's name: -2, -seed3, .part-
ASKED = ("flag", "argument")  # sources of a name for this run only; a name from a file may serve several runs


@dataclass(frozen=True)
class RunName:
    """A name under a folder. If NAME is taken, the first free one of NAME-2, NAME-3, ... is used, unless `exact`."""

    folder: Path
    base: str
    exact: bool = False
    number: int = 1

    @property
    def name(self) -> str:
        return self.base if self.number == 1 else f"{self.base}-{self.number}"

    @property
    def path(self) -> Path:
        return self.folder / self.name

    def free(self) -> Self:
        """Return the first name that is free now; SetupError if the name is exact and taken."""
        numbers = [self.number] if self.exact else itertools.count(self.number)
        for name in (replace(self, number=number) for number in numbers):
            if not name.path.exists() or (self.exact and _abandoned(name.path)):
                return name
        raise SetupError(f"run '{self.name}' exists in {self.folder}; choose another --run or remove it")

    def claim(self) -> Self:
        """Create the directory; skip a name that another process has taken in the meantime."""
        try:
            checkpoint.make_private(self.folder)
            while True:
                name = self.free()
                try:
                    name.path.mkdir(mode=0o700)
                except FileExistsError:
                    if not (self.exact and _abandoned(name.path)):
                        continue
                return name
        except OSError as error:
            raise SetupError(f"cannot create {self.path}: {error.strerror}; choose another --runs-dir") from None


def _abandoned(path: Path) -> bool:
    """Return whether a run was killed when it had only locked its directory. A new run has to take the lock."""
    there = {name for name in os.listdir(path) if not name.startswith(checkpoint.PART)} if path.is_dir() else set()
    return there == {LOCK} and FileLock.holder(path / LOCK) is None


def name_run(config: Config) -> RunName:
    """Return a free name for a run; SetupError if the requested name is taken or its folder is not writable."""
    folder, given = typed(Path(config.run.output.runs_dir)), config.run.output.name
    check_length(folder)
    check_length(Path(given), LONGEST - ROOM)
    parent = next((place for place in (folder, *folder.absolute().parents) if place.exists()), folder)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        reason = f"{parent} is not a writable directory; choose another --runs-dir"
        raise SetupError(f"cannot write runs under {folder}: {reason}")
    usual = re.sub(r"[^\w.-]+", "_", f"{config.env.label}-{config.algo}-{config.mode}")
    usual = os.fsencode(usual)[: LONGEST - ROOM].decode(errors="ignore")
    return RunName(folder, given or usual, exact=bool(given) and config.sources.get("run") in ASKED).free()


def check_length(path: Path, most: int = LONGEST) -> None:
    """Raise UsageError if a name in this path is too long for a file."""
    if long := next((part for part in path.parts if len(os.fsencode(part)) > most), ""):
        size = len(os.fsencode(long))
        raise UsageError(f"'{long[:30]}...' has {size} bytes, a name here has at most {most}; choose a shorter one")


@dataclass(frozen=True)
class Result:
    """A finished run."""

    path: Path
    summary: Mapping[str, Any]

    @property
    def exit_code(self) -> int:
        return int(self.summary["exit_code"])


@dataclass(frozen=True)
class RunRef:
    """An existing run and the choice of one of its checkpoints."""

    run: Path
    which: str  # best, latest or a step

    @property
    def checkpoints(self) -> Path:
        return self.run / CHECKPOINTS


def locate(name: str, runs_dir: str, which: str = "", usual: str = "best") -> RunRef:
    """Resolve RUN, RUN@best, RUN@latest, RUN@STEP or the path of a checkpoint; `which`: a separate choice."""
    for place in (Path(runs_dir) / name, Path(name)):
        if place.parent.name == CHECKPOINTS and (place.parents[1] / CONFIG).is_file():
            run, chosen = typed(place.parents[1]), place.name
            break
    else:
        written, at, word = name.rpartition("@")
        chosen = word if at and (word in LINKS or checkpoint.Name.parse(word)) else ""
        run = find_run(written if chosen else name, runs_dir)
    if which and chosen and which != chosen:
        raise UsageError(f"which weights of {run.name}, {chosen} or {which}? leave out one of them")
    return RunRef(run, chosen or which or usual)


def find_run(name: str, runs_dir: str) -> Path:
    """Return the directory of a run, given by its name under runs_dir or by its path."""
    check_length(Path(runs_dir) / name)
    for place in (Path(runs_dir) / name, Path(name)):
        if (place / CONFIG).is_file():
            return typed(place)
    folder = Path(runs_dir)
    known = [entry.name for entry in os.scandir(folder) if entry.is_dir()] if folder.is_dir() else []
    raise UsageError(f"no run '{name}' in {runs_dir}" + (nearest(name, known) if known else "; train one first"))
