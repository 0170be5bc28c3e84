"""Rules of the house that a linter cannot see: what importing costs, what a file may do, what a module says it is."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.places import PACKAGE

SOURCES = sorted(PACKAGE.rglob("*.py"))

#: What CPU workers import (DESIGN 2); rooms that are still to be built are passed over.
WEST_WING = (
    "core.py",
    "kernel.py",
    "errors.py",
    "seeding.py",
    "ledger.py",
    "meter.py",
    "testing.py",
    "rollout/recipe.py",
    "rollout/cpu.py",
    "rollout/solo.py",
    "transport/*.py",
    "policies/spec.py",
    "policies/actor.py",
    "envs/gym.py",
    "envs/loop.py",
    "envs/cyborg.py",
    "worlds/cage2.py",
    "worlds/straggler.py",
    "collect/*.py",
    "learn/settings.py",
)
FORBIDDEN_CALLS = frozenset(
    f"{place}{name}"
    for place, names in {
        "": ("eval", "exec"),
        "pickle.": ("load", "loads", "Unpickler"),
        "marshal.": ("load", "loads"),
        "shelve.": ("open",),
        "torch.": ("load",),
        "yaml.": ("load", "full_load", "unsafe_load"),
    }.items()
    for name in names
)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    result = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 0, result.stderr
    return result


def forbidden(source: str) -> Iterator[str]:
    """Calls that would run or unpickle what a file says, under whatever name they were imported."""
    names: dict[str, str] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            root, dot, rest = ast.unparse(node.func).partition(".")
            call = names.get(root, root) + dot + rest
            if call in FORBIDDEN_CALLS:
                yield call


def test_the_west_wing_does_without_torch() -> None:
    names = [module_name(path) for pattern in WEST_WING for path in sorted(PACKAGE.glob(pattern))]
    assert "freewheel.core" in names
    script = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
"""
    python("-c", script)


def test_the_bare_package_imports_nothing_of_its_own() -> None:
    loaded = python("-c", "import sys, freewheel; print(*sys.modules)").stdout.split()
    assert "freewheel" in loaded
    assert not [name for name in loaded if name.startswith(("freewheel.", "numpy", "torch", "gymnasium"))]


def test_help_answers_at_once_and_without_torch() -> None:
    listing = python("-X", "importtime", "-m", "freewheel", "--help")
    imported = {line.rpartition("|")[2].strip() for line in listing.stderr.splitlines()}
    assert "freewheel.cli.main" in imported
    assert "torch" not in imported
    assert "train" in listing.stdout

    def seconds() -> float:
        start = time.perf_counter()
        python("-m", "freewheel", "--help")
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.7


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_a_module_says_in_a_sentence_what_it_is(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    opening = " ".join(docstring.partition("\n\n")[0].split())
    assert re.fullmatch(r"\S.*[.:]", opening), f"{path.name} opens with {opening!r}"


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*/**/__init__.py")), ids=module_name)
def test_a_room_imports_nothing_by_itself(path: Path) -> None:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    assert [type(node) for node in body] == [ast.Expr], "a room's __init__.py is its docstring and nothing else"


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_files_are_data(path: Path) -> None:
    assert list(forbidden(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("import pickle\npickle.load(file)", "pickle.load"),
        ("import pickle as p\np.Unpickler(file).load()", "pickle.Unpickler"),
        ("from torch import load\nload(path)", "torch.load"),
        ("from torch import load as read\nread(path)", "torch.load"),
        ("def f():\n    import yaml\n    return yaml.load(text)", "yaml.load"),
        ("eval(text)", "eval"),
    ],
)
def test_the_search_for_forbidden_calls_finds_them(source: str, call: str) -> None:
    assert list(forbidden(source)) == [call]


def test_the_search_for_forbidden_calls_leaves_others_alone() -> None:
    assert list(forbidden("net.eval()\ncloudpickle.loads(pipe)\nsafetensors.load(data)  # not torch.load()")) == []
