"""Keeps the measured cost of an environment in the user's cache. An entry is valid while the environment's source, the
installed packages and the machine are the same. Only numbers are read back, never the spec of an environment."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib.machinery import PathFinder
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, get_type_hints

from freewheel.config.resolve import Config
from freewheel.errors import FileError
from freewheel.files import read
from freewheel.registry import installed_version
from freewheel.rollout.probe import BRIEF, BUDGET, EnvCost, processor, usable_cores

FOLDER = "FREEWHEEL_CACHE"  # the variable with the cache folder; empty: nothing is kept
MOST_FILES, SIZE = 200, 64 << 10  # most entries, and most bytes of one entry
LARGEST, LATEST = 1e15, 4e9  # bounds of a valid number and of a valid measuring time
MOST_STOLEN = 0.5  # share of the time of a row; a measurement that lost more to other processes is not kept
NUMBERS = [one.name for one in fields(EnvCost) if one.name not in ("spec", "failure", "closed", "portable", "batched")]


@dataclass(frozen=True)
class Known:
    """The numbers of an EnvCost, and when they were measured, in words."""

    numbers: dict[str, Any]
    when: str


def seconds(config: Config, budget: float | None = None) -> float:
    """Return the seconds of a measurement. By default it is brief if no option depends on the time of a step."""
    usual = BUDGET if config.collector.needs_step_time else BRIEF
    return usual if budget is None else budget


def recall(config: Config, budget: float | None = None) -> Known | None:
    """Return the kept measurement of an environment that took this many seconds or more, if there is one."""
    for path in (_path(config, one) for one in sorted({seconds(config, budget), BUDGET}, reverse=True)):
        if path is not None:
            with suppress(FileError, KeyError):
                data, hints = read.json_object(path, SIZE), get_type_hints(EnvCost)
                found = {name: read.value_of(hints[name], data[name], name) for name in NUMBERS}
                when = read.value_of(float, data["when"], "when")
                if 0 <= when <= LATEST and found["steps"] > 0 and _bounded(found.values()):
                    return Known(found, time.strftime("%Y-%m-%d %H:%M", time.localtime(when)))
    return None


def remember(config: Config, budget: float, cost: EnvCost) -> None:
    """Keep a measurement, unless a call failed, it was incomplete, or other processes used the processor too much."""
    whole = cost.fast > 0 and not cost.failures and cost.closed and cost.portable
    if not whole or cost.stolen > MOST_STOLEN * cost.row or (path := _path(config, budget)) is None:
        return
    data = json.dumps({**{name: getattr(cost, name) for name in NUMBERS}, "when": time.time()})
    with suppress(OSError):  # a full or read-only disk: the next run measures again
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=path.parent, delete=False) as file:  # only its owner can read it
            file.write(data)
        os.replace(file.name, path)
        for old in sorted(path.parent.iterdir(), key=lambda one: -one.stat().st_mtime)[MOST_FILES:]:
            old.unlink()


def _bounded(values: Any) -> bool:
    return all(_bounded(one) if isinstance(one, tuple) else 0 <= one <= LARGEST for one in values)


def _path(config: Config, budget: float) -> Path | None:
    """Return the file of an entry, named by a hash of everything the cost depends on; None: that is not known."""
    env, place = config.env, os.environ.get(FOLDER)
    sources = [_source(module) for module in env.modules]
    if place == "" or not sources or None in sources or " at 0x" in repr(env):  # addresses differ in every run
        return None
    packages = sorted(one.name for folder in sys.path for one in Path(folder).glob("*.dist-info"))
    machine = platform.machine(), platform.python_version(), processor(), usable_cores()
    name = hashlib.sha256(repr((repr(env), sources, packages, machine, installed_version())).encode()).hexdigest()[:32]
    with suppress(RuntimeError):  # this user has no home directory
        folder = place or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "freewheel")
        return Path(folder, "measured", f"{name}-{'whole' if budget >= BUDGET else 'brief'}.json")
    return None


def _source(module: str) -> str | None:
    """Return a hash of a module's file and the Python files in its folder, without importing anything."""
    top, *rest = module.split(".")
    if (spec := PathFinder.find_spec(top)) is None:
        return None
    inside = [Path(place, *rest) for place in spec.submodule_search_locations or ()]
    places = (
        [name for one in inside for name in (one.with_suffix(".py"), one / "__init__.py")] if rest else [spec.origin]
    )
    file = next((Path(one) for one in places if one and Path(one).is_file()), None)
    try:
        beside = () if file is None else sorted({file, *file.parent.glob("*.py")})
        return hashlib.sha256(b"\0".join(one.read_bytes() for one in beside)).hexdigest() if beside else None
    except OSError:
        return None
