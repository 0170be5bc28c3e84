"""Registries of everything that is chosen by name (worlds, algorithms, modes, sinks, commands, heads), built-in or from
installed packages; and imports of the user's modules, by name or file.

An entry is an object with a `name`. Built-in entries, or tuples of them, are found by a module attribute; entries of
other packages are found by the entry points in their pyproject.toml:

    kind         attribute    built-in modules                  entry points
    worlds       FAMILY       freewheel.envs.*, .testing.*      freewheel.worlds
    algorithms   ALGORITHM    freewheel.learn.*.config          freewheel.algorithms
    modes        MODE         freewheel.collect.*               freewheel.modes
    sinks        SINK         freewheel.sinks.*                 freewheel.sinks
    commands     COMMAND      freewheel.cli.*                   freewheel.commands
    campaigns    CAMPAIGN     none                              freewheel.campaigns
    heads        HEAD         freewheel.policies.heads.*        freewheel.heads

An entry is imported when its registry is first read. Its module must be light: heavy imports belong in functions.

packages.toml lists the names that packages of this project add, so that an error can say what to install.

User code is named package.module:Thing or path/to/file.py:Thing; :Thing may be omitted if only one thing fits.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
import re
import sys
import sysconfig
import tomllib
import traceback
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar

from freewheel.errors import SetupError, UsageError, cut, nearest, text_of
from freewheel.files import own_folders


class Named(Protocol):
    """An object that can be registered."""

    @property
    def name(self) -> str: ...


Entry = TypeVar("Entry", bound=Named)
STANDARD_LIBRARY = sysconfig.get_path("stdlib")


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of `freewheel`."""

    name: str
    argument: str  # what follows the name in the help: ENV, RUN or nothing
    summary: str  # one line
    options: Callable[[Sequence[str]], type[Any]]  # the dataclass whose fields its --help shows, for these words
    run: Callable[[Sequence[str]], int]  # takes the words after the name, returns the exit code
    order: int = 100  # its place in `freewheel --help`
    help: Callable[[Sequence[str]], int] | None = None  # prints its help if `options` alone is not enough


class Registry(Mapping[str, Entry]):
    """All entries of one kind, by name."""

    def __init__(self, kind: str, attribute: str, *rooms: str, leaf: str = "") -> None:
        self.kind, self.group = kind, f"freewheel.{kind}s"
        self._attribute, self._rooms, self._leaf = attribute, rooms, leaf

    @cached_property
    def ours(self) -> dict[str, Entry]:
        """The built-in entries."""
        return {entry.name: entry for entry in self._ours()}

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """All entries by name, built-in ones first; SetupError if two have the same name."""
        found = dict(self.ours)
        for entry in self._installed():
            if entry.name in found:
                raise SetupError(f"two {self.kind}s have the name '{entry.name}': uninstall one of the packages")
            found[entry.name] = entry
        return found

    def __getitem__(self, name: str) -> Entry:
        """Return the entry; UsageError, with similar names, if there is none. Built-in names need no other packages."""
        return self.choose(name, {})

    def choose(self, name: str, instead: Mapping[str, str], *also: str) -> Entry:
        """Like [name]; the error gives the remedy of a name in `instead`, and also suggests the names in `also`."""
        if name in self.ours:
            return self.ours[name]
        if name not in self.entries:
            require_package(f"{self.kind}s", name, f"the {self.kind} '{name}'")
            if answer := instead.get(name.lower()):
                raise UsageError(f"there is no {self.kind} '{name}': {answer}")
            raise UsageError(f"unknown {self.kind} '{name}'{nearest(name, [*self.entries, *also])}")
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def _ours(self) -> Iterator[Entry]:
        for room in self._rooms:
            for module in _modules(room, self._leaf):
                if _defines(module, self._attribute):
                    found = getattr(importlib.import_module(module), self._attribute)
                    yield from found if isinstance(found, tuple) else (found,)

    def _installed(self) -> Iterator[Entry]:
        for point in sorted(metadata.entry_points(group=self.group), key=lambda point: point.name):
            if point.dist is not None and str(point.dist.locate_file("")) in own_folders.folders:
                continue  # metadata next to a user's module, not an installed package
            try:
                entry: Entry = point.load()
            except Exception as error:
                what = f"the {self.kind} '{point.name}' of another package cannot be loaded ({point.value}: {error})"
                raise SetupError(f"{what}; repair or uninstall that package") from error
            yield entry


@functools.cache
def _packages() -> Mapping[str, Mapping[str, Sequence[str]]]:
    return tomllib.loads((Path(__file__).parent / "packages.toml").read_text(encoding="utf-8"))


def names_of_packages(kind: str) -> list[str]:
    """Return the names of this kind that packages of this project add, installed or not."""
    return [name for names in _packages().values() for name in names.get(kind, ())]


def package_of(kind: str, name: str) -> str | None:
    """Return the package of this project that adds this name, if it is not installed."""
    found = next((package for package, names in _packages().items() if name in names.get(kind, ())), None)
    return None if found is None or _is_installed(found) else found


def require_package(kind: str, name: str, what: str) -> None:
    """Raise UsageError if `what` is added by a package of this project that is not installed."""
    if package := package_of(kind, name):
        raise UsageError(f"{what} is in a package of its own: pip install {package}")


def _is_installed(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def installed_version() -> str:
    """Return the version of the installed engine."""
    return metadata.version("freewheel") if _is_installed("freewheel") else "not installed"


def moved(module: str) -> str:
    """Return the present name of a module that older files call by a former one (freewheel.moved_modules)."""
    for point in metadata.entry_points(group="freewheel.moved_modules"):
        if f"{module}.".startswith(f"{point.name}."):
            return point.value + module.removeprefix(point.name)
    return module


def _modules(room: str, leaf: str) -> Iterator[str]:
    """Yield the modules of a package, and those called `leaf` in its subfolders, without importing them."""
    folder = importlib.import_module(room)
    for found in pkgutil.iter_modules(folder.__path__, f"{room}."):
        if not found.ispkg:
            yield found.name
        elif leaf and (Path(folder.__path__[0]) / found.name.rpartition(".")[2] / f"{leaf}.py").is_file():
            yield f"{found.name}.{leaf}"


def _defines(module: str, attribute: str) -> bool:
    """Return whether a module's source assigns this name; importing the module to find out could import torch."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return False
    text = Path(spec.origin).read_text(encoding="utf-8")
    return re.search(rf"^{attribute}\b[^=\n]*= ", text, re.MULTILINE) is not None


def is_file(place: str) -> bool:
    """Return whether a place names a Python file rather than a module."""
    return place.endswith(".py")


def names_code(name: str) -> bool:
    """Return whether a name refers to code to import: package.module:Thing, or a file."""
    return ":" in name or is_file(name)


def own_file(module: str) -> Path | None:
    """Return the file in the current directory from which a top-level module is imported; None if it is elsewhere."""
    file = Path.cwd() / f"{module}.py"
    if not module.isidentifier() or not file.is_file():
        return None
    known = sys.modules.get(module)
    spec = known.__spec__ if known is not None else importlib.util.find_spec(module)
    return file if spec is None or spec.origin is None or Path(spec.origin).resolve() == file.resolve() else None


def importable(file: Path) -> str:
    """Make a file importable from its folder, or its package's folder, and return its module name."""
    folder, parts = file.absolute().parent, [file.stem]
    while (folder / "__init__.py").is_file():
        folder, parts = folder.parent, [folder.name, *parts]
    own_folders.admit(folder, parts[0])
    return ".".join(parts)


def own_module(place: str) -> ModuleType:
    """Import a user's module, given by its file, or by its name if it is installed or in the current folder.
    SetupError, with the module's traceback if it raises."""
    place = place if is_file(place) else moved(place)
    root = place.partition(".")[0]
    if root.isidentifier() and not is_file(place) and (Path(f"{root}.py").is_file() or Path(root).is_dir()):
        own_folders.admit(Path.cwd(), root)
    try:
        return _from_file(Path(place)) if is_file(place) else importlib.import_module(place)
    except ModuleNotFoundError as error:
        if is_file(place) or not f"{place}.".startswith(f"{error.name}."):
            why = own_folders.withheld(error.name)
            raise SetupError(
                f"cannot import '{place}': it imports '{error.name}', which is not installed{why}"
            ) from error
        near = [file.stem for file in Path.cwd().glob("*.py")]
        hint = nearest(place, near, ": install it, go to its folder, or write path/to/file.py:Name")
        raise SetupError(f"cannot import '{place}': there is no module '{error.name}'{hint}") from None
    except (Exception, SystemExit) as error:
        raise _broken(place, error) from error


def own_object(option: str, place: str, kind: str) -> Any:
    """Return the object package.module:Name or path/to/file.py:Name for an option whose value names a `kind`."""
    module, _, name = place.rpartition(":")
    what = f"{option} '{place}' cannot be imported"
    if not module or not name:
        raise SetupError(f"{what}: write package.module:{kind} or path/to/file.py:{kind}")
    try:
        known = vars(own_module(module))
    except SetupError as error:
        raise SetupError(f"{what}: {error}") from error
    if name not in known and module == "__main__":
        what = f"{option} '{name}' was defined in a script or a notebook, and is known only there"
        raise SetupError(f"{what}: put it into a file, path/to/file.py:{name}, or define it before the call in Python")
    if name not in known:
        near = [own for own, value in known.items() if callable(value) and not own.startswith("_")]
        raise SetupError(f"{what}: '{module}' has no '{name}'{nearest(name, near, f'; write package.module:{kind}')}")
    refuse_builtin(known[name], f"{option} '{place}'")
    return known[name]


def refuse_builtin(thing: object, what: str) -> None:
    """Raise SetupError if `thing` is a part of Python (os.system), where no environment, network or hook is defined."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    module = getattr(thing, "__module__", None) or type(thing).__module__
    root = sys.modules.get(str(module).partition(".")[0])
    file = getattr(root, "__file__", None)
    own = Path(file).is_relative_to(STANDARD_LIBRARY) and "site-packages" not in file if file else root is not None
    if own and module != "__main__" and str(module).partition(".")[0] in sys.stdlib_module_names:
        raise SetupError(f"{what} is a part of Python and cannot be used here; name an object of your own code")


Own = TypeVar("Own")


def with_defaults(found: Own, base: type[Any]) -> Own:
    """Return another package's object if it derives from this base of core.py, else a wrapper that adds the base's
    defaults for missing members."""
    if isinstance(found, base):
        return found
    made: Own = changed(found, base)
    return made


def changed(found: Any, base: type[Any], **methods: Callable[..., Any]) -> Any:
    """Return an object of this base that behaves like `found`, except for these methods. Its other methods are the
    bound methods of `found`, so they cost nothing extra."""
    members: dict[str, Any] = {}
    for name in dir(base):
        if not name.startswith("_") and hasattr(found, name):
            value = getattr(found, name)
            members[name] = staticmethod(value) if callable(value) else _attribute_of(found, name)
    if hasattr(found, "__exit__"):
        members["__enter__"], members["__exit__"] = _entering(found), staticmethod(found.__exit__)
    members |= {name: staticmethod(method) for name, method in methods.items()}
    return types.new_class(type(found).__name__, (base,), {}, lambda namespace: namespace.update(members))()


def _attribute_of(found: Any, name: str) -> property:
    return property(lambda _: getattr(found, name), lambda _, value: setattr(found, name, value))


def _entering(found: Any) -> Callable[[Any], Any]:
    def enter(own: Any) -> Any:
        found.__enter__()
        return own

    return enter


def _from_file(file: Path) -> ModuleType:
    if not file.is_file():
        near = [other.name for other in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise SetupError(f"there is no file {file}{nearest(file.name, near, '')}")
    name = importable(file)
    known = sys.modules.get(name)
    spec = known.__spec__ if known is not None else importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == file.resolve():
        return importlib.import_module(name)
    other = f"{file.stem}_{zlib.crc32(str(file).encode()):08x}"  # another module has its plain name
    if other in sys.modules:
        return sys.modules[other]
    spec = importlib.util.spec_from_file_location(other, file)
    assert spec is not None, "it is a file"
    assert spec.loader is not None, "it is a file"
    module = sys.modules[other] = importlib.util.module_from_spec(spec)
    own_folders.found.add(other)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[other]
        raise
    return module


def _broken(place: str, error: BaseException) -> SetupError:
    """Return the error for a module that raises on import: a summary, then the traceback from its first line."""
    if isinstance(error, SetupError):
        return error
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and _is_machinery(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    message = cut(" ".join(text_of(error).split()))
    return SetupError(f"cannot import '{place}': it raised {type(error).__name__}: {message}\n{text}")


def _is_machinery(file: str) -> bool:
    return file in (__file__, importlib.__file__) or file.startswith("<frozen importlib")
