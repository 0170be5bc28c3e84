"""Where modules of the user's own are found: in the folder of one that was asked for by name or file, and by nobody else.

Such a folder stands at the end of sys.path, behind the standard library and all that is installed. Its finder hands out the
modules that were asked for, and those that they import themselves. It hides them from all others: what a package looks for that
is not installed (jax, wandb) is not taken from a folder because a run of somebody else lies there. A folder that Python or its
user has put on sys.path is left as it is.
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
VARIABLE = "FREEWHEEL_OWN"  # tells processes that are started what is admitted
SAFE = "PYTHONSAFEPATH"  # a Python that is started with it does not put the current folder on sys.path
LOADERS = (
    (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
    (machinery.SourceFileLoader, machinery.SOURCE_SUFFIXES),
    (machinery.SourcelessFileLoader, machinery.BYTECODE_SUFFIXES),
)
folders: list[str] = []
asked: set[str] = set()  # names, without what follows a dot, of modules that anybody may have from these folders
found: set[str] = set()  # and of the user's own that were found, which may import others


class _OwnFolder(machinery.FileFinder):
    def find_spec(self, fullname: str, target: ModuleType | None = None) -> machinery.ModuleSpec | None:
        if fullname not in asked and not _imported_by_own():
            return None
        spec = super().find_spec(fullname, target)
        if spec is not None:
            found.add(fullname)
        return spec


def _imported_by_own() -> bool:
    """Whether the code that imports right now is in a module of the user's."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((importlib.__file__, "<frozen importlib")):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).partition(".")[0] in found


def _hook(path: str) -> _OwnFolder:
    if path not in folders:
        raise ImportError
    return _OwnFolder(path, *LOADERS)


def admit(folder: Path, *names: str) -> None:
    """The user wants modules of these names, and they may be in this folder."""
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
    """What to do about a module that was not found; empty: no folder of the user's has it."""
    for folder in folders:
        if name and (Path(folder, f"{name}.py").is_file() or Path(folder, name).is_dir()):
            return f": {folder} has a '{name}', which only modules there may import; set PYTHONPATH={folder} if you trust it"
    return ""


def state() -> State:
    """What is admitted, for `restore` in another process."""
    return list(folders), sorted(asked | found)


def restore(places: Iterable[str], names: Iterable[str]) -> None:
    for place in places:
        if place in sys.path and place not in folders:  # it came with the sys.path of the process that admitted it
            sys.path.remove(place)
        admit(Path(place), *names)


def python(module: str) -> list[str]:
    """The words that run a module of this package, which finds nothing in the current folder unless this package is there."""
    checkout = Path(__file__).parents[2] == Path.cwd()
    return [sys.executable, *(() if checkout else ("-P",)), "-m", module]


def variables() -> dict[str, str]:
    """For a Python that is to find what this one finds: none of it by way of the current folder."""
    paths = [os.path.abspath(folder) for folder in sys.path if folder not in folders]
    return {"PYTHONPATH": os.pathsep.join(paths), SAFE: os.environ.get(SAFE, VARIABLE), VARIABLE: json.dumps(state())}


if VARIABLE in os.environ:
    restore(*json.loads(os.environ.pop(VARIABLE)))
if os.environ.get(SAFE) == VARIABLE:
    del os.environ[SAFE]  # it was for this process alone
