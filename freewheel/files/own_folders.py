"""Finds the user's modules in the folder of one that was requested by name or file, and hides them from other code.

Such a folder is at the end of sys.path, after the standard library and all installed packages. Its finder returns the
requested modules, and the modules that these import, but hides them from all other code: a package that looks for a
missing optional module (jax, wandb) does not get a file from a folder that may hold somebody else's run. A folder that
Python or its user has put on sys.path is left as it is.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterable
from importlib import machinery
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

State: TypeAlias = tuple[list[str], list[str]]
VARIABLE = "FREEWHEEL_OWN"  # passes `state` to child processes
SAFE = "PYTHONSAFEPATH"  # if it is set, Python does not put the current folder on sys.path
LOADERS = (
    (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
    (machinery.SourceFileLoader, machinery.SOURCE_SUFFIXES),
    (machinery.SourcelessFileLoader, machinery.BYTECODE_SUFFIXES),
)
folders: list[str] = []
asked: set[str] = set()  # top-level names of modules that any code may import from these folders
found: set[str] = set()  # names of the user's modules that were found; these may import others


class _OwnFolder(machinery.FileFinder):
    def find_spec(self, fullname: str, target: ModuleType | None = None) -> machinery.ModuleSpec | None:
        if fullname not in asked and not _imported_by_own():
            return None
        spec = super().find_spec(fullname, target)
        if spec is not None:
            found.add(fullname)
        return spec


def _imported_by_own() -> bool:
    """Return whether the importing code is in one of the user's modules."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((importlib.__file__, "<frozen importlib")):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).partition(".")[0] in found


def _hook(path: str) -> _OwnFolder:
    if path not in folders:
        raise ImportError
    return _OwnFolder(path, *LOADERS)


def admit(folder: Path, *names: str) -> None:
    """Allow imports of these modules, which the user has requested, from this folder."""
    asked.update(names)
    place = os.path.abspath(folder)
    if place not in sys.path:
        folders.append(place)
        sys.path.append(place)
    if place in folders:
        sys.path_importer_cache.pop(place, None)
    if _hook not in sys.path_hooks:
        sys.path_hooks.insert(0, _hook)


def withheld(name: str | None) -> str:
    """Return what to do about a module that was not found; empty: none of the user's folders has it."""
    for folder in folders:
        if name and (Path(folder, f"{name}.py").is_file() or Path(folder, name).is_dir()):
            return f": {folder} has a '{name}', which only modules there may import; set PYTHONPATH={folder} if you trust it"
    return ""


def state() -> State:
    """Return the admitted folders and modules, for `restore` in another process."""
    return list(folders), sorted(asked | found)


def restore(places: Iterable[str], names: Iterable[str]) -> None:
    for place in places:
        if place in sys.path and place not in folders:  # it came with the sys.path of the process that admitted it
            sys.path.remove(place)
        admit(Path(place), *names)


def python(module: str) -> list[str]:
    """Return the command that runs a module of this package, without the current folder unless it has this package."""
    checkout = Path(__file__).parents[2] == Path.cwd()
    return [sys.executable, *(() if checkout else ("-P",)), "-m", module]


def variables() -> dict[str, str]:
    """Return variables for another Python to find the same modules, but none because of its current folder."""
    paths = [os.path.abspath(folder) for folder in sys.path if folder not in folders]
    return {"PYTHONPATH": os.pathsep.join(paths), SAFE: os.environ.get(SAFE, VARIABLE), VARIABLE: json.dumps(state())}


if VARIABLE in os.environ:
    restore(*json.loads(os.environ.pop(VARIABLE)))
if os.environ.get(SAFE) == VARIABLE:
    del os.environ[SAFE]  # it was for this process only
