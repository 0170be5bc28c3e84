"""Send the user's code to actors on other nodes, where the user's files are not installed.

A class is usually sent as the name of its module, which the other node imports. The script itself and the user's modules that
are single files are sent with their contents. Packages are not sent, because they may hold more than code; they must be installed
on every node.
"""

from __future__ import annotations

import importlib
import site
import socket
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from freewheel.errors import SetupError
from freewheel.transport import forkserver


def packed(value: Any, what: str, modules: Sequence[str]) -> bytes:
    """Pickle a value for actors on any node. `modules` are the names of modules that the value will need."""
    for name in modules:
        with suppress(Exception):  # the error is reported where the module is used
            importlib.import_module(name)
    try:
        with _by_value([module for module in list(sys.modules.values()) if is_own_file(module)]):
            return forkserver.pickled(value, what)
    except SetupError:  # a module holds an object that cannot be pickled, such as a lock
        return forkserver.pickled(value, what)


def unpacked(blob: bytes) -> Any:
    """Return the value that was packed; raise SetupError if this node lacks a module that it needs."""
    try:
        return cloudpickle.loads(blob)
    except ModuleNotFoundError as error:
        raise SetupError(missing(error)) from error


def missing(error: ModuleNotFoundError) -> str:
    """Describe what to install on this node."""
    package = (error.name or "?").partition(".")[0]
    where = f"the node {socket.gethostname()} ({sys.executable})"
    return f"{where} has no module '{error.name}'; install {package} on every node of the cluster"


def is_own_file(module: ModuleType) -> bool:
    """Return whether a module is a single file of the user that is not installed."""
    file = getattr(module, "__file__", None)
    if not file or "." in module.__name__ or hasattr(module, "__path__") or module.__name__ == "__main__":
        return False
    path = Path(file)
    return path.suffix == ".py" and not any(path.is_relative_to(folder) for folder in _installed())


def _installed() -> Iterator[str]:
    yield from (
        path for name, path in sysconfig.get_paths().items() if name in ("stdlib", "platstdlib", "purelib", "platlib")
    )
    yield from site.getsitepackages()
    yield site.getusersitepackages()


@contextmanager
def _by_value(modules: Sequence[ModuleType]) -> Iterator[None]:
    new = [module for module in modules if module.__name__ not in cloudpickle.list_registry_pickle_by_value()]
    for module in new:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in new:
            cloudpickle.unregister_pickle_by_value(module)
