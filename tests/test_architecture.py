"""Rules that a linter cannot see: what importing costs, what a file may do, what a module says it is."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from freewheel.config import signature
from tests.support.places import PACKAGE, ROOT
from tests.support.runs import python

SOURCES = sorted(PACKAGE.rglob("*.py"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "benchmarks/README.md"])

#: What CPU workers, --help and the config import: none of it may import torch, except inside functions.
WITHOUT_TORCH = """errors core seeding ledger registry loop metrics/* rollout/factory rollout/runner rollout/single_env_runner
    rollout/kernel rollout/probe pacing/* transport/**/* policies/spec policies/numpy_actor policies/heads/* envs/gym envs/loop
    envs/lane envs/spaces envs/vector envs/processes envs/legacy envs/fault_tolerant envs/family collect/* learn/spec
    learn/*/config config/* cli/main run/checkpoints/checkpoint
    sinks/* testing/* worlds/straggler worlds/cage2/env worlds/cage2/family"""
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


def test_what_cpu_workers_import_does_without_torch() -> None:
    found = {pattern: sorted(PACKAGE.glob(f"{pattern}.py")) for pattern in WITHOUT_TORCH.split()}
    assert [pattern for pattern, paths in found.items() if not paths] == []
    names = [module_name(path) for paths in found.values() for path in paths]
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
def test_a_package_imports_nothing_by_itself(path: Path) -> None:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    assert [type(node) for node in body] == [ast.Expr], "__init__.py is a docstring and nothing else"


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_files_are_data(path: Path) -> None:
    assert list(forbidden(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("source", "calls"),
    [
        ("import pickle\npickle.load(file)", ["pickle.load"]),
        ("import pickle as p\np.Unpickler(file).load()", ["pickle.Unpickler"]),
        ("from torch import load\nload(path)", ["torch.load"]),
        ("from torch import load as read\nread(path)", ["torch.load"]),
        ("def f():\n    import yaml\n    return yaml.load(text)", ["yaml.load"]),
        ("eval(text)", ["eval"]),
        ("net.eval()\ncloudpickle.loads(pipe)\nsafetensors.load(data)  # not torch.load()", []),
    ],
)
def test_the_search_for_forbidden_calls_finds_exactly_them(source: str, calls: list[str]) -> None:
    assert list(forbidden(source)) == calls


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_files_that_a_document_names_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!http)([^)#\s]+)\)", text)
    assert [link for link in links if not (path.parent / link).exists()] == []
    named = re.findall(r"`((?:freewheel|tests|benchmarks|docs|examples|scripts)/[\w/.-]+(?<!-v0))`", text)
    assert path.name == "CHANGELOG.md" or [name for name in named if not (ROOT / name).exists()] == []


def test_the_typed_signature_of_train_has_every_option() -> None:
    fresh = signature.FILE.read_text(encoding="utf-8") == signature.source()
    assert fresh, (
        "options have changed: run `python -m freewheel.config.signature` and commit freewheel/config/arguments.py"
    )
